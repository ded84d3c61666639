// SPDX-License-Identifier: Apache-2.0
// First half of a step in a consumer warpgroup: P from the scores, dS from P and dP, and what leaves them: the codes of P for dV.
#pragma once
#include <cstdint>

#include "../../ptx/half.cuh"
#include "step_parts.cuh"
#include "storage.hpp"

namespace flamia::sm90::backward {

/// What a thread keeps of its place, as shared addresses. The rest (lane, keys) is cheaper to find again than to hold.
struct Place {
  std::uint32_t packed;    // 64 times the address of key g's record, plus 16 bytes times the lane's place in its quad
  std::uint32_t exchange;  // the line it stores dS to, slot 0

  /// The record of key g; that of key g + 8 is 8 records on.
  __device__ __forceinline__ std::uint32_t key_records() const { return packed >> 6; }
  /// Where the lane's queries lie in a record's field.
  __device__ __forceinline__ std::uint32_t quad() const { return packed & 48; }
};

/// One word of the records of the thread's two keys.
__device__ __forceinline__ void load_key_field(float (&field)[2], const Place& place, int offset) {
  const std::uint32_t at = place.key_records() + offset;
  field[0] = ptx::load_shared_float(at);
  field[1] = ptx::load_shared_float(at + kNextKey);
}
enum KeyField : int { kSlope = 0, kValue = 4, kShare = 8 };

/// One field of a step's records for the 16 queries 16 u ... of the step, as the thread holds them: 2c, 2c + 1, 2c + 8, 2c + 9.
__device__ __forceinline__ float4 query_field(std::uint32_t records, int field, int u, const Place& place) {
  return ptx::load_shared_float4(records + place.quad() + u * kRowGroupBytes + field * kFieldBytes);
}
/// The field's first word of a token-block (32 queries), for recipes in which a block shares it.
__device__ __forceinline__ float block_field(std::uint32_t records, int field, int block) {
  return ptx::load_shared_float(records + block * 2 * kRowGroupBytes + field * kFieldBytes);
}

/// Slopes of the thread's two keys for the queries of a token-block. Asked for early: a load takes long behind the operands of products.
template <class Config>
__device__ __forceinline__ void load_slopes(float (&slope)[2], std::uint32_t records, const Place& place, int block) {
  load_key_field(slope, place, kSlope);
  if constexpr (Config::kScaleGroup == ScaleGroup::block) {
    const float rho = block_field(records, kRho, block);
    slope[0] *= rho;
    slope[1] *= rho;
  }
}

/// X = P 2^8, in place, of queries 16 u ... 16 u + 15 of the step.
template <class Config>
__device__ __forceinline__ void exponentiate(float (&x)[kScores], int u, const float (&slope)[2], const float4& bias,
                                             std::uint32_t records, const Place& place) {
  float4 rho = {1.0f, 1.0f, 1.0f, 1.0f};
  if constexpr (Config::kScaleGroup == ScaleGroup::token) rho = query_field(records, kRho, u, place);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = first_of_word(u, half);
    x[i] = ptx::exp2_approximate(__fmaf_rn(x[i], slope[half] * rho.x, bias.x));
    x[i + 1] = ptx::exp2_approximate(__fmaf_rn(x[i + 1], slope[half] * rho.y, bias.y));
    x[i + 4] = ptx::exp2_approximate(__fmaf_rn(x[i + 4], slope[half] * rho.z, bias.z));
    x[i + 5] = ptx::exp2_approximate(__fmaf_rn(x[i + 5], slope[half] * rho.w, bias.w));
  }
}

// dO's exponent is folded into P for dV: a record's factor is relative to R of the 128-query tile (the greatest exponent in it). Where the
// right edge of the mask cuts the step, a key may know only the queries from its first one on (numerics: section 8): its factors are raised
// to R over those. R of a thread's two keys is left in shared memory for the promotion.

__device__ __forceinline__ int tile_reference(std::uint32_t records) {
  return high_half(ptx::load_shared_int(records + kFoldMax * kFieldBytes));
}
__device__ __forceinline__ int uncut_references(std::uint32_t records) {
  const int of_tile = tile_reference(records);
  return pack_halves(of_tile, of_tile);
}

/// Codes of P with dO's fold. Masked: invisible pairs become 0 by selection, after all arithmetic.
template <class Config, bool kMasked_>
__device__ __forceinline__ void make_codes(std::uint32_t (&codes)[kCodeWords], const float (&x)[kScores], std::uint32_t records,
                                           const Place& place, const float (&raise)[2], Visible visible) {
  float4 share;
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    if constexpr (Config::kScaleGroup == ScaleGroup::token) {
      share = query_field(records, kFold, u, place);
    } else if (u % 2 == 0) {
      share.x = share.y = share.z = share.w = block_field(records, kFold, u / 2);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = first_of_word(u, half);
      float4 f = share;
      if constexpr (kMasked_) f = {f.x * raise[half], f.y * raise[half], f.z * raise[half], f.w * raise[half]};
      const auto keep = [&](int at, float value) { return !kMasked_ || sees(visible, at) ? value : 0.0f; };
      codes[2 * u + half] = ptx::pack_e4m3x4(keep(i, x[i] * f.x), keep(i + 1, x[i + 1] * f.y), keep(i + 4, x[i + 4] * f.z),
                                             keep(i + 5, x[i + 5] * f.w));
    }
  }
}

/// dS of queries 16 u ... as FP16. `scale` = the key's share, which holds the tile's shift.
__device__ __forceinline__ void send_scaled(const float (&y)[kScores], int u, const float (&scale)[2], std::uint32_t line) {
  const int i = 8 * u;
  ptx::store_matrices_transposed(line + u * exchange_offset(16, 0), ptx::pack_f16x2(y[i] * scale[0], y[i + 1] * scale[0]),
                                 ptx::pack_f16x2(y[i + 2] * scale[1], y[i + 3] * scale[1]),
                                 ptx::pack_f16x2(y[i + 4] * scale[0], y[i + 5] * scale[0]),
                                 ptx::pack_f16x2(y[i + 6] * scale[1], y[i + 7] * scale[1]));
}

/// Y = dS in place of dP. kSend: it also leaves for the dQ warpgroup, as FP16 in the unit of the tile, as it is made: P's registers become free
/// for what the stores still read.
template <class Config, bool kMasked_, bool kSend>
__device__ __forceinline__ void make_gradient_of_scores(const float (&x)[kScores], float (&y)[kScores], std::uint32_t records,
                                                        const Place& place, const float (&value)[2], float4 offset, Visible visible,
                                                        const float (&share)[2], std::uint32_t line) {
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const float4 ahead = u < 3 ? query_field(records, kOffset, u + 1, place) : float4{};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = first_of_word(u, half);
      const auto keep = [&](int at, float ds) { return !kMasked_ || sees(visible, at) ? ds : 0.0f; };
      y[i] = keep(i, x[i] * __fmaf_rn(y[i], value[half], -offset.x));
      y[i + 1] = keep(i + 1, x[i + 1] * __fmaf_rn(y[i + 1], value[half], -offset.y));
      y[i + 4] = keep(i + 4, x[i + 4] * __fmaf_rn(y[i + 4], value[half], -offset.z));
      y[i + 5] = keep(i + 5, x[i + 5] * __fmaf_rn(y[i + 5], value[half], -offset.w));
    }
    if constexpr (kSend) send_scaled(y, u, share, line);
    offset = ahead;
  }
}

}  // namespace flamia::sm90::backward
