// SPDX-License-Identifier: Apache-2.0
// Row reference `tilesum` (numerics, section 9): r follows the row's sums of codes, not its maximum. The usual tile needs neither: the
// column of ones, which makes l anyway, proves after PV that no code was saturated. Only rows whose sum fails are looked at again.
//
// Who looks when is a matter of speed. What moves r is exact and the row's own: its greatest logit x, its exact sum of codes under the
// current r, its exact sum under its own maximum.
#pragma once
#include "row_reference_phase32.cuh"
#include "tile_output.cuh"

namespace flamia::sm90::forward {

inline constexpr float kRejectedSum = 440.0f;  // a saturated code alone is 448
inline constexpr float kSuspectSum = 432.0f;   // sums from the tensor core may fall short by less than 4.2
inline constexpr float kSaturates = 8.7549f;   // log2 432: at this argument and above a code is 448, so rejection is certain
inline constexpr float kNearly = 7.5f;   // from here on the sum may well reach 440: better look before PV than do the tile again
inline constexpr int kWatchedTiles = 8;  // after a rejection, tiles whose maximum is looked at before PV

/// Exact sum over one row of E4M3(exp2(logit + bias)): FP32 holds every sum of 128 codes exactly, in any order. A row that sees a NaN has
/// NaN for a result whatever its reference, so NaN need not be skipped.
template <class Config>
__device__ __forceinline__ float exact_sum(const float (&scores)[Config::kScores], const ScoreFactors<Config>& factors, int half,
                                           float bias) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 2 * half; i < Config::kScores; i += 4) {
    const float factor = factors.of_score(half, i);
    const float p0 = ptx::exp2_approximate(__fmaf_rn(scores[i], factor, bias));
    const float p1 = ptx::exp2_approximate(__fmaf_rn(scores[i + 1], factor, bias));
    sum += ptx::round_to_e4m3_sum(p0, p1);
  }
  sum += __shfl_xor_sync(kFullWarp, sum, 1);
  return sum + __shfl_xor_sync(kFullWarp, sum, 2);
}

/// The least whole number not below log2 x, x > 0 normal.
__device__ __forceinline__ float ceil_log2(float x) {
  const int bits = __float_as_int(x);
  return static_cast<float>((bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0 ? 1 : 0));
}

/// What a row sees of a tile, for the room that its first reference leaves to later tiles.
struct Visible {
  int keys;         // in this tile
  bool more_tiles;  // further tiles follow
};
__device__ __forceinline__ Visible visible_keys(Window window, int query, int length, int first_key) {
  const int first = window.first_key(query), last = window.last_key(query, length);
  return {min(last, first_key + kKeyTile - 1) - max(first, first_key) + 1, first < first_key};
}

/// A row's maximum and what the rule makes of it: x on the grid of 1/32 (x itself where the grid is too fine), z from the exact sum of
/// codes under it.
struct Grid {
  float x, grid, z;
};
template <class Config>
__device__ __forceinline__ Grid row_grid(const float (&scores)[Config::kScores], const ScoreFactors<Config>& factors, float x,
                                         int half) {
  const float grid = fabsf(x) >= kOffGrid ? x : __fmul_rn(ceilf(__fmul_rn(x, 32.0f)), 1.0f / 32.0f);
  const float sum = exact_sum<Config>(scores, factors, half, 8.0f - grid);
  return {x, grid, fmaxf(0.0f, __fadd_rn(ceil_log2(sum), -8.0f))};
}

/// First reference: room for the tiles to come where this one shows few keys.
__device__ __forceinline__ float first_reference(const Grid& row, Visible visible) {
  const float room = visible.more_tiles ? 7.0f - static_cast<float>(31 - __clz(visible.keys)) : 0.0f;  // ceil(log2(128 / n))
  return row.grid + row.z + room;
}

/// A rejected row's next reference.
__device__ __forceinline__ float raised_reference(float reference, const Grid& row) {
  if (fabsf(row.x) >= kOffGrid) return fmaxf(reference, row.x + row.z);
  return __fadd_rn(reference, ceilf(fmaxf(2.0f, __fadd_rn(__fadd_rn(row.x, row.z), -reference))));
}

/// Moves r by the rule where it must move, given each row's greatest logit. Sums that decide nothing are skipped by votes of the warp; a
/// row's r depends on its own scores alone, whoever called for the look. Returns whether some row of the warp was rejected.
template <class Config>
__device__ __forceinline__ bool settle_references(RowState<Config>& state, const float (&scores)[Config::kScores],
                                                  const ScoreFactors<Config>& factors, const Item& item, int first_key,
                                                  const float (&maximum)[2]) {
  float next[2];
  bool moved = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float before = state.reference[half], x = maximum[half], bias = 7.0f - before;
    const bool fresh = before == kNoReference && x != kMinusInfinity;
    bool rejected = before != kNoReference && x + bias >= kSaturates;
    if (__any_sync(kFullWarp, before != kNoReference && !rejected)) {
      const float sum = exact_sum<Config>(scores, factors, half, bias);
      rejected |= before != kNoReference && sum >= kRejectedSum;
    }
    next[half] = before;
    if (__any_sync(kFullWarp, rejected || fresh)) {
      const Grid row = row_grid<Config>(scores, factors, x, half);
      if (rejected) next[half] = raised_reference(before, row);
      if (fresh) next[half] = first_reference(row, visible_keys(item.window, item.position(half), item.length, first_key));
      moved |= __any_sync(kFullWarp, rejected);
    }
  }
  move_references<Config>(state, next);
  return moved;
}

/// Greatest logits of a thread's two rows.
template <class Config>
__device__ __forceinline__ void row_maxima(float (&maximum)[2], const float (&scores)[Config::kScores],
                                           const ScoreFactors<Config>& factors) {
  maximum[0] = quad_maximum(thread_maximum<Config>(scores, factors, 0));
  maximum[1] = quad_maximum(thread_maximum<Config>(scores, factors, 1));
}

/// Whether some row of the warp is, or may well be, about to be rejected.
template <class Config>
__device__ __forceinline__ bool nearly_rejected(const RowState<Config>& state, const float (&maximum)[2]) {
  return __any_sync(kFullWarp,
                    maximum[0] - state.reference[0] >= kNearly - 7.0f || maximum[1] - state.reference[1] >= kNearly - 7.0f);
}

}  // namespace flamia::sm90::forward
