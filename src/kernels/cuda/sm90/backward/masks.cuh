// SPDX-License-Identifier: Apache-2.0
// Masking of a 64 x 64 fragment of transposed scores. Invisible pairs become 0 by selection, after all arithmetic.
#pragma once
#include "fragments.hpp"
#include "work.hpp"

namespace flamia::sm90::backward {

/// Queries of the step that see a thread's two keys, relative to the thread's first query (2 c).
struct VisibleQueries {
  int first[2], end[2];
};

__device__ __forceinline__ VisibleQueries visible_queries(Window window, const int (&key)[2], int step_query, int length, int lane) {
  VisibleQueries visible;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const QueryRange range = queries_of_key(window, key[half], length);
    visible.first[half] = range.first - step_query - 2 * (lane % 4);
    visible.end[half] = range.end - step_query - 2 * (lane % 4);
  }
  return visible;
}

__device__ __forceinline__ void clear_invisible(float (&x)[kScores], const VisibleQueries& visible) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int query = 8 * (i / 4) + i % 2, half = i / 2 % 2;
    if (query < visible.first[half] || query >= visible.end[half]) x[i] = 0.0f;
  }
}

}  // namespace flamia::sm90::backward
