// SPDX-License-Identifier: Apache-2.0
// Row reference `tilesum` (numerics, section 9). A row begins *careful*: its maximum is looked at before its codes are made, as with
// phase32. A tile whose codes add up to several times the greatest one shows that the row is flat: r rises to the sum, and from then on the
// row is *free*: the column of ones, which makes l anyway, proves after the fact that no code was saturated. A free row that fails is
// careful again, and its tile is done once more.
//
// Both decisions use the sum as the tensor core forms it, a function of the row's own codes. Who else did a tile again changes nothing.
#pragma once
#include "row_reference_phase32.cuh"
#include "storage.hpp"

namespace flamia::sm90::forward {

inline constexpr float kRejectedSum = 440.0f;  // a saturated code alone is 448, of which the tensor core loses less than 4.2
inline constexpr float kFlatSum = 320.0f;      // 2.5 times the greatest code of a careful row
inline constexpr float kLeastRise = 6.0f;      // room for greater keys to come

/// The least whole number not below log2 x, x > 0 normal.
__device__ __forceinline__ float ceil_log2(float x) {
  const int bits = __float_as_int(x);
  return static_cast<float>((bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0 ? 1 : 0));
}

/// Whether a row sees every key of a tile and more tiles follow.
__device__ __forceinline__ bool full_and_more(Window window, int query, int length, int first_key) {
  return (window.first_key(query) < first_key) & (window.last_key(query, length) >= first_key + kKeyTile - 1);
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

/// Frees careful rows that this tile shows to be flat. Their r rises after the tile: A and l so far, the tile's sums here and its partial O
/// by way of its scale take the power of two. Returns whether the partial O is to be scaled.
template <class Config>
__device__ __forceinline__ bool free_flat_rows(RowState<Config>& state, float& sum0, float& sum1, const Item& item, int first_key,
                                               bool scaled, float2* value_scale, float2* parked) {
  const float2 rows = *parked;
  float row[2] = {rows.x, rows.y}, factor[2] = {1.0f, 1.0f};
  if (!__any_sync(kFullWarp, (sum0 > kFlatSum) | (sum1 > kFlatSum))) return scaled;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float& sum = half == 0 ? sum0 : sum1;
    const float before = state.reference[half];
    const bool full = full_and_more(item.window, item.position(half), item.length, first_key);
    const bool flat = is_careful(row[half]) & (sum > kFlatSum) & (fabsf(before) < kGridEnd) & full;
    const float raised = __fadd_rn(before, fmaxf(kLeastRise, ceil_log2(sum) - 7.0f));
    row[half] = flat ? fabsf(row[half]) : row[half];
    state.reference[half] = flat ? raised : before;
    factor[half] = flat ? ptx::exp2_approximate(__fadd_rn(before, -raised)) : 1.0f;
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
