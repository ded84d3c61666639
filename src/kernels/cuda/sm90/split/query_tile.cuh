// SPDX-License-Identifier: Apache-2.0
// What a consumer warpgroup of the dQ kernel does with a 64 x 128 tile, step by step: P, dS, the payload's exponents, the payload. The order is in
// query_consumer.cuh, the units are those of ../backward/records.hpp.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../../ptx/wgmma_split.cuh"
#include "../backward/step_parts.cuh"
#include "query_config.hpp"

namespace flamia::sm90::split {

inline constexpr int kTileScores = 64;    // registers of a 64 x 128 accumulator
inline constexpr int kPayloadWords = 16;  // A operand of dQ: 64 queries x 128 keys
inline constexpr int kTileGroups = kKeyTile / 16;

/// A thread's registers for a tile. With 64 channels the tile's dQ has registers of its own: an accumulator of 32 cannot share those of 64.
template <class Config>
struct TileRegisters {
  float x[kTileScores] = {};
  float y[kTileScores] = {};
  float narrow[Config::kHeadDim == 64 ? Config::kSums : 1] = {};

  __device__ __forceinline__ float (&part())[Config::kSums] {
    if constexpr (Config::kHeadDim == 64)
      return narrow;
    else
      return y;
  }
};

/// Code word 2 u + half holds registers first, first + 1, first + 4, first + 5: keys 16 u + 2 c + {0, 1, 8, 9} of query `half`.
FLAMIA_LAYOUT_FN int first_of_payload(int u, int half) { return 8 * u + 2 * half; }

// ---- products ------------------------------------------------------------------------------------------------------------------

/// Scores or dP: 64 queries (rows of Q or dO') times 128 keys (rows of K or V); asynchronous.
template <class Config>
__device__ __forceinline__ void issue_tile(float (&x)[kTileScores], std::uint32_t queries, std::uint32_t keys) {
  constexpr auto layout = RowsOperand<Config>::kLayout;
  constexpr std::uint32_t step = 2 * 128 >> 4;  // two core matrices along d
  ptx::begin_products();
#pragma unroll
  for (int k = 0; k < Config::kHeadDim / 32; ++k) {
    const std::uint64_t a = ptx::descriptor(queries + k * step, layout), b = ptx::descriptor(keys + k * step, layout);
    if (k == 0)
      ptx::product_in_place_64x128<false>(x, a, b);
    else
      ptx::product_in_place_64x128<true>(x, a, b);
  }
  ptx::commit_products();
}

/// The tile's part of dQ; asynchronous.
template <class Config>
__device__ __forceinline__ void issue_query_gradient(float (&part)[Config::kSums], const std::uint32_t (&codes)[kPayloadWords],
                                                     std::uint32_t keys) {
  constexpr auto layout = TransposedOperand<Config>::kLayout;
  constexpr std::uint32_t step = 32 * Config::kHeadDim >> 4;  // 32 keys
  ptx::begin_products();
#pragma unroll
  for (int k = 0; k < kKeyTile / 32; ++k) {
    const std::uint64_t b = ptx::descriptor(keys + k * step, layout);
    if constexpr (Config::kHeadDim == 128) {
      if (k == 0)
        ptx::product_in_place_64x128<false>(part, codes, b);
      else
        ptx::product_in_place_64x128<true>(part, codes + 4 * k, b);
    } else {
      if (k == 0)
        ptx::product_64x64<false>(part, codes, b);
      else
        ptx::product_64x64<true>(part, codes + 4 * k, b);
    }
  }
  ptx::commit_products();
}

// ---- keys ----------------------------------------------------------------------------------------------------------------------

inline constexpr int kSlopeAt = 0, kValueAt = 4, kReachAt = 12;  // bytes of a KeyRecord
static_assert(offsetof(KeyRecord, slope) == kSlopeAt && offsetof(KeyRecord, value) == kValueAt &&
              offsetof(KeyRecord, reach) == kReachAt);
inline constexpr int kKeyRecordBytes = static_cast<int>(sizeof(KeyRecord));

/// Greatest factor of a key's dS. A flagged key's factor, NaN, becomes this: its visible dS are NaN already, and masked ones must stay 0.
inline constexpr float kGreatestSlope = 0x1p120f;
__device__ __forceinline__ float finite_slope(float slope) { return fminf(slope, kGreatestSlope); }

/// dQ's payload holds dS 2^eK, whose exponent may lie below FP32's normal numbers (K near 2^-118). So that every factor is one of them, keys' factors
/// are lifted by this power of two and the payload's inverse is lowered by it.
inline constexpr int kLift = 7;
inline constexpr float kLifted = 1 << kLift;
inline constexpr int kLeastWideExponent = -kExponentBias - kLift, kGreatestWideExponent = 126 - kLift;

/// Factors of a tile's keys. They are loaded long before they are used: a load from shared memory takes more than a hundred cycles beside running
/// products.
template <class Config>
struct KeyFactors {
  float slope[Config::kFactors];  // 2^eK, NaN for a flagged token-block; 1 in a mixed tile, whose scores carry the factors already
  float value[Config::kFactors];  // 2^(eV - 19), likewise
  bool mixed;                     // per-token exponents: the keys differ
};
template <class Config>
__device__ __forceinline__ KeyFactors<Config> load_factors(std::uint32_t records) {
  KeyFactors<Config> factors;
  factors.mixed = false;
#pragma unroll
  for (int b = 0; b < Config::kFactors; ++b) {
    const float2 both = ptx::load_shared_float2(records + b * kBlock * kKeyRecordBytes);
    factors.slope[b] = both.x;
    factors.value[b] = both.y;
  }
  if constexpr (Config::kScaleGroup == ScaleGroup::token) {
    factors.mixed = (ptx::load_shared_int(records + kReachAt) & static_cast<int>(kUniform)) == 0;
    if (factors.mixed) factors.slope[0] = factors.value[0] = 1.0f;
  }
  return factors;
}
template <class Config>
FLAMIA_LAYOUT_FN int factor_of(int u) {
  return Config::kFactors == 1 ? 0 : u / 2;
}

/// Mixed tiles: every score times its key's factor (kPayload: every dS, times the lifted one). `mine` = shared address of the record of the
/// thread's first key.
template <bool kPayload>
__device__ __forceinline__ void multiply_by_keys(float (&x)[kTileScores], std::uint32_t mine, int at) {
#pragma unroll
  for (int j = 0; j < kKeyTile / 8; ++j) {
    float first = ptx::load_shared_float(mine + 8 * j * kKeyRecordBytes + at);
    float second = ptx::load_shared_float(mine + (8 * j + 1) * kKeyRecordBytes + at);
    if constexpr (kPayload) first = finite_slope(first) * kLifted, second = finite_slope(second) * kLifted;
    x[4 * j] *= first;
    x[4 * j + 1] *= second;
    x[4 * j + 2] *= first;
    x[4 * j + 3] *= second;
  }
}

// ---- the tile ------------------------------------------------------------------------------------------------------------------

/// A field of the records of the thread's two queries. `row` = shared address of the first one's word in field 0.
__device__ __forceinline__ void load_rows(float (&of)[2], std::uint32_t row, int field) {
  of[0] = ptx::load_shared_float(row + field * kFieldBytes);
  of[1] = ptx::load_shared_float(row + field * kFieldBytes + (pi_column(8) - pi_column(0)) * 4);
}

/// What stays the same from tile to tile for the thread's two queries.
struct RowFactors {
  float bias[2], rho[2], offset[2];
};
/// How much of a row's unit, 2^unit, its dS carries already, by way of P's exponent 8 - m: all but what FP32 has no room for. Without it dS 2^eK may leave
/// FP32's range where dQ does not.
__device__ __forceinline__ int carried_unit(int unit) { return clamp(unit, -100, 100); }

__device__ __forceinline__ RowFactors load_row_factors(std::uint32_t row) {
  RowFactors rows;
  load_rows(rows.bias, row, kBias);
  float unit[2];
  load_rows(unit, row, kDqUnit);
#pragma unroll
  for (int half = 0; half < 2; ++half) rows.bias[half] += static_cast<float>(carried_unit(__float_as_int(unit[half])));
  load_rows(rows.rho, row, kRho);
  load_rows(rows.offset, row, kOffset);
  return rows;
}

/// Which of the tile's keys the thread's two queries see: bit k of a row stands for its k-th key, 8 (k / 2) + 2 c + k % 2.
struct VisibleKeys {
  std::uint32_t row[2];
};

FLAMIA_LAYOUT_FN int keys_before(int end) {
  if (end <= 0) return 0;
  return end >= kKeyTile ? 32 : end / 8 * 2 + (end % 8 < 2 ? end % 8 : 2);
}
FLAMIA_LAYOUT_FN std::uint32_t bits_below(int n) { return n >= 32 ? 0xFFFFFFFFu : (1u << n) - 1; }
/// Keys first ... end - 1, as offsets from the thread's first key.
FLAMIA_LAYOUT_FN std::uint32_t visible_key_bits(int first, int end) {
  return bits_below(keys_before(end)) & ~bits_below(keys_before(first));
}
FLAMIA_LAYOUT_FN bool sees_key(const VisibleKeys& visible, int i) {
  return (visible.row[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1) != 0;
}
/// `query`: the first one's position; the second is 8 on.
FLAMIA_LAYOUT_FN VisibleKeys visible_keys(Window window, int query, int first_key, int length, int lane) {
  const int origin = first_key + 2 * (lane % 4);
  return {{visible_key_bits(window.first_key(query) - origin, window.last_key(query, length) + 1 - origin),
           visible_key_bits(window.first_key(query + 8) - origin, window.last_key(query + 8, length) + 1 - origin)}};
}

/// Y = dS in place of the scores, X = dP. Masked: invisible pairs become 0 by selection, after all arithmetic.
template <class Config, bool kMasked_>
__device__ __forceinline__ void make_tile_gradient(const float (&x)[kTileScores], float (&y)[kTileScores], const RowFactors& rows,
                                                   const KeyFactors<Config>& keys, const VisibleKeys& visible) {
#pragma unroll
  for (int u = 0; u < kTileGroups; ++u) {
    const float scale[2] = {keys.slope[factor_of<Config>(u)] * rows.rho[0], keys.slope[factor_of<Config>(u)] * rows.rho[1]};
#pragma unroll
    for (int i = 8 * u; i < 8 * u + 8; ++i) {
      const int half = i / 2 % 2;
      const float probability = ptx::exp2_approximate(__fmaf_rn(y[i], scale[half], rows.bias[half]));
      const float ds = probability * __fmaf_rn(x[i], keys.value[factor_of<Config>(u)], -rows.offset[half]);
      y[i] = !kMasked_ || sees_key(visible, i) ? ds : 0.0f;
    }
  }
}

/// backward::payload_exponent() over a wider range.
__device__ __forceinline__ int wide_payload_exponent(std::uint32_t magnitude_bits) {
  return clamp(unclamped_payload_exponent(magnitude_bits), kLeastWideExponent, kGreatestWideExponent);
}

/// Exponents of the payload, packed: one a query, from its greatest dS 2^eK over the tile. A query lies in the four lanes of a quad.
template <class Config>
__device__ __forceinline__ int payload_exponents(const float (&y)[kTileScores], const KeyFactors<Config>& keys) {
  std::uint32_t greatest[2] = {0, 0};
#pragma unroll
  for (int u = 0; u < kTileGroups; ++u) {
    const float weight = finite_slope(keys.slope[factor_of<Config>(u)]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = first_of_payload(u, half);
      greatest[half] =
          __vimax3_u32(greatest[half], __float_as_uint(fabsf(y[i]) * weight), __float_as_uint(fabsf(y[i + 1]) * weight));
      greatest[half] =
          __vimax3_u32(greatest[half], __float_as_uint(fabsf(y[i + 4]) * weight), __float_as_uint(fabsf(y[i + 5]) * weight));
    }
  }
  return pack_halves(wide_payload_exponent(greatest_of_quad(greatest[0])), wide_payload_exponent(greatest_of_quad(greatest[1])));
}

/// The payload. Elements of an all but vanished query may meet a factor beyond FP32's range, or NaN of a flagged token-block: it stays finite, so
/// that 0 stays 0.
template <class Config>
__device__ __forceinline__ void round_payload(std::uint32_t (&codes)[kPayloadWords], const float (&y)[kTileScores], int exponents,
                                              const KeyFactors<Config>& keys) {
  constexpr float greatest = 0x1p127f;
  const float inverse[2] = {power_of_two(-low_half(exponents) - kLift), power_of_two(-high_half(exponents) - kLift)};
#pragma unroll
  for (int u = 0; u < kTileGroups; ++u) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = fminf(keys.slope[factor_of<Config>(u)] * kLifted * inverse[half], greatest);
      const int i = first_of_payload(u, half);
      codes[2 * u + half] = ptx::pack_e4m3x4(y[i] * factor, y[i + 1] * factor, y[i + 4] * factor, y[i + 5] * factor);
    }
  }
}

/// dQ += x * 2^exponent of the query, rounded once: FP32 takes over every tile. The power may be a subnormal number.
template <int kCount>
__device__ __forceinline__ void promote_tile(float (&sum)[kCount], const float (&part)[kCount], int exponents) {
  constexpr int shift = 1 + kLift;
  const float scale[2] = {power_of_two(low_half(exponents) + shift) * (1.0f / (1 << shift)),
                          power_of_two(high_half(exponents) + shift) * (1.0f / (1 << shift))};
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] = __fmaf_rn(part[i], scale[i / 2 % 2], sum[i]);
}

}  // namespace flamia::sm90::split
