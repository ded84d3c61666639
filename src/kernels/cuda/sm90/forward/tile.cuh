// SPDX-License-Identifier: Apache-2.0
// What a consumer warpgroup does with one 64 x 128 tile of scores, step by step; the order is in the row-reference files.
//
// Fragment of a thread (lane = 4 g + c of its warp): score register i belongs to row g + 8 * (i / 2 % 2) of the warp's 16 rows and to
// key 8 * (i / 4) + 2 c + i % 2. "Half" below is i / 2 % 2: every thread works on two rows.
#pragma once
#include <cstdint>

#include "../../ptx/convert.cuh"
#include "../../ptx/registers.cuh"
#include "../../ptx/wgmma.cuh"
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
  Window window;

  /// Position in the document of a thread's row. Recomputed where it is needed (masks, mixed tiles): a register saved for the products.
  __device__ __forceinline__ int position(int half) const {
    const int thread = ptx::thread_index() % 128;
    return first_query + thread / 32 * 16 + thread % 32 / 4 + 8 * half;
  }
};

/// A small integer for each of a thread's two rows, in one register.
struct RowPair {
  std::int32_t packed;

  __device__ __forceinline__ RowPair(int first, int second) : packed((first & 0xFFFF) | second << 16) {}
  __device__ __forceinline__ int of(int half) const { return half == 0 ? static_cast<std::int16_t>(packed & 0xFFFF) : packed >> 16; }
};

/// A row has no reference before its first visible key; a finite stand-in keeps infinity minus infinity out of the arithmetic.
inline constexpr float kNoReference = -1.0e30f;

// ---- scores ------------------------------------------------------------------------------------------------------------------

template <class Config>
struct QueryOperand {
  static constexpr ptx::OperandLayout kLayout{128, 8 * Config::kHeadDim};
};
template <class Config>
struct ValueOperand {
  static constexpr ptx::OperandLayout kLayout{Config::kValueGroupStride, 128};
};

/// S = Q K^T for 64 queries and 128 keys; asynchronous.
template <class Config>
__device__ __forceinline__ void issue_scores(float (&scores)[Config::kScores], std::uint32_t query, std::uint32_t key) {
  constexpr auto layout = QueryOperand<Config>::kLayout;
  constexpr std::uint32_t step = 2 * 128 >> 4;  // two core matrices along d
  ptx::begin_products();
  ptx::product_64x128<false>(scores, ptx::descriptor(query, layout), ptx::descriptor(key, layout));
#pragma unroll
  for (int k = 1; k < Config::kHeadDim / 32; ++k) {
    ptx::product_64x128<true>(scores, ptx::descriptor(query + k * step, layout), ptx::descriptor(key + k * step, layout));
  }
  ptx::commit_products();
}

/// Factor from raw scores to base-2 logits for a query of this exponent byte; the tile's key exponent is multiplied in later. Queries
/// below 2^-100 of E4M3's range keep that exponent: their logits vanish against any key of an amplitude under 2^100.
__device__ __forceinline__ float query_scale(float softmax_scale, int byte) {
  const float scale = __fmul_rn(softmax_scale, 1.4426950408889634f) * power_of_two(clamp(byte - kExponentBias, -100, 120));
  return byte == kFlaggedByte ? kNaN : scale;
}

/// Logit = score * factor. The factor of a row and a token-block; with per-token exponents, which a mixed tile applies to the scores
/// beforehand, of a row and the tile.
template <class Config>
struct ScoreFactors {
  static constexpr int kBlocks = Config::kScaleGroup == ScaleGroup::block ? kKeyTile / kBlock : 1;
  float row[2];
  float block[kBlocks];

  __device__ __forceinline__ float of_block(int half, int index) const { return row[half] * block[index]; }
  __device__ __forceinline__ float of_score(int half, int i) const { return of_block(half, kBlocks == 1 ? 0 : i / 16); }
};

/// Key factors of a tile. NaN for a flagged key goes into its scores, where the mask can still overrule it.
template <class Config>
__device__ __forceinline__ ScoreFactors<Config> score_factors(float (&scores)[Config::kScores],
                                                              const TileExponents<Config::kScaleEntries>& tile, float2 row_scale,
                                                              float key_factor, bool mixed_keys, int lane) {
  if constexpr (Config::kScaleGroup == ScaleGroup::block) {
    const float4 factors = *reinterpret_cast<const float4*>(tile.key_factors);
    ScoreFactors<Config> result{{row_scale.x, row_scale.y}, {factors.x, factors.y, factors.z, factors.w}};
    if (mixed_keys) {
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        if (result.block[block] == result.block[block]) continue;
        result.block[block] = 1.0f;
#pragma unroll
        for (int i = 0; i < Config::kScores / 4; ++i) scores[block * Config::kScores / 4 + i] = kNaN;
      }
    }
    return result;
  } else {
    if (!mixed_keys) return {{row_scale.x, row_scale.y}, {key_factor}};
#pragma unroll
    for (int j = 0; j < kKeyTile / 8; ++j) {
      const float2 factor = *reinterpret_cast<const float2*>(&tile.key_factors[8 * j + 2 * (lane % 4)]);
      scores[4 * j] *= factor.x;
      scores[4 * j + 1] *= factor.y;
      scores[4 * j + 2] *= factor.x;
      scores[4 * j + 3] *= factor.y;
    }
    return {{row_scale.x, row_scale.y}, {1.0f}};
  }
}

/// Keys a row does not see get -infinity: they count in no maximum and become code 0. Right and left edge of the mask.
template <class Config>
__device__ __forceinline__ void mask_after(float (&scores)[Config::kScores], const Item& item, int first_key, int lane) {
  const int origin = first_key + 2 * (lane % 4);
  const int limit[2] = {item.window.last_key(item.position(0), item.length) - origin,
                        item.window.last_key(item.position(1), item.length) - origin};
#pragma unroll
  for (int i = 0; i < Config::kScores; ++i) {
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
__device__ __forceinline__ float thread_maximum(const float (&scores)[Config::kScores], const ScoreFactors<Config>& factors, int half) {
  constexpr int per_block = Config::kScores / ScoreFactors<Config>::kBlocks;
  float greatest = kMinusInfinity;
#pragma unroll
  for (int block = 0; block < ScoreFactors<Config>::kBlocks; ++block) {
    const int first = block * per_block + 2 * half;
    float score = fmaxf(scores[first], scores[first + 1]);
#pragma unroll
    for (int i = 4; i < per_block; i += 4) score = fmaxf(score, fmaxf(scores[first + i], scores[first + i + 1]));
    greatest = fmaxf(greatest, __fmul_rn(score, factors.of_block(half, block)));
  }
  return greatest;
}

/// Over the four threads that share a row.
__device__ __forceinline__ float quad_maximum(float value) {
  value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, 1));
  return fmaxf(value, __shfl_xor_sync(kFullWarp, value, 2));
}

// ---- codes -------------------------------------------------------------------------------------------------------------------

/// Word w of the A operand holds the codes of score registers first, first + 1, first + 4, first + 5 (layout.hpp, order pi).
__device__ constexpr int first_score_of_word(int word) { return 16 * (word / 4) + 8 * (word / 2 % 2) + 2 * (word % 2); }
__device__ constexpr int half_of_word(int word) { return word % 2; }

/// P of the four keys of code word w, before rounding: exp2(logit + bias).
template <class Config>
__device__ __forceinline__ float4 exponentials(const float (&scores)[Config::kScores], const ScoreFactors<Config>& factors,
                                               const float (&bias)[2], int w) {
  const int s = first_score_of_word(w), half = half_of_word(w);
  const float scale = factors.of_score(half, s);
  return {ptx::exp2_approximate(__fmaf_rn(scores[s], scale, bias[half])), ptx::exp2_approximate(__fmaf_rn(scores[s + 1], scale, bias[half])),
          ptx::exp2_approximate(__fmaf_rn(scores[s + 4], scale, bias[half])),
          ptx::exp2_approximate(__fmaf_rn(scores[s + 5], scale, bias[half]))};
}

/// Codes in a tile with one value exponent.
template <class Config>
__device__ __forceinline__ void make_codes(std::uint32_t (&codes)[kCodeWords], const float (&scores)[Config::kScores],
                                           const ScoreFactors<Config>& factors, const float (&bias)[2]) {
#pragma unroll
  for (int w = 0; w < kCodeWords; ++w) {
    const float4 p = exponentials<Config>(scores, factors, bias, w);
    codes[w] = ptx::pack_e4m3x4(p.x, p.y, p.z, p.w);
  }
}

/// Row sums of 32 keys' codes against the columns of ones, with the very numbers that issue_output would give; asynchronous.
template <class Config>
__device__ __forceinline__ void issue_sums(float (&sums)[4], const std::uint32_t (&codes)[kCodeWords], std::uint32_t value, int step) {
  constexpr auto layout = ValueOperand<Config>::kLayout;
  const std::uint64_t ones = ptx::descriptor(value + (Config::kValueGroupBytes >> 4) + step * (2 * Config::kValueGroupStride >> 4), layout);
  ptx::begin_products();
  if (step == 0) ptx::product_64x8<false>(sums, codes + 4 * step, ones);
  else ptx::product_64x8<true>(sums, codes + 4 * step, ones);
  ptx::commit_products();
}

/// 2^(value exponent - reach), the fold of V's exponent into P: at most 1 for every key that the row sees.
__device__ __forceinline__ float fold_factor(int value_exponent, int reach) {
  return power_of_two(clamp(value_exponent - reach, -126, 0));
}

/// Fold factors of the 16 keys (32 for token-blocks) behind `first_group`, as [half][group of eight keys][key parity].
struct FoldFactors {
  float of[2][2][2];
};
template <class Config>
__device__ __forceinline__ FoldFactors fold_factors(const TileExponents<Config::kScaleEntries>& tile, RowPair reach, int first_group,
                                                    int lane) {
  FoldFactors factors;
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    int2 exponent;
    if constexpr (Config::kScaleGroup == ScaleGroup::block) {
      exponent.x = exponent.y = tile.value[first_group / 4];
    } else {
      exponent = *reinterpret_cast<const int2*>(&tile.value[8 * (first_group + group) + 2 * (lane % 4)]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factors.of[half][group][0] = fold_factor(exponent.x, reach.of(half));
      factors.of[half][group][1] = fold_factor(exponent.y, reach.of(half));
    }
  }
  return factors;
}

/// Codes in a tile with several value exponents: `folded` for the product with V, `plain` for the row sum. One exponential serves both.
/// The row sums are formed behind the next exponentials, 32 keys at a time; wait_products<0>() completes them.
template <class Config>
__device__ __forceinline__ void make_folded_codes(std::uint32_t (&folded)[kCodeWords], float (&sums)[4], std::uint32_t value,
                                                  const float (&scores)[Config::kScores], const ScoreFactors<Config>& factors,
                                                  const float (&bias)[2],
                                                  const TileExponents<Config::kScaleEntries>& tile, RowPair reach, int lane) {
  std::uint32_t plain[kCodeWords];
#pragma unroll
  for (int step = 0; step < kKeyTile / 32; ++step) {
#pragma unroll
    for (int pair = 2 * step; pair < 2 * step + 2; ++pair) {  // two words: the same 16 keys, both rows
      const FoldFactors fold = fold_factors<Config>(tile, reach, 2 * pair, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 p = exponentials<Config>(scores, factors, bias, 2 * pair + half);
        const auto& f = fold.of[half];
        plain[2 * pair + half] = ptx::pack_e4m3x4(p.x, p.y, p.z, p.w);
        folded[2 * pair + half] = ptx::pack_e4m3x4(p.x * f[0][0], p.y * f[0][1], p.z * f[1][0], p.w * f[1][1]);
      }
    }
    issue_sums<Config>(sums, plain, value, step);
  }
}

// ---- values ------------------------------------------------------------------------------------------------------------------

/// Partial O and, in its last four registers, the row sums of the codes (column of ones); asynchronous.
template <class Config>
__device__ __forceinline__ void issue_output(float (&partial)[Config::kPartials], const std::uint32_t (&codes)[kCodeWords],
                                             std::uint32_t value) {
  constexpr auto layout = ValueOperand<Config>::kLayout;
  constexpr std::uint32_t step = 2 * Config::kValueGroupStride >> 4;  // 32 tokens
  ptx::begin_products();
#pragma unroll
  for (int k = 0; k < kKeyTile / 32; ++k) {
    const std::uint64_t operand = ptx::descriptor(value + k * step, layout);
    if constexpr (Config::kHeadDim == 128) {
      if (k == 0) ptx::product_64x136<false>(partial, codes + 4 * k, operand);
      else ptx::product_64x136<true>(partial, codes + 4 * k, operand);
    } else {
      if (k == 0) ptx::product_64x72<false>(partial, codes + 4 * k, operand);
      else ptx::product_64x72<true>(partial, codes + 4 * k, operand);
    }
  }
  ptx::commit_products();
}

/// A <- A + partial: the promotion of a tile whose value exponent is the unit. An add, not an fma by one: it reads two registers, which
/// matters beside a running product.
template <class Config>
__device__ __forceinline__ void promote(RowState<Config>& state, const float (&partial)[Config::kPartials]) {
#pragma unroll
  for (int i = 0; i < Config::kOutputs; ++i) state.output[i] = __fadd_rn(state.output[i], partial[i]);
}

/// A <- A + partial * 2^(value exponent - unit), rounded once: the general form, with the same result where both apply.
template <class Config>
__device__ __forceinline__ void promote_scaled(RowState<Config>& state, const float (&partial)[Config::kPartials],
                                               const float (&scale)[2]) {
#pragma unroll
  for (int i = 0; i < Config::kOutputs; ++i) {
    state.output[i] = __fmaf_rn(partial[i], scale[i / 2 % 2], state.output[i]);
  }
}

/// The reference of a row moves: A and l are multiplied by 2^(before - now).
template <class Config>
__device__ __forceinline__ void move_references(RowState<Config>& state, const float (&next)[2]) {
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    factor[half] = ptx::exp2_approximate(__fadd_rn(state.reference[half], -next[half]));
    state.reference[half] = next[half];
    state.sum[half] *= factor[half];
  }
#pragma unroll
  for (int i = 0; i < Config::kOutputs; ++i) state.output[i] *= factor[i / 2 % 2];
}

}  // namespace flamia::sm90::forward
