// SPDX-License-Identifier: Apache-2.0
// Parts of a step that the fused kernel and the split kernel of dK and dV have in common: products of a consumer warpgroup (64 keys x 64
// queries), promotion, references of dO's fold, recorded codes.
#pragma once
#include <cstdint>

#include "../../ptx/convert.cuh"
#include "../../ptx/matrix.cuh"
#include "../../ptx/wgmma_backward.cuh"
#include "fragments.hpp"
#include "masks.cuh"
#include "power.cuh"

namespace flamia::sm90::backward {

inline constexpr int kNextKey = 8 * static_cast<int>(sizeof(KeyRecord));  // bytes between the records of a thread's two keys

template <class Config>
struct RowsOperand {
  static constexpr ptx::OperandLayout kLayout{128, 8 * Config::kHeadDim};
};

/// Scores or dP, transposed: 64 keys (K or V rows) times 64 queries (Q or dO' rows); asynchronous.
template <class Config>
__device__ __forceinline__ void issue_scores(float (&x)[kScores], std::uint32_t keys, std::uint32_t queries) {
  constexpr auto layout = RowsOperand<Config>::kLayout;
  constexpr std::uint32_t step = 2 * 128 >> 4;  // two core matrices along d
  ptx::begin_products();
#pragma unroll
  for (int k = 0; k < Config::kHeadDim / 32; ++k) {
    const std::uint64_t a = ptx::descriptor(keys + k * step, layout), b = ptx::descriptor(queries + k * step, layout);
    if (k == 0)
      ptx::product_64x64<false>(x, a, b);
    else
      ptx::product_64x64<true>(x, a, b);
  }
  ptx::commit_products();
}

template <class Config>
struct TransposedOperand {
  static constexpr ptx::OperandLayout kLayout{16 * Config::kHeadDim, 128};
};

/// 64 keys times 64 channels, summed over the step's 64 queries; asynchronous. `half` chooses the channels.
template <class Config>
__device__ __forceinline__ void issue_gradient(float (&x)[kScores], const std::uint32_t (&codes)[kCodeWords], std::uint32_t operand,
                                               int half) {
  constexpr auto layout = TransposedOperand<Config>::kLayout;
  const std::uint32_t first = operand + (half * 64 * 16 >> 4);
  constexpr std::uint32_t step = 32 * Config::kHeadDim >> 4;  // 32 queries
  ptx::begin_products();
  ptx::product_64x64<false>(x, codes, ptx::descriptor(first, layout));
  ptx::product_64x64<true>(x, codes + 4, ptx::descriptor(first + step, layout));
  ptx::commit_products();
}

/// sum += x * 2^exponent of the key, rounded once: FP32 takes over every 64 queries.
template <int kHalf, int kCount>
__device__ __forceinline__ void promote(float (&sum)[kCount], const float (&x)[kScores], const float (&scale)[2]) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) sum[kHalf * kScores + i] = __fmaf_rn(x[i], scale[i / 2 % 2], sum[kHalf * kScores + i]);
}

/// What the weights of a step's queries left to dK's promotion; `fold_max` is a word of the step's records. Held within FP32, so that 0 stays 0.
__device__ __forceinline__ void lift_key_scale(float (&scale)[2], int fold_max) {
  const float half = power_of_two(lift_of(fold_max));
#pragma unroll
  for (float& s : scale) s = fminf(s * half * half, 0x1p127f);
}

/// R of the thread's two keys where the edge cuts, packed, and the factors that raise the fold to them. `before` are those of the step before: R of a
/// key whose first query lies in the first half of the tile holds in both halves.
__device__ __forceinline__ int cut_references(float (&raise)[2], std::uint32_t records, Window window, int first_key,
                                              int step_query, int before) {
  int references[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int first = (window.right < 0 ? 0 : max(first_key + 8 * half - window.right, 0)) -
                      step_query;  // query of the step; negative: an earlier one
    const int from = clamp(first, 0, kQueryStep - 1);
    const int word =
        ptx::load_shared_int(records + from / kGroup * kRowGroupBytes + kFoldMax * kFieldBytes + pi_column(from % kGroup) * 4);
    const int of_tile = high_half(word);
    references[half] = first >= 0 ? fold_from_here(word) : of_tile;
    if (step_query % kKeyTile != 0 && first < 0 && first >= -kQueryStep)
      references[half] = half == 0 ? low_half(before) : high_half(before);
    raise[half] = power_of_two(clamp(of_tile - references[half], 0, 127));
  }
  return pack_halves(references[0], references[1]);
}

/// Test mode: the unfolded codes of a step's visible pairs.
__device__ __forceinline__ void record_codes(const BackwardParams& params, const float (&x)[kScores], Visible visible,
                                             int first_key, std::int64_t first_row, int lane) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    if (sees(visible, i)) {
      const std::int64_t row = first_row + column_of(lane, i);
      params.recorded_codes[row * params.record_keys + first_key + 8 * (i / 2 % 2)] =
          static_cast<std::uint8_t>(ptx::pack_e4m3x2(x[i], 0.0f) & 255);
    }
  }
}

}  // namespace flamia::sm90::backward
