// SPDX-License-Identifier: Apache-2.0
// Row reference `tilesum` (numerics, section 9): r follows the row's sums of codes, not its maximum. The usual tile needs neither: the
// column of ones, which makes l anyway, proves after PV that no code was saturated. Only rows whose sum fails are looked at again.
//
// Who looks when is a matter of speed. What moves r is exact and the row's own: its greatest logit x, its exact sum of codes under the
// current r, its exact sum under its own maximum.
#pragma once
#include "row_reference_phase32.cuh"
#include "tile.cuh"

namespace flamia::sm90::forward {

inline constexpr float kRejectedSum = 440.0f;   // a saturated code alone is 448
inline constexpr float kSuspectSum = 432.0f;    // sums from the tensor core may fall short by less than 4.2
inline constexpr float kSaturates = 8.7549f;    // log2 432: at this argument and above a code is 448, so rejection is certain
inline constexpr int kWatchedTiles = 8;         // after a rejection, tiles whose maximum is looked at before PV

/// Exact sum over one row of E4M3(exp2(logit + bias)), NaN skipped: FP32 holds every sum of 128 codes exactly, in any order.
template <class Config>
__device__ __forceinline__ float exact_sum(const float (&scores)[Config::kScores], const ScoreFactors<Config>& factors, int half,
                                           float bias) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 2 * half; i < Config::kScores; i += 4) {
    const float factor = factors.of_score(half, i);
    const float p0 = ptx::exp2_approximate(__fmaf_rn(scores[i], factor, bias));
    const float p1 = ptx::exp2_approximate(__fmaf_rn(scores[i + 1], factor, bias));
    sum += ptx::round_to_e4m3_sum(fmaxf(p0, 0.0f), fmaxf(p1, 0.0f));
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

/// r after a tile: unchanged where the row's exact sum is accepted, raised where it is not, set where the row has none yet.
__device__ __forceinline__ float next_tilesum_reference(float reference, float x, float sum, float sum_at_maximum, Visible visible) {
  if (x == kMinusInfinity) return reference;
  const float z = fmaxf(0.0f, __fadd_rn(ceil_log2(sum_at_maximum), -8.0f));
  const bool off_grid = fabsf(x) >= kOffGrid;
  if (reference == kNoReference) {
    const float grid = off_grid ? x : __fmul_rn(ceilf(__fmul_rn(x, 32.0f)), 1.0f / 32.0f);
    const float room = visible.more_tiles ? 7.0f - static_cast<float>(31 - __clz(visible.keys)) : 0.0f;  // ceil(log2(128 / n))
    return grid + z + room;
  }
  if (sum < kRejectedSum) return reference;
  if (off_grid) return fmaxf(reference, x + z);
  return __fadd_rn(reference, ceilf(fmaxf(2.0f, __fadd_rn(__fadd_rn(x, z), -reference))));
}

/// r of one row after a close look at the tile.
template <class Config>
__device__ __forceinline__ float settled_reference(float reference, const float (&scores)[Config::kScores],
                                                   const ScoreFactors<Config>& factors, const Item& item, int first_key, int half) {
  const float x = quad_maximum(thread_maximum<Config>(scores, factors, half));
  const float grid = fabsf(x) >= kOffGrid ? x : __fmul_rn(ceilf(__fmul_rn(x, 32.0f)), 1.0f / 32.0f);
  float sum = 0.0f, sum_at_maximum = 0.0f;
  float bias = 7.0f - reference;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {  // one piece of code for both sums
    sum = sum_at_maximum;
    sum_at_maximum = exact_sum<Config>(scores, factors, half, bias);
    bias = 8.0f - grid;
  }
  return next_tilesum_reference(reference, x, sum, sum_at_maximum, visible_keys(item.window, item.position(half), item.length, first_key));
}

/// Looks at a tile closely and moves r by the rule. The other rows of the warp keep theirs, whoever called for the look.
template <class Config>
__device__ __forceinline__ void settle_references(RowState<Config>& state, const float (&scores)[Config::kScores],
                                                  const ScoreFactors<Config>& factors, const Item& item, int first_key) {
  const float next[2] = {settled_reference<Config>(state.reference[0], scores, factors, item, first_key, 0),
                         settled_reference<Config>(state.reference[1], scores, factors, item, first_key, 1)};
  move_references<Config>(state, next);
}

/// Whether some code of the warp is certainly saturated.
template <class Config>
__device__ __forceinline__ bool saturates(const RowState<Config>& state, const float (&scores)[Config::kScores],
                                          const ScoreFactors<Config>& factors) {
  bool any = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    any |= thread_maximum<Config>(scores, factors, half) + (7.0f - state.reference[half]) >= kSaturates;
  }
  return __any_sync(kFullWarp, any);
}

}  // namespace flamia::sm90::forward
