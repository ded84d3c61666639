// SPDX-License-Identifier: Apache-2.0
// Row reference `tilesum` (numerics, section 9). A row begins *careful*: its maximum is looked at before its codes are made, as with
// phase32. When no single key decides it any more, or many tiles lie behind it, m rises to make room for greater keys, and the row is
// *free*: the column of ones, which makes l anyway, proves after the fact that no code was saturated. A free row that fails is careful
// again, and its tile is done once more.
//
// Both decisions use the sum as the tensor core forms it, a function of the row's own codes. Who else did a tile again changes nothing.
#pragma once
#include "row_reference_phase32.cuh"
#include "storage.hpp"

namespace flamia::sm90::forward {

inline constexpr float kRejectedSum = 440.0f;       // a saturated code alone is 448, of which the tensor core loses less than 4.2
inline constexpr float kFlatSum = 640.0f;           // five times the greatest code of a careful row
inline constexpr int kFlatKeys = 32;                // fewer visible keys of a tile say nothing
inline constexpr int kFlatRise = 6;                 // room for greater keys to come
inline constexpr int kSettledKeys = 16 * kKeyTile;  // tiles behind a settled row
inline constexpr int kSettledRise = 7;
inline constexpr int kFirstTiles = 3, kFreeingTiles = 8;  // a row's first three tiles and every eighth of the document may free it

/// The least whole number not below log2 x, x > 0 normal.
__device__ __forceinline__ int ceil_log2(float x) { return ((__float_as_int(x) + 0x7FFFFF) >> 23) - 127; }

/// Whether a tile may free rows, by the distance from its first key to the last one that the row sees.
__device__ __forceinline__ bool may_free(int first_key, int last) {
  return (last < kFirstTiles * kKeyTile) | (first_key % (kFreeingTiles * kKeyTile) == 0);
}

/// Whether a thread's row has a sum that is too great for its state; careful rows cannot saturate.
__device__ __forceinline__ bool rejected(const float2* parked, float sum0, float sum1) {
  const float2 row = *parked;
  return ((sum0 >= kRejectedSum) & !is_careful(row.x)) | ((sum1 >= kRejectedSum) & !is_careful(row.y));
}

__device__ __forceinline__ void become_careful(float2* parked, float sum0, float sum1) {
  const float2 row = *parked;
  *parked = {sum0 >= kRejectedSum ? -fabsf(row.x) : row.x, sum1 >= kRejectedSum ? -fabsf(row.y) : row.y};
}

/// Frees careful rows that are flat or settled. Their m rises after the tile: A and l so far, the tile's sums here and its partial O by way
/// of its scale take the power of two. Returns whether the partial O is to be scaled.
template <class Config>
__device__ __forceinline__ bool free_rows(RowState<Config>& state, float& sum0, float& sum1, const Item& item, int first_key,
                                          bool scaled, float2* value_scale, float2* parked) {
  const float2 rows = *parked;
  float row[2] = {rows.x, rows.y}, factor[2] = {1.0f, 1.0f};
  const float total[2] = {state.sum[0] + sum0, state.sum[1] + sum1};
  // The last key that a row sees lies less than a tile behind the last one that all rows see: whoever may be freed passes this vote.
  const float least = item.last_common - first_key + kKeyTile > kSettledKeys ? 0.0f : kFlatSum;
  if (!__any_sync(kFullWarp, (is_careful(row[0]) & (total[0] > least)) | (is_careful(row[1]) & (total[1] > least)))) return scaled;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float& sum = half == 0 ? sum0 : sum1;
    const float before = state.reference[half];
    const int query = item.position(half), last = item.window.last_key(query, item.length) - first_key;
    const bool more = item.window.first_key(query) < first_key;
    const bool flat = total[half] > kFlatSum, settled = (last >= kSettledKeys) & (total[half] > 0.0f);
    const bool freed = is_careful(row[half]) & (flat | settled) & more & (last >= kFlatKeys - 1) & may_free(first_key, last) &
                       (fabsf(before) < kGridEnd);
    const int unseen = last >= kKeyTile - 1 ? 0 : last >= kKeyTile / 2 - 1 ? 1 : 2;
    const int rise = max(flat ? kFlatRise : kSettledRise, ceil_log2(fmaxf(sum, 1.0f)) + unseen - 7);
    const float raised = __fadd_rn(before, static_cast<float>(rise));
    row[half] = freed ? fabsf(row[half]) : row[half];
    state.reference[half] = freed ? raised : before;
    factor[half] = freed ? ptx::exp2_approximate(__fadd_rn(before, -raised)) : 1.0f;
    sum *= factor[half];
  }
  if (__all_sync(kFullWarp, (factor[0] == 1.0f) & (factor[1] == 1.0f))) return scaled;
  *parked = {row[0], row[1]};
  rescale<Config>(state, factor);
  const float2 scale = scaled ? *value_scale : make_float2(1.0f, 1.0f);
  *value_scale = {scale.x * factor[0], scale.y * factor[1]};
  return true;
}

}  // namespace flamia::sm90::forward
