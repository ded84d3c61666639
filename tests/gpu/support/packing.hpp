// SPDX-License-Identifier: Apache-2.0
// Random packings of documents: long ones, one-token ones, empty ones, tokens left over.
#pragma once
#include <cstdint>
#include <random>
#include <vector>

namespace flamia::test {

using Random = std::mt19937_64;

inline std::int64_t below(Random& random, std::int64_t n) {
  return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
}

struct Packing {
  std::vector<std::int32_t> cu_seqlens;
  std::int64_t tokens = 0;
  std::int64_t documents() const { return static_cast<std::int64_t>(cu_seqlens.size()) - 1; }
};

inline Packing pack(const std::vector<std::int32_t>& lengths, std::int64_t left_over = 0) {
  Packing packing{{0}, 0};
  for (const std::int32_t length : lengths) packing.cu_seqlens.push_back(packing.cu_seqlens.back() + length);
  packing.tokens = packing.cu_seqlens.back() + left_over;
  return packing;
}

inline Packing random_packing(Random& random, std::int64_t longest, std::int64_t most_documents) {
  std::vector<std::int32_t> lengths(static_cast<std::size_t>(below(random, most_documents + 1)));
  for (std::int32_t& length : lengths) {
    const std::int64_t kind = below(random, 8);
    length = static_cast<std::int32_t>(kind == 0   ? 0
                                       : kind == 1 ? 1
                                       : kind == 2 ? 1 + below(random, 40)
                                       : kind == 3 ? 32 * (1 + below(random, longest / 32))
                                                   : 1 + below(random, longest));
  }
  return pack(lengths, below(random, 3) == 0 ? 1 + below(random, 50) : 0);
}

}  // namespace flamia::test
