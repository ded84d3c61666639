// SPDX-License-Identifier: Apache-2.0
// Second half of a step in a consumer warpgroup: dS leaves for the dQ warpgroup, dV and dK take the step in.
#pragma once
#include <cstdint>

#include "../../ptx/barrier.cuh"
#include "../../ptx/half.cuh"
#include "scores.cuh"

namespace flamia::sm90::backward {

template <class Config>
struct TransposedOperand {
  static constexpr ptx::OperandLayout kLayout{16 * Config::kHeadDim, 128};
};

/// 64 keys times 64 channels, summed over the step's 64 queries; asynchronous. `half` chooses the channels.
template <class Config>
__device__ __forceinline__ void issue_gradient(float (&x)[kScores], const std::uint32_t (&codes)[kCodeWords], std::uint32_t operand, int half) {
  constexpr auto layout = TransposedOperand<Config>::kLayout;
  const std::uint32_t first = operand + (half * 64 * 16 >> 4);
  constexpr std::uint32_t step = 32 * Config::kHeadDim >> 4;  // 32 queries
  ptx::begin_products();
  ptx::product_64x64<false>(x, codes, ptx::descriptor(first, layout));
  ptx::product_64x64<true>(x, codes + 4, ptx::descriptor(first + step, layout));
  ptx::commit_products();
}

/// Keeps the codes where they are until the product that reads them has ended.
__device__ __forceinline__ void hold_codes(std::uint32_t (&codes)[kCodeWords]) {
#pragma unroll
  for (int i = 0; i < kCodeWords; ++i) asm volatile("" : "+r"(codes[i])::"memory");
}

/// sum += x * 2^exponent of the key, rounded once: FP32 takes over every 64 queries.
template <int kHalf, int kCount>
__device__ __forceinline__ void promote(float (&sum)[kCount], const float (&x)[kScores], const float (&scale)[2]) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) sum[kHalf * kScores + i] = __fmaf_rn(x[i], scale[i / 2 % 2], sum[kHalf * kScores + i]);
}

/// dS as FP16 for the dQ warpgroup. `scale` = share of the key (2^(eK - greatest)) times 2^shift.
__device__ __forceinline__ void send_scaled(const float (&y)[kScores], const float (&scale)[2], std::uint32_t line) {
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const int i = 8 * u;
    ptx::store_matrices_transposed(line + u * exchange_offset(16, 0), ptx::pack_f16x2(y[i] * scale[0], y[i + 1] * scale[0]),
                                   ptx::pack_f16x2(y[i + 2] * scale[1], y[i + 3] * scale[1]),
                                   ptx::pack_f16x2(y[i + 4] * scale[0], y[i + 5] * scale[0]),
                                   ptx::pack_f16x2(y[i + 6] * scale[1], y[i + 7] * scale[1]));
  }
}

/// The rare step whose rows need shifts of their own: D' outgrows the tile's V, or the diagonal cuts a tile of several exponents.
__device__ __forceinline__ void send_shifted(const float (&y)[kScores], const float (&share)[2], std::uint32_t line, std::uint32_t records,
                                             const KeyRecord* keys, Window window, int step_query, const Work& work, std::uint32_t tile_reach,
                                             bool full_reach, int lane) {
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    float shift[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int in_group = 2 * (lane % 4) + q % 2 + 8 * (q / 2);
      const int row_reach = low_half(ptx::load_shared_int(records + u * kRowGroupBytes + kReach * kFieldBytes + lane % 4 * 16 + 4 * q));
      std::uint32_t reach = tile_reach;
      if (!full_reach) {
        const int last = min(window.last_key(step_query + 16 * u + in_group, work.length), work.length - 1) - work.first_key;
        reach = keys[clamp(last, 0, kKeyTile - 1)].reach;
      }
      shift[q] = power_of_two(fp16_shift(value_reach(reach), row_reach, key_reach(reach), key_reach(tile_reach)));
    }
    const int i = 8 * u;
    ptx::store_matrices_transposed(
        line + u * exchange_offset(16, 0), ptx::pack_f16x2(y[i] * (share[0] * shift[0]), y[i + 1] * (share[0] * shift[1])),
        ptx::pack_f16x2(y[i + 2] * (share[1] * shift[0]), y[i + 3] * (share[1] * shift[1])),
        ptx::pack_f16x2(y[i + 4] * (share[0] * shift[2]), y[i + 5] * (share[0] * shift[3])),
        ptx::pack_f16x2(y[i + 6] * (share[1] * shift[2]), y[i + 7] * (share[1] * shift[3])));
  }
}

/// Sends the step's dS into a slot of the exchange.
template <class Config>
__device__ __forceinline__ void send_gradient_of_scores(const float (&y)[kScores], std::uint32_t line, std::uint32_t records, const Place& place,
                                                        const KeyRecord* keys, Window window, int step_query, const Work& work,
                                                        std::uint32_t tile_reach, bool full_reach) {
  const float share[2] = {ptx::load_shared_float(place.key_records + 8), ptx::load_shared_float(place.key_records + kNextKey + 8)};
  const int step_reach = high_half(ptx::load_shared_int(records + kReach * kFieldBytes));
  if ((full_reach || (tile_reach & kUniform) != 0) && step_reach <= value_reach(tile_reach)) {
    const float shift = power_of_two(fp16_shift(value_reach(tile_reach), step_reach, 0, 0));
    const float scale[2] = {share[0] * shift, share[1] * shift};
    send_scaled(y, scale, line);
  } else {
    send_shifted(y, share, line, records, keys, window, step_query, work, tile_reach, full_reach, place.lane);
  }
}

/// Weights that turn Y into the units of dK's payload: 2^(eG + eQ + 10) of queries 16 u ...; `kept` carries a token-block's over two u.
template <class Config>
__device__ __forceinline__ float4 weights(std::uint32_t records, int u, int lane, float& kept) {
  if constexpr (Config::kScaleGroup == ScaleGroup::token) return query_field(records, kWeight, u, lane);
  if (u % 2 == 0) kept = block_field(records, kWeight, u / 2);
  return {kept, kept, kept, kept};
}

/// Exponents of dK's payload: one a key, from its greatest dS 2^(eG + eQ) over the step's queries. A key lies in the four lanes of a quad.
template <class Config>
__device__ __forceinline__ void key_exponents(int (&exponent)[2], const float (&y)[kScores], std::uint32_t records, int lane) {
  std::uint32_t greatest[2] = {0, 0};
  float kept = 0.0f;
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const float4 weight = weights<Config>(records, u, lane, kept);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = first_of_word(u, half);
      greatest[half] = __vimax3_u32(greatest[half], __float_as_uint(fabsf(y[i]) * weight.x), __float_as_uint(fabsf(y[i + 1]) * weight.y));
      greatest[half] = __vimax3_u32(greatest[half], __float_as_uint(fabsf(y[i + 4]) * weight.z), __float_as_uint(fabsf(y[i + 5]) * weight.w));
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    greatest[half] = max(greatest[half], __shfl_xor_sync(kFullWarp, greatest[half], 1));
    greatest[half] = max(greatest[half], __shfl_xor_sync(kFullWarp, greatest[half], 2));
    exponent[half] = payload_exponent(greatest[half]);
  }
}

/// dK's payload. Elements of an all but vanished key may meet a factor beyond FP32's range: it stays finite, so that 0 stays 0.
template <class Config>
__device__ __forceinline__ void round_key_payload(std::uint32_t (&codes)[kCodeWords], const float (&y)[kScores], const int (&exponent)[2],
                                                  std::uint32_t records, int lane) {
  constexpr float greatest = 0x1p127f;
  const float inverse[2] = {power_of_two(-exponent[0]), power_of_two(-exponent[1])};
  float factor[2] = {0.0f, 0.0f}, kept = 0.0f;
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const float4 weight = weights<Config>(records, u, lane, kept);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = first_of_word(u, half);
      if constexpr (Config::kScaleGroup == ScaleGroup::block) {
        if (u % 2 == 0) factor[half] = fminf(weight.x * inverse[half], greatest);
        codes[2 * u + half] = ptx::pack_e4m3x4(y[i] * factor[half], y[i + 1] * factor[half], y[i + 4] * factor[half], y[i + 5] * factor[half]);
      } else {
        codes[2 * u + half] = ptx::pack_e4m3x4(y[i] * weight.x * inverse[half], y[i + 1] * weight.y * inverse[half],
                                               y[i + 4] * weight.z * inverse[half], y[i + 5] * weight.w * inverse[half]);
      }
    }
  }
}

}  // namespace flamia::sm90::backward
