// SPDX-License-Identifier: Apache-2.0
// Parts of a step of the backward kernel with dS in BF16: its products, P and dS, and the way of dQ to memory.
#pragma once
#include <cstdint>

#include "../../ptx/barrier.cuh"
#include "../../ptx/half.cuh"
#include "../../ptx/reduce.cuh"
#include "../../ptx/registers.cuh"
#include "../../ptx/wgmma_bf16.cuh"
#include "../../ptx/wgmma_f16.cuh"
#include "../backward/step_parts.cuh"
#include "config.hpp"

namespace flamia::sm90::ds16 {

using namespace backward;  // fragments, masks, powers of two, products in E4M3

inline constexpr int kGradientWords = 16;  // two BF16 each: dS of 64 queries as the A operand of dK

// ---- operands -----------------------------------------------------------------------------------------------------------------

/// Rows in BF16: an atom holds 8 tokens x 64 channels.
template <class Config>
struct Rows16Operand {
  static constexpr ptx::AtomLayout kLayout{16 * Config::kHeadDim, 1024};
  static constexpr std::uint32_t kStep = 2 * 16 * Config::kHeadDim >> 4;  // 16 tokens
};
/// dS: an atom holds 8 keys x 64 queries.
struct ExchangeOperand {
  static constexpr ptx::AtomLayout kLayout{1024, 0};
  static constexpr std::uint32_t kStep = 2 * 1024 >> 4;  // 16 keys
};
/// Where a thread of the consumers stores dS of queries 0 ... 15 of its step: lane l gives row l % 8 of matrix l / 8, the matrices being (keys 0-7, queries 0-7), (8-15, 0-7),
/// (0-7, 8-15), (8-15, 8-15) of the warp's 16 keys. Queries 16 u ... lie at this offset ^ 32 u.
FLAMIA_LAYOUT_FN std::uint32_t exchange_place(std::uint32_t thread) {
  const std::uint32_t key = thread / 32 * 16 + thread % 16, chunk = thread / 16 % 2;
  return key * 128 + (chunk ^ key % 8) * 16;
}

/// Scores, from E4M3 codes or from NVFP4 as values in FP16; asynchronous.
template <class Config>
__device__ __forceinline__ void issue_logits(float (&x)[kScores], std::uint32_t a_rows, std::uint32_t b_rows) {
  if constexpr (Config::kScaleGroup == ScaleGroup::nvfp4) {
    constexpr ptx::OperandLayout layout{128, 16 * Config::kHeadDim};
    constexpr std::uint32_t step = 2 * 128 >> 4;  // two core matrices along d
    ptx::begin_products();
    ptx::product_f16_64x64<false>(x, ptx::descriptor(a_rows, layout), ptx::descriptor(b_rows, layout));
#pragma unroll
    for (int k = 1; k < Config::kHeadDim / 16; ++k)
      ptx::product_f16_64x64<true>(x, ptx::descriptor(a_rows + k * step, layout), ptx::descriptor(b_rows + k * step, layout));
    ptx::commit_products();
  } else {
    issue_scores<Config>(x, a_rows, b_rows);
  }
}

/// dK: 64 keys x all channels, added up over the steps' queries; asynchronous.
template <class Config>
__device__ __forceinline__ void issue_key_gradient(float (&sum)[Config::kHeadDim / 2], const std::uint32_t (&ds)[kGradientWords],
                                                   std::uint32_t query16) {
  constexpr auto layout = Rows16Operand<Config>::kLayout;
  ptx::begin_products();
#pragma unroll
  for (int k = 0; k < kQueryStep / 16; ++k) {
    const std::uint64_t b = ptx::atom_descriptor(query16 + k * Rows16Operand<Config>::kStep, layout);
    if constexpr (Config::kHeadDim == 128)
      ptx::product_bf16_64x128(sum, ds + 4 * k, b);
    else
      ptx::product_bf16_64x64(sum, ds + 4 * k, b);
  }
  ptx::commit_products();
}

/// dQ: 64 queries x the consumer's channels, over the tile's keys; asynchronous.
template <class Config>
__device__ __forceinline__ void issue_query_gradient(float (&x)[Config::kQueryColumns / 2], std::uint32_t exchange,
                                                     std::uint32_t key16) {
  ptx::begin_products();
#pragma unroll
  for (int k = 0; k < kKeyTile / 16; ++k) {
    const std::uint64_t a = ptx::atom_descriptor(exchange + k * ExchangeOperand::kStep, ExchangeOperand::kLayout);
    const std::uint64_t b = ptx::atom_descriptor(key16 + k * Rows16Operand<Config>::kStep, Rows16Operand<Config>::kLayout);
    if constexpr (Config::kQueryColumns == 64) {
      if (k == 0)
        ptx::product_bf16_64x64<false>(x, a, b);
      else
        ptx::product_bf16_64x64<true>(x, a, b);
    } else {
      if (k == 0)
        ptx::product_bf16_64x32<false>(x, a, b);
      else
        ptx::product_bf16_64x32<true>(x, a, b);
    }
  }
  ptx::commit_products();
}

// ---- P and dS -----------------------------------------------------------------------------------------------------------------

/// A thread among the consumers, by its number, and where it reads records.
struct Place {
  std::uint32_t thread;

  /// Where the lane's queries lie in a record's field: 16 bytes times its place in the quad.
  __device__ __forceinline__ std::uint32_t quad() const { return thread % 4 * 16; }
  /// Where the factors of its first key lie in the tile's; those of the second are 8 records on.
  __device__ __forceinline__ std::uint32_t key() const {
    return (thread / 32 * 16 + thread % 32 / 4) * static_cast<std::uint32_t>(sizeof(KeyFactors));
  }
};
struct KeyPair {
  float first, second;
  __device__ __forceinline__ float operator[](int half) const { return half == 0 ? first : second; }
};
/// Slopes and value factors of the thread's two keys.
struct KeyPairs {
  KeyPair slope, value;
};
__device__ __forceinline__ KeyPairs load_keys(std::uint32_t factors, const Place& place) {
  constexpr int next_key = 8 * static_cast<int>(sizeof(KeyFactors));
  const float2 first = ptx::load_shared_float2(factors + place.key()),
               second = ptx::load_shared_float2(factors + place.key() + next_key);
  return {{first.x, second.x}, {first.y, second.y}};
}

/// A field of the records of the thread's queries 16 u + 2 c + {0, 1, 8, 9}.
template <class Record>
__device__ __forceinline__ float4 query_field(std::uint32_t records, int field, int u, const Place& place) {
  return ptx::load_shared_float4(records + place.quad() + u * Record::kBytes + field);
}
__device__ __forceinline__ float4 four_of(float x) { return {x, x, x, x}; }

/// Factors of P for which a token-block has one number. Per token they are fields, which are loaded where they are needed.
struct BlockFactors {
  float rho[2], fold[2];
};
template <class Record>
__device__ __forceinline__ BlockFactors load_blocks(std::uint32_t records) {
  BlockFactors blocks{};
  if constexpr (!Record::kPerToken) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float2 words = ptx::load_shared_float2(records + 2 * b * Record::kBytes + Record::kBlockRho);
      blocks.rho[b] = words.x;
      blocks.fold[b] = words.y;
    }
  }
  return blocks;
}
/// The unit of dP: that of both blocks, or of the 128-query tile.
struct Gains {
  float of[2];
};
template <class Record>
__device__ __forceinline__ Gains load_gains(std::uint32_t records) {
  const float first = ptx::load_shared_float(records + Record::kGain);
  return {first, Record::kPerToken ? first : ptx::load_shared_float(records + 2 * Record::kBytes + Record::kGain)};
}

struct StepFields {
  float4 of[4];
};
template <class Record>
__device__ __forceinline__ StepFields load_step(std::uint32_t records, int field, const Place& place) {
  const std::uint32_t at = records + place.quad() + field;
  StepFields fields;
#pragma unroll
  for (int u = 0; u < 4; ++u) fields.of[u] = ptx::load_shared_float4(at + u * Record::kBytes);
  return fields;
}

/// X = P 2^8 in place and its codes with dO's fold, of queries 16 u ... Masked: invisible pairs become 0 by selection, after the exponential.
/// With kFolded X takes the fold too. kLevel: all slopes are 1.
template <bool kMasked_, bool kFolded, bool kLevel>
__device__ __forceinline__ void make_probabilities(float (&x)[kScores], std::uint32_t (&codes)[kCodeWords], int u,
                                                   const KeyPair& slope, const float4& rho, const float4& fold, const float4& bias,
                                                   Visible visible, const float (&raise)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = first_of_word(u, half);
    const auto probability = [&](int at, float r, float b) {
      x[at] = ptx::exp2_approximate(__fmaf_rn(x[at], kLevel ? r : slope[half] * r, b));
    };
    probability(i, rho.x, bias.x);
    probability(i + 1, rho.y, bias.y);
    probability(i + 4, rho.z, bias.z);
    probability(i + 5, rho.w, bias.w);
    const auto folded = [&](int at, float f) {
      if constexpr (kMasked_) x[at] = sees(visible, at) ? x[at] : 0.0f;
      if constexpr (!kFolded) return x[at] * (kMasked_ ? f * raise[half] : f);
      x[at] *= f;
      return kMasked_ ? x[at] * raise[half] : x[at];
    };
    codes[2 * u + half] = ptx::pack_e4m3x4(folded(i, fold.x), folded(i + 1, fold.y), folded(i + 4, fold.z), folded(i + 5, fold.w));
  }
}

/// dS of queries 16 u ... from P times `fold` and dP in Y. P of masked pairs is 0 and all factors are finite: so is their dS.
__device__ __forceinline__ void make_gradient(const float (&x)[kScores], const float (&y)[kScores],
                                              std::uint32_t (&ds)[kGradientWords], int u, const KeyPair& value, float gain,
                                              const float4& fold, const float4& offset) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = first_of_word(u, half);
    const float factor = fminf(value[half] * gain, kGreatestFactor);
    const auto one = [&](int at, float f, float d) { return x[at] * f * __fmaf_rn(y[at], factor, -d); };
    ds[4 * u + half] = ptx::pack_bf16x2(one(i, fold.x, offset.x), one(i + 1, fold.y, offset.y));
    ds[4 * u + 2 + half] = ptx::pack_bf16x2(one(i + 4, fold.z, offset.z), one(i + 5, fold.w, offset.w));
  }
}

/// R of the thread's two keys where the edge cuts the step's tile, packed, and the factors that raise the fold to them: a key may know only
/// the queries from its first one on. `references` = those of the tile's first row.
__device__ __forceinline__ int cut_references(float (&raise)[2], const std::int32_t* references, int of_tile, Window window,
                                              int first_key, int tile_query) {
  int found[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    found[half] = references[clamp(first_key + 8 * half - window.right - tile_query, 0, kKeyTile - 1)];
    raise[half] = power_of_two(clamp(of_tile - found[half], 0, 127));
  }
  return pack_halves(found[0], found[1]);
}

// ---- dQ -----------------------------------------------------------------------------------------------------------------------

/// dQ of a warp's 16 rows x the consumer's channels on its way to the partial sums.
template <class Config>
struct Partials {
  static constexpr bool kHalf = Config::kPartials == PartialFormat::f16;
  static constexpr int kBytes = kHalf ? 2 : 4;
  static constexpr int kWords = Config::kQueryColumns / 2 / (kHalf ? 2 : 1);
  std::uint32_t word[kWords];

  __device__ __forceinline__ void take(const float (&x)[Config::kQueryColumns / 2], const float (&unit)[2]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      word[i] = kHalf ? ptx::pack_f16x2(x[2 * i] * unit[i % 2], x[2 * i + 1] * unit[i % 2]) : __float_as_uint(x[i]);
  }
  __device__ __forceinline__ void store(std::uint8_t* to) const {
#pragma unroll
    for (int i = 0; i < kWords; i += 4)
      *reinterpret_cast<uint4*>(to + i / 4 * 512) = make_uint4(word[i], word[i + 1], word[i + 2], word[i + 3]);
  }
  /// `to` = where the lane's first 16 bytes lie.
  __device__ __forceinline__ void add(std::uint8_t* to) const {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      if constexpr (kHalf)
        ptx::add_global_f16x8(to + i / 4 * 512, word[i], word[i + 1], word[i + 2], word[i + 3]);
      else
        ptx::add_global_f32x4(to + i / 4 * 512, __uint_as_float(word[i]), __uint_as_float(word[i + 1]),
                              __uint_as_float(word[i + 2]), __uint_as_float(word[i + 3]));
    }
  }
};

}  // namespace flamia::sm90::ds16
