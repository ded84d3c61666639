// SPDX-License-Identifier: Apache-2.0
// First half of a step in a consumer warpgroup: P from the scores, dS from P and dP, and what leaves them: the codes of P for dV.
#pragma once
#include <cstdint>

#include "../../ptx/convert.cuh"
#include "../../ptx/matrix.cuh"
#include "../../ptx/wgmma_m64n64.cuh"
#include "masks.cuh"
#include "power.cuh"
#include "storage.hpp"

namespace flamia::sm90::backward {

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
    if (k == 0) ptx::product_64x64<false>(x, a, b);
    else ptx::product_64x64<true>(x, a, b);
  }
  ptx::commit_products();
}

/// What a thread knows of its place: its two keys, and where its lane reads the records.
struct Place {
  std::uint32_t key_records;  // shared address of the record of key g; key g + 8 is 8 records on
  std::uint32_t exchange;     // shared address of the line it stores dS to, slot 0
  int key[2];                 // positions
  int lane;
};
inline constexpr int kNextKey = 8 * static_cast<int>(sizeof(KeyRecord));

/// One field of a step's records for the 16 queries 16 u ... of the step, as the thread holds them: 2c, 2c + 1, 2c + 8, 2c + 9.
__device__ __forceinline__ float4 query_field(std::uint32_t records, int field, int u, int lane) {
  return ptx::load_shared_float4(records + u * kRowGroupBytes + field * kFieldBytes + lane % 4 * 16);
}
/// The field's first word of a token-block (32 queries), for recipes in which a block shares it.
__device__ __forceinline__ float block_field(std::uint32_t records, int field, int block) {
  return ptx::load_shared_float(records + block * 2 * kRowGroupBytes + field * kFieldBytes);
}

/// Factors of P's argument per token-block and key: rho 2^eK.
template <class Config>
struct Slopes {
  float of[2][2];  // [token-block][half]; token recipes: [0][half] = 2^eK alone
};
template <class Config>
__device__ __forceinline__ Slopes<Config> load_slopes(std::uint32_t records, const Place& place) {
  Slopes<Config> slopes;
  const float key[2] = {ptx::load_shared_float(place.key_records), ptx::load_shared_float(place.key_records + kNextKey)};
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const float rho = Config::kScaleGroup == ScaleGroup::block ? block_field(records, kRho, block) : 1.0f;
    slopes.of[block][0] = rho * key[0];
    slopes.of[block][1] = rho * key[1];
  }
  return slopes;
}

/// X = P 2^8 of 16 queries, in place.
template <class Config>
__device__ __forceinline__ void exponentiate(float (&x)[kScores], std::uint32_t records, const Slopes<Config>& slopes, int u, int lane) {
  const float4 bias = query_field(records, kBias, u, lane);
  float4 rho = {1.0f, 1.0f, 1.0f, 1.0f};
  if constexpr (Config::kScaleGroup == ScaleGroup::token) rho = query_field(records, kRho, u, lane);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = first_of_word(u, half);
    const float slope = slopes.of[Config::kScaleGroup == ScaleGroup::block ? u / 2 : 0][half];
    x[i] = ptx::exp2_approximate(__fmaf_rn(x[i], slope * rho.x, bias.x));
    x[i + 1] = ptx::exp2_approximate(__fmaf_rn(x[i + 1], slope * rho.y, bias.y));
    x[i + 4] = ptx::exp2_approximate(__fmaf_rn(x[i + 4], slope * rho.z, bias.z));
    x[i + 5] = ptx::exp2_approximate(__fmaf_rn(x[i + 5], slope * rho.w, bias.w));
  }
}

/// How dO's exponent is folded into P for dV: factors of the step's queries, relative to R of the 128-query tile, raised to the greatest
/// exponent of the queries that key j may know (numerics: section 8). `undo` takes the fold and 2^8 out again.
struct Fold {
  float raise[2];
  float undo[2];
};
__device__ __forceinline__ Fold uncut_fold(std::uint32_t records) {
  const int of_tile = high_half(ptx::load_shared_int(records + kFoldMax * kFieldBytes));
  const float undo = power_of_two(clamp(of_tile - kCodeShift, -126, 127));
  return {{1.0f, 1.0f}, {undo, undo}};
}
/// Where the right edge of the mask cuts the step: R over the tile's queries that are not before key j's first. `remembered` carries R of a
/// key whose first query lies in the first half of the tile over to the second half.
__device__ __forceinline__ Fold cut_fold(std::uint32_t records, const VisibleQueries& visible, bool second_half, int& remembered, int lane) {
  Fold fold;
  int references[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int first = visible.first[half] + 2 * (lane % 4);  // query of the step; negative: an earlier one
    const int from = clamp(first, 0, kQueryStep - 1);
    const int word = ptx::load_shared_int(records + from / kGroup * kRowGroupBytes + kFoldMax * kFieldBytes + pi_column(from % kGroup) * 4);
    const int of_tile = high_half(word);
    const bool in_first_half = second_half && first < 0 && first >= -kQueryStep;
    int reference = first >= 0 ? low_half(word) : of_tile;
    if (in_first_half) reference = half == 0 ? low_half(remembered) : high_half(remembered);
    references[half] = reference;
    fold.raise[half] = power_of_two(clamp(of_tile - reference, 0, 127));
    fold.undo[half] = power_of_two(clamp(reference - kCodeShift, -126, 127));
  }
  remembered = pack_halves(references[0], references[1]);
  return fold;
}

/// Codes of P with dO's fold, and Y = dS in place of dP. X keeps P.
template <class Config, bool kRaise>
__device__ __forceinline__ void make_gradient_of_scores(std::uint32_t (&codes)[kCodeWords], const float (&x)[kScores], float (&y)[kScores],
                                                        std::uint32_t records, const Place& place, const Fold& fold) {
  const float value[2] = {ptx::load_shared_float(place.key_records + 4), ptx::load_shared_float(place.key_records + kNextKey + 4)};
  float4 share;
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const float4 offset = query_field(records, kOffset, u, place.lane);
    if constexpr (Config::kScaleGroup == ScaleGroup::token) {
      share = query_field(records, kFold, u, place.lane);
    } else if (u % 2 == 0) {
      share.x = share.y = share.z = share.w = block_field(records, kFold, u / 2);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = first_of_word(u, half);
      float4 f = share;
      if constexpr (kRaise) {
        const float raise = fold.raise[half];
        f = {f.x * raise, f.y * raise, f.z * raise, f.w * raise};
      }
      codes[2 * u + half] = ptx::pack_e4m3x4(x[i] * f.x, x[i + 1] * f.y, x[i + 4] * f.z, x[i + 5] * f.w);
      y[i] = x[i] * __fmaf_rn(y[i], value[half], -offset.x);
      y[i + 1] = x[i + 1] * __fmaf_rn(y[i + 1], value[half], -offset.y);
      y[i + 4] = x[i + 4] * __fmaf_rn(y[i + 4], value[half], -offset.z);
      y[i + 5] = x[i + 5] * __fmaf_rn(y[i + 5], value[half], -offset.w);
    }
  }
}

/// Test mode: the unfolded codes of a step's visible pairs.
template <class Config>
__device__ __forceinline__ void record_codes(const BackwardParams& params, const float (&x)[kScores], const VisibleQueries& visible, const Place& place,
                                             std::int64_t first_row) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int query = 8 * (i / 4) + i % 2, half = i / 2 % 2;
    if (query >= visible.first[half] && query < visible.end[half]) {
      const std::int64_t row = first_row + query + 2 * (place.lane % 4);
      params.recorded_codes[row * params.record_keys + place.key[half]] = static_cast<std::uint8_t>(ptx::pack_e4m3x2(x[i], 0.0f) & 255);
    }
  }
}

}  // namespace flamia::sm90::backward
