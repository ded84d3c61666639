// SPDX-License-Identifier: Apache-2.0
// Masking of a 64 x 64 fragment of transposed scores. Invisible pairs become 0 by selection, after all arithmetic.
#pragma once
#include "fragments.hpp"
#include "work.hpp"

namespace flamia::sm90::backward {

/// Which of a thread's 16 queries of a step see its two keys. Bit k of half h, 16 h + k, stands for its k-th query, 8 (k / 2) + 2 c + k % 2.
using Visible = std::uint32_t;

/// How many of the thread's queries, counted from its first (2 c), come before offset `end`.
FLAMIA_LAYOUT_FN int queries_before(int end) {
  if (end <= 0) return 0;
  return end >= kQueryStep ? 16 : end / 8 * 2 + (end % 8 < 2 ? end % 8 : 2);
}
FLAMIA_LAYOUT_FN std::uint32_t visible_bits(int first, int end) {
  const int from = queries_before(first), to = queries_before(end);
  return to <= from ? 0u : (1u << to) - (1u << from);
}

__device__ __forceinline__ Visible visible_queries(Window window, int key, int step_query, int length, int lane) {
  const int origin = step_query + 2 * (lane % 4);
  const QueryRange first = queries_of_key(window, key, length), second = queries_of_key(window, key + 8, length);
  return visible_bits(first.first - origin, first.end - origin) | visible_bits(second.first - origin, second.end - origin) << 16;
}

/// Whether the pair of accumulator register i is visible.
FLAMIA_LAYOUT_FN bool sees(Visible visible, int i) { return (visible >> (16 * (i / 2 % 2) + i / 4 * 2 + i % 2) & 1) != 0; }

}  // namespace flamia::sm90::backward
