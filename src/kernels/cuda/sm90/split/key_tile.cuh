// SPDX-License-Identifier: Apache-2.0
// What a consumer warpgroup of the kernel of dK and dV does with a step, piece by piece: P, its codes, dS. The order is in key_consumer.cuh, the
// fragments are those of ../backward/fragments.hpp, the units those of ../backward/records.hpp.
//
// What a piece needs from shared memory is loaded long before: a load takes more than a hundred cycles beside running products.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../backward/step_parts.cuh"
#include "key_config.hpp"

namespace flamia::sm90::split {

// ---- records -------------------------------------------------------------------------------------------------------------------

/// What stays the same from step to step for the thread's two keys.
struct KeyPair {
  float slope[2], value[2];  // 2^eK (NaN for a flagged key or value), 2^(eV - 19)
};
/// `record` = shared address of the first key's record; the second is 8 records on.
__device__ __forceinline__ KeyPair load_key_pair(std::uint32_t record) {
  const float2 first = ptx::load_shared_float2(record), second = ptx::load_shared_float2(record + kNextKey);
  return {{first.x, second.x}, {first.y, second.y}};
}

/// One field of a step's records for the 16 queries 16 u ... of the step, as the thread holds them: 2c, 2c + 1, 2c + 8, 2c + 9. `quad` = 16 bytes times
/// the lane's place in its quad.
__device__ __forceinline__ float4 step_field(std::uint32_t records, int field, int u, std::uint32_t quad) {
  return ptx::load_shared_float4(records + quad + u * kRowGroupBytes + field * kFieldBytes);
}

/// What a step's queries have in common: the factors of its two token-blocks, and the step itself. With an exponent for every token the factors are
/// loaded where they are used.
template <class Config>
struct StepFactors {
  float rho[2], fold[2], weight[2];
  int fold_max, flags;
};
template <class Config>
__device__ __forceinline__ StepFactors<Config> load_step_factors(std::uint32_t records, std::uint32_t flags) {
  StepFactors<Config> factors{};
  factors.flags = ptx::load_shared_int(flags);
  factors.fold_max = ptx::load_shared_int(records + kFoldMax * kFieldBytes);
  if constexpr (Config::kScaleGroup == ScaleGroup::block) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const std::uint32_t first = records + block * 2 * kRowGroupBytes;  // of 32 queries, all alike
      factors.rho[block] = ptx::load_shared_float(first + kRho * kFieldBytes);
      factors.fold[block] = ptx::load_shared_float(first + kFold * kFieldBytes);
      factors.weight[block] = ptx::load_shared_float(first + kWeight * kFieldBytes);
    }
  }
  return factors;
}

/// A field of one half of a step's queries.
struct HalfField {
  float4 of[2];
};
__device__ __forceinline__ HalfField load_half_field(std::uint32_t records, int field, int half, std::uint32_t quad) {
  return {{step_field(records, field, 2 * half, quad), step_field(records, field, 2 * half + 1, quad)}};
}

// dO's exponent is folded into P for dV: a record's factor is relative to R of the 128-query tile (the greatest exponent in it). Where the right edge of
// the mask cuts the step, a key may know only the queries from its first one on: its factors are raised to R over those.

// ---- the step ------------------------------------------------------------------------------------------------------------------

/// Weights that turn Y into the units of dK's payload: 2^(eG + eQ + 11) of queries 16 u ... .
template <class Config>
__device__ __forceinline__ float4 payload_weights(const StepFactors<Config>& factors, std::uint32_t records, int u,
                                                  std::uint32_t quad) {
  if constexpr (Config::kScaleGroup == ScaleGroup::token) return step_field(records, kWeight, u, quad);
  const float weight = factors.weight[u / 2];
  return {weight, weight, weight, weight};
}

/// X = P 2^8 in place of the scores, its codes with dO's fold, Y = dS in place of dP, and the greatest dS of each key, of one half of the step's queries: everything in one piece, so
/// that the multiprocessor makes exponentials and the rest at the same time. Masked: invisible pairs become 0 by selection, after all arithmetic.
template <class Config, int kHalf, bool kMasked_>
__device__ __forceinline__ void make_half(float (&x)[kScores], float (&y)[kScores], std::uint32_t (&codes)[kCodeWords],
                                          const KeyPair& keys, const StepFactors<Config>& factors, const HalfField& bias,
                                          const HalfField& offset, std::uint32_t records, std::uint32_t quad,
                                          const float (&raise)[2], Visible visible, std::uint32_t (&greatest)[2]) {
  constexpr bool block = Config::kScaleGroup == ScaleGroup::block;
  float slope[2] = {keys.slope[0], keys.slope[1]};
  if constexpr (block) {
    slope[0] *= factors.rho[kHalf];
    slope[1] *= factors.rho[kHalf];
  }
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    float4 rho = {1.0f, 1.0f, 1.0f, 1.0f},
           fold = {factors.fold[kHalf], factors.fold[kHalf], factors.fold[kHalf], factors.fold[kHalf]};
    if constexpr (!block) {
      rho = step_field(records, kRho, 2 * kHalf + u, quad);
      fold = step_field(records, kFold, 2 * kHalf + u, quad);
    }
    const float4 b = bias.of[u], o = offset.of[u], weight = payload_weights<Config>(factors, records, 2 * kHalf + u, quad);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = first_of_word(2 * kHalf + u, half);
      x[i] = ptx::exp2_approximate(__fmaf_rn(x[i], slope[half] * rho.x, b.x));
      x[i + 1] = ptx::exp2_approximate(__fmaf_rn(x[i + 1], slope[half] * rho.y, b.y));
      x[i + 4] = ptx::exp2_approximate(__fmaf_rn(x[i + 4], slope[half] * rho.z, b.z));
      x[i + 5] = ptx::exp2_approximate(__fmaf_rn(x[i + 5], slope[half] * rho.w, b.w));
      float4 f = fold;
      if constexpr (kMasked_) f = {f.x * raise[half], f.y * raise[half], f.z * raise[half], f.w * raise[half]};
      const auto keep = [&](int at, float value) { return !kMasked_ || sees(visible, at) ? value : 0.0f; };
      codes[2 * (2 * kHalf + u) + half] = ptx::pack_e4m3x4(keep(i, x[i] * f.x), keep(i + 1, x[i + 1] * f.y),
                                                           keep(i + 4, x[i + 4] * f.z), keep(i + 5, x[i + 5] * f.w));
      const float value = keys.value[half];
      y[i] = keep(i, x[i] * __fmaf_rn(y[i], value, -o.x));
      y[i + 1] = keep(i + 1, x[i + 1] * __fmaf_rn(y[i + 1], value, -o.y));
      y[i + 4] = keep(i + 4, x[i + 4] * __fmaf_rn(y[i + 4], value, -o.z));
      y[i + 5] = keep(i + 5, x[i + 5] * __fmaf_rn(y[i + 5], value, -o.w));
      greatest[half] =
          __vimax3_u32(greatest[half], __float_as_uint(fabsf(y[i]) * weight.x), __float_as_uint(fabsf(y[i + 1]) * weight.y));
      greatest[half] =
          __vimax3_u32(greatest[half], __float_as_uint(fabsf(y[i + 4]) * weight.z), __float_as_uint(fabsf(y[i + 5]) * weight.w));
    }
  }
}

/// Exponents of dK's payload, packed: one a key, from its greatest dS 2^(eG + eQ) over the step's queries (bits). A key lies in the four lanes of a quad.
__device__ __forceinline__ int step_exponents(const std::uint32_t (&greatest)[2]) {
  return pack_halves(payload_exponent(greatest_of_quad(greatest[0])), payload_exponent(greatest_of_quad(greatest[1])));
}

/// dK's payload. Elements of an all but vanished key may meet a factor beyond FP32's range: it stays finite, so that 0 stays 0.
template <class Config>
__device__ __forceinline__ void round_step_payload(std::uint32_t (&codes)[kCodeWords], const float (&y)[kScores], int exponents,
                                                   const StepFactors<Config>& factors, std::uint32_t records, std::uint32_t quad) {
  constexpr float greatest = 0x1p127f;
  const float inverse[2] = {power_of_two(-low_half(exponents)), power_of_two(-high_half(exponents))};
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const float4 weight = payload_weights<Config>(factors, records, u, quad);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = first_of_word(u, half);
      if constexpr (Config::kScaleGroup == ScaleGroup::block) {
        const float factor = fminf(weight.x * inverse[half], greatest);
        codes[2 * u + half] = ptx::pack_e4m3x4(y[i] * factor, y[i + 1] * factor, y[i + 4] * factor, y[i + 5] * factor);
      } else {
        codes[2 * u + half] = ptx::pack_e4m3x4(y[i] * weight.x * inverse[half], y[i + 1] * weight.y * inverse[half],
                                               y[i + 4] * weight.z * inverse[half], y[i + 5] * weight.w * inverse[half]);
      }
    }
  }
}

}  // namespace flamia::sm90::split
