// SPDX-License-Identifier: Apache-2.0
// Row reference `phase32` (numerics, section 8): the first tile a row sees sets m to its maximum, rounded up to 1/32; later tiles
// only raise it, by whole steps. Rows that are careful under `tilesum` follow the same rule.
#pragma once
#include "tile_output.cuh"

namespace flamia::sm90::forward {

/// tilesum: the sign of the row's parked scale says that its maximum is looked at before its codes are made, as with phase32.
__device__ __forceinline__ bool is_careful(float scale) { return __float_as_int(scale) < 0; }

__device__ __forceinline__ bool off_grid(float reference) { return (fabsf(reference) >= kGridEnd) & (reference != kNoReference); }

__device__ __forceinline__ float next_phase32_reference(float reference, float maximum) {
  const float first = __fmul_rn(ceilf(__fmul_rn(maximum, 32.0f)), 1.0f / 32.0f);
  const float raised = __fadd_rn(reference, ceilf(__fadd_rn(maximum, -reference)));
  const float on_grid = reference == kNoReference ? first : raised;
  return fabsf(maximum) >= kGridEnd ? fmaxf(reference, maximum) : on_grid;
}

/// Raises m where the tile's maximum exceeds it. The vote of the warp only skips work: a row's m depends on its own scores.
template <class Config>
__device__ __forceinline__ void raise_reference(RowState<Config>& state, const float (&scores)[Config::kScores],
                                                const ScoreFactors<Config>& factors, const float2* parked) {
  float maximum[2] = {thread_maximum<Config>(scores, factors, 0), thread_maximum<Config>(scores, factors, 1)};
  if constexpr (Config::kReference == RowReference::tilesum) {
    const float2 row = *parked;
    maximum[0] = is_careful(row.x) ? maximum[0] : kMinusInfinity;
    maximum[1] = is_careful(row.y) ? maximum[1] : kMinusInfinity;
  }
  constexpr float headroom = kHeadroom<Config::kReference>;
  const float covered[2] = {state.reference[0] - headroom, state.reference[1] - headroom};
  if (!__any_sync(kFullWarp, (maximum[0] > covered[0]) | (maximum[1] > covered[1]))) return;
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float row_maximum = quad_maximum(maximum[half]), before = state.reference[half];
    const float raised = __fadd_rn(next_phase32_reference(covered[half], row_maximum), headroom);
    const float next = row_maximum > covered[half] ? raised : before;
    factor[half] = ptx::exp2_approximate(__fadd_rn(before, -next));
    state.reference[half] = next;
  }
  rescale<Config>(state, factor);
}

/// Rows off the grid: t is rounded before m is taken off, as it was for the maximum; otherwise the shift would be lost beside m, and
/// the unrounded t could exceed the maximum by whole steps. The scores become t - m.
template <class Config>
__device__ __forceinline__ void round_scores(float (&scores)[Config::kScores], ScoreFactors<Config>& factors, float (&bias)[2],
                                             const RowState<Config>& state) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool off = off_grid(state.reference[half]);
#pragma unroll
    for (int i = 0; i < Config::kScores; ++i) {
      if (i / 2 % 2 != half) continue;
      const float rounded = __fadd_rn(__fmul_rn(scores[i], factors.of_score(half, i)), -state.reference[half]);
      scores[i] = off ? rounded : scores[i];
    }
#pragma unroll
    for (int block = 0; block < ScoreFactors<Config>::kBlocks; ++block)
      factors.of[half][block] = off ? 1.0f : factors.of[half][block];
    bias[half] = off ? kCodeShift : bias[half];
  }
}

}  // namespace flamia::sm90::forward
