// SPDX-License-Identifier: Apache-2.0
// The first half of what a consumer warpgroup does with one 64 x 128 tile: scores, factors, masks, maxima. The order is in consumer.cuh.
//
// Fragment of a thread (lane = 4 g + c of its warp): score register i belongs to row g + 8 * (i / 2 % 2) of the warp's 16 rows and to
// key 8 * (i / 4) + 2 c + i % 2. "Half" below is i / 2 % 2: every thread works on two rows.
#pragma once
#include <cstdint>

#include "../../ptx/convert.cuh"
#include "../../ptx/matrix.cuh"
#include "../../ptx/registers.cuh"
#include "../../ptx/wgmma_f16.cuh"
#include "../../ptx/wgmma_forward.cuh"
#include "config.hpp"
#include "exponents.cuh"
#include "storage.hpp"
#include "work.hpp"

namespace flamia::sm90::forward {

inline constexpr float kMinusInfinity = -__builtin_huge_valf();
inline constexpr int kCodeWords = kKeyTile / 8;  // registers of four codes: 64 codes a thread

/// What a row carries from tile to tile; a thread works on two rows.
template <class Config>
struct RowState {
  float output[Config::kOutputs];  // A: sum over keys of code * value, times 2^(shift - value unit)
  float sum[2];                    // l * 2^shift: sum of the unfolded codes
  float reference[2];              // m (phase32) or r (tilesum)
};

/// What does not change from tile to tile of a work item; uniform over the warpgroup.
struct Item {
  std::uint32_t query;  // descriptor of the warpgroup's 64 queries
  int first_query, length;
  int first_common, last_common;  // keys that all rows see
  int first_whole, whole;         // tiles of nothing else: the first, how many
  Window window;
  const ForwardParams* params;  // test mode only, like the next
  std::int64_t first_row;       // of the document in the tables [head][slots]

  /// Position in the document of a thread's row. Recomputed where it is needed (masks, mixed tiles): a register saved for the products.
  __device__ __forceinline__ int position(int half) const {
    const unsigned thread = ptx::thread_index() % 128u;
    return first_query + static_cast<int>(thread / 32 * 16 + thread % 32 / 4) + 8 * half;
  }
};

/// A small integer for each of a thread's two rows, in one register.
struct RowPair {
  std::int32_t packed;

  __device__ __forceinline__ RowPair(int first, int second) : packed((first & 0xFFFF) | second << 16) {}
  __device__ __forceinline__ int of(int half) const {
    return half == 0 ? static_cast<std::int16_t>(packed & 0xFFFF) : packed >> 16;
  }
};

/// A row has no reference before its first visible key; a finite stand-in keeps infinity minus infinity out of the arithmetic.
inline constexpr float kNoReference = -1.0e30f;
inline constexpr float kGridEnd =
    65536.0f;  // FP32 has no 1/32 left from here on: m is the maximum itself, t is rounded before m is taken off

// ---- scores ------------------------------------------------------------------------------------------------------------------

template <class Config>
struct QueryOperand {
  static constexpr ptx::OperandLayout kLayout{128, 8 * Config::kHeadDim* Config::kScoreBytes};
};
template <class Config>
struct ValueOperand {
  static constexpr ptx::OperandLayout kLayout{Config::kValueGroupStride, 128};
};

/// The column of ones alone, 32 tokens. Where the bias folds: not those beside the values, where powers of two may stand.
template <class Config>
struct OnesOperand {
  static constexpr std::uint32_t kStride = Config::kBiasFolds ? Config::kOnesBytes : Config::kValueGroupStride;
  static constexpr ptx::OperandLayout kLayout{kStride, 128};
};

/// S = Q K^T for 64 queries and 128 keys; asynchronous.
template <class Config>
__device__ __forceinline__ void issue_scores(float (&scores)[Config::kScores], std::uint32_t query, std::uint32_t key) {
  constexpr auto layout = QueryOperand<Config>::kLayout;
  constexpr std::uint32_t step = 2 * 128 >> 4;  // two core matrices along d
  ptx::begin_products();
  if constexpr (Config::kScaleGroup == ScaleGroup::nvfp4) {
    ptx::product_f16_64x128<false>(scores, ptx::descriptor(query, layout), ptx::descriptor(key, layout));
#pragma unroll
    for (int k = 1; k < Config::kHeadDim / 16; ++k)
      ptx::product_f16_64x128<true>(scores, ptx::descriptor(query + k * step, layout), ptx::descriptor(key + k * step, layout));
  } else {
    ptx::product_64x128<false>(scores, ptx::descriptor(query, layout), ptx::descriptor(key, layout));
#pragma unroll
    for (int k = 1; k < Config::kHeadDim / 32; ++k)
      ptx::product_64x128<true>(scores, ptx::descriptor(query + k * step, layout), ptx::descriptor(key + k * step, layout));
  }
  ptx::commit_products();
}

/// Descriptors' low words of a stage's keys and values.
template <class Config>
__device__ __forceinline__ std::uint32_t keys_of(std::uint32_t stage) {
  constexpr std::uint32_t rest = (offsetof(Stage<Config>, key) >> 4) + (QueryOperand<Config>::kLayout.k_stride >> 4 << 16);
  return (stage >> 4) + rest;
}
template <class Config>
__device__ __forceinline__ std::uint32_t values_of(std::uint32_t stage) {
  constexpr std::uint32_t rest = (offsetof(Stage<Config>, value) >> 4) + (ValueOperand<Config>::kLayout.k_stride >> 4 << 16);
  return (stage >> 4) + rest;
}

/// Logit = score * factor. One factor for a row and a token-block; with per-token exponents, which a mixed tile applies to the scores
/// beforehand, one for a row and the tile. Formed while S is being multiplied. `tile`: shared address of its exponents.
template <class Config>
struct ScoreFactors {
  static constexpr int kBlocks = Config::kScaleGroup == ScaleGroup::block ? kKeyTile / kBlock : 1;
  static constexpr int kShifts = Config::kBiasFolds ? kKeyTile / kBlock : 1;
  float of[2][kBlocks];
  float shift[kShifts];  // kBiasFolds: a token-block's value exponent below the greatest of the tile

  __device__ __forceinline__ float of_score(int half, int i) const { return of[half][kBlocks == 1 ? 0 : i / 16]; }
};

template <class Config>
__device__ __forceinline__ ScoreFactors<Config> score_factors(std::uint32_t tile, float2 row_scale) {
  using Exponents = TileExponents<Config::kScaleEntries>;
  ScoreFactors<Config> result;
  if constexpr (Config::kScaleGroup == ScaleGroup::block) {
    const float4 keys = ptx::load_shared_float4(tile + offsetof(Exponents, key_factors));
    const float4 shifts = ptx::load_shared_float4(tile + offsetof(Exponents, value));
    const float key[4] = {keys.x, keys.y, keys.z, keys.w}, shift[4] = {shifts.x, shifts.y, shifts.z, shifts.w};
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      result.of[0][block] = fabsf(row_scale.x) * key[block];
      result.of[1][block] = fabsf(row_scale.y) * key[block];
      result.shift[block] = __shfl_sync(kFullWarp, shift[block], 0);
    }
  } else {
    const float key = ptx::load_shared_float(tile + offsetof(Exponents, key_factor));
    result.of[0][0] = fabsf(row_scale.x) * key;
    result.of[1][0] = fabsf(row_scale.y) * key;
    if constexpr (Config::kBiasFolds) {
      const float4 shifts = ptx::load_shared_float4(tile + (offsetof(Stage<Config>, shift) - offsetof(Stage<Config>, exponents)));
      result.shift[0] = shifts.x, result.shift[1] = shifts.y, result.shift[2] = shifts.z, result.shift[3] = shifts.w;
    }
  }
  return result;
}

/// Per-token exponents in a mixed tile; NaN for a flagged token.
template <class Config>
__device__ __forceinline__ void apply_key_factors(float (&scores)[Config::kScores],
                                                  const TileExponents<Config::kScaleEntries>& tile, int lane) {
#pragma unroll
  for (int j = 0; j < kKeyTile / 8; ++j) {
    const float2 factor = *reinterpret_cast<const float2*>(&tile.key_factors[8 * j + 2 * (lane % 4)]);
    scores[4 * j] *= factor.x;
    scores[4 * j + 1] *= factor.y;
    scores[4 * j + 2] *= factor.x;
    scores[4 * j + 3] *= factor.y;
  }
}

/// Flagged token-blocks: NaN goes into the scores, where the mask can still overrule it, and out of the factors.
template <class Config>
__device__ __forceinline__ void flag_blocks(float (&scores)[Config::kScores], ScoreFactors<Config>& factors,
                                            const TileExponents<Config::kScaleEntries>& tile) {
#pragma unroll
  for (int block = 0; block < ScoreFactors<Config>::kBlocks; ++block) {
    if (tile.key_factors[block] == tile.key_factors[block]) continue;
    factors.of[0][block] = factors.of[1][block] = 1.0f;
#pragma unroll
    for (int i = 0; i < Config::kScores / 4; ++i) scores[block * Config::kScores / 4 + i] = kNaN;
  }
}

/// Where a query and its keys are both tiny or zero the factor underflows to 0, and 0 times a masked score is NaN, not -infinity. Logits that
/// small vanish whatever the factor. NaN stays.
template <class Config>
__device__ __forceinline__ void keep_above_zero(ScoreFactors<Config>& factors) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int block = 0; block < ScoreFactors<Config>::kBlocks; ++block)
      factors.of[half][block] = ptx::max_or_nan(factors.of[half][block], 0x1p-126f);
}

/// Keys a row does not see get -infinity: they count in no maximum and become code 0. Right and left edge of the mask.
template <class Config>
__device__ __forceinline__ void mask_after(float (&scores)[Config::kScores], const Item& item, int first_key, int lane) {
  const int origin = first_key + 2 * (lane % 4);
  const int limit[2] = {item.window.last_key(item.position(0), item.length) - origin,
                        item.window.last_key(item.position(1), item.length) - origin};
  if (first_key + kKeyTile / 2 - 1 > item.last_common) {  // the first 64 keys are cut as well
#pragma unroll
    for (int i = 0; i < Config::kScores / 2; ++i) {
      if (8 * (i / 4) + i % 2 > limit[i / 2 % 2]) scores[i] = kMinusInfinity;
    }
  }
#pragma unroll
  for (int i = Config::kScores / 2; i < Config::kScores; ++i) {
    if (8 * (i / 4) + i % 2 > limit[i / 2 % 2]) scores[i] = kMinusInfinity;
  }
}
template <class Config>
__device__ __forceinline__ void mask_before(float (&scores)[Config::kScores], const Item& item, int first_key, int lane) {
  const int origin = first_key + 2 * (lane % 4);
  const int limit[2] = {item.window.first_key(item.position(0)) - origin, item.window.first_key(item.position(1)) - origin};
#pragma unroll
  for (int i = 0; i < Config::kScores; ++i) {
    if (8 * (i / 4) + i % 2 < limit[i / 2 % 2]) scores[i] = kMinusInfinity;
  }
}

/// Greatest logit among a thread's 32 keys of one row; NaN is skipped. (Rounding is monotone: the greatest score gives it.)
template <class Config>
__device__ __forceinline__ float thread_maximum(const float (&scores)[Config::kScores], const ScoreFactors<Config>& factors,
                                                int half) {
  constexpr int per_block = Config::kScores / ScoreFactors<Config>::kBlocks;
  float greatest = kMinusInfinity;
#pragma unroll
  for (int block = 0; block < ScoreFactors<Config>::kBlocks; ++block) {
    const int first = block * per_block + 2 * half;
    float score = fmaxf(scores[first], scores[first + 1]);
#pragma unroll
    for (int i = 4; i < per_block; i += 4) score = fmaxf(score, fmaxf(scores[first + i], scores[first + i + 1]));
    greatest = fmaxf(greatest, __fmul_rn(score, factors.of[half][block]));
  }
  return greatest;
}

/// Over the four threads that share a row.
__device__ __forceinline__ float quad_maximum(float value) {
  value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, 1));
  return fmaxf(value, __shfl_xor_sync(kFullWarp, value, 2));
}

}  // namespace flamia::sm90::forward
