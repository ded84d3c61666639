// SPDX-License-Identifier: Apache-2.0
// Row reference `phase32` (numerics, section 8): the first tile a row sees sets m to its maximum, rounded up to 1/32; later tiles
// only raise it, by whole steps.
#pragma once
#include "tile_output.cuh"

namespace flamia::sm90::forward {

inline constexpr float kOffGrid = 65536.0f;  // beyond it 1/32 is no longer representable: m is the maximum itself

__device__ __forceinline__ float next_phase32_reference(float reference, float maximum) {
  const float first = __fmul_rn(ceilf(__fmul_rn(maximum, 32.0f)), 1.0f / 32.0f);
  const float raised = __fadd_rn(reference, ceilf(__fadd_rn(maximum, -reference)));
  if (fabsf(maximum) >= kOffGrid) return fmaxf(reference, maximum);
  return reference == kNoReference ? first : raised;
}

/// Raises m where the tile's maximum exceeds it. The vote of the warp only skips work: a row's m depends on its own scores.
template <class Config>
__device__ __forceinline__ void raise_reference(RowState<Config>& state, const float (&scores)[Config::kScores],
                                                const ScoreFactors<Config>& factors) {
  const float maximum[2] = {thread_maximum<Config>(scores, factors, 0), thread_maximum<Config>(scores, factors, 1)};
  if (!__any_sync(kFullWarp, maximum[0] > state.reference[0] || maximum[1] > state.reference[1])) return;
  float next[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float row_maximum = quad_maximum(maximum[half]), before = state.reference[half];
    next[half] = row_maximum > before ? next_phase32_reference(before, row_maximum) : before;
  }
  move_references<Config>(state, next);
}

}  // namespace flamia::sm90::forward
