// SPDX-License-Identifier: Apache-2.0
// Documents of a packed row on the host (CPU backend, CLI). The GPU builds its own table on the device (src/schedule/cuda).
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "flamia/status.hpp"

namespace flamia::schedule {

struct DocumentRange {
  std::int64_t start;   // first token
  std::int64_t length;  // 0 for an empty document
};

class Documents {
 public:
  /// Checks cu_seqlens: at least one entry, first is 0, never decreases, last <= tokens. The message names the entry at fault.
  static Status create(std::span<const std::int32_t> cu_seqlens, std::int64_t tokens, Documents* documents);
  /// One document of `tokens` tokens.
  static Documents single(std::int64_t tokens);

  std::span<const DocumentRange> ranges() const { return ranges_; }
  std::int64_t tokens() const { return tokens_; }    // rows of the tensors
  std::int64_t covered() const { return covered_; }  // tokens that belong to a document; the rest follow
  std::int64_t blocks(std::int64_t block) const;     // sum over documents of ceil(length / block)

 private:
  std::vector<DocumentRange> ranges_;
  std::int64_t tokens_ = 0;
  std::int64_t covered_ = 0;
};

}  // namespace flamia::schedule
