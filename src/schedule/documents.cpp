// SPDX-License-Identifier: Apache-2.0
#include "schedule/documents.hpp"

#include <string>

namespace flamia::schedule {

Status Documents::create(std::span<const std::int32_t> cu_seqlens, std::int64_t tokens, Documents* documents) {
  const auto entry = [&](std::size_t b) { return "cu_seqlens[" + std::to_string(b) + "] = " + std::to_string(cu_seqlens[b]); };
  if (cu_seqlens.empty()) return Status::invalid("cu_seqlens has no entries; it needs documents + 1 of them, the first 0");
  if (cu_seqlens[0] != 0) return Status::invalid(entry(0) + " but must be 0: the first document starts at the first token");
  Documents made;
  made.tokens_ = tokens;
  made.ranges_.reserve(cu_seqlens.size() - 1);
  for (std::size_t b = 1; b < cu_seqlens.size(); ++b) {
    if (cu_seqlens[b] < cu_seqlens[b - 1])
      return Status::invalid(entry(b) + " is less than " + entry(b - 1) + "; offsets must not decrease");
    if (cu_seqlens[b] > tokens)
      return Status::invalid(entry(b) + " exceeds the " + std::to_string(tokens) +
                             " tokens of q; documents must end inside the row");
    made.ranges_.push_back({cu_seqlens[b - 1], std::int64_t{cu_seqlens[b]} - cu_seqlens[b - 1]});
  }
  made.covered_ = cu_seqlens.back();
  *documents = std::move(made);
  return {};
}

Documents Documents::single(std::int64_t tokens) {
  Documents made;
  made.ranges_.push_back({0, tokens});
  made.tokens_ = made.covered_ = tokens;
  return made;
}

std::int64_t Documents::blocks(std::int64_t block) const {
  std::int64_t sum = 0;
  for (const DocumentRange& range : ranges_) sum += (range.length + block - 1) / block;
  return sum;
}

}  // namespace flamia::schedule
