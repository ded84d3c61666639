// SPDX-License-Identifier: Apache-2.0
// The second half of a tile's way: probabilities become 8-bit codes, codes meet V, the partial result is promoted to FP32.
#pragma once
#include "tile.cuh"

namespace flamia::sm90::forward {

// ---- codes -------------------------------------------------------------------------------------------------------------------

/// Word w of the A operand holds the codes of score registers first, first + 1, first + 4, first + 5 (layout.hpp, order pi).
__device__ constexpr int first_score_of_word(int word) { return 16 * (word / 4) + 8 * (word / 2 % 2) + 2 * (word % 2); }
__device__ constexpr int half_of_word(int word) { return word % 2; }

/// exp2(score * scale + bias). The line through powers of two, 2^floor(x) * (1 + frac x), is the number with the bits (x + 127) * 2^23: x + 32,
/// held within 0 ... 64 by the fma itself, becomes the mantissa of a number in 1 ... 2, which shifted by six is x's place in those bits.
/// Schraudolph lowers the line. NaN becomes 0.
template <class Config>
__device__ __forceinline__ float exponential(float score, float scale, float bias) {
  if constexpr (Config::kExponential == Exponential::hardware) {
    return ptx::exp2_approximate(__fmaf_rn(score, scale, bias));
  } else {
    constexpr std::uint32_t lift = Config::kExponential == Exponential::schraudolph ? 361009u : 0u;  // 0.04303566 * 2^23
    const float place = __saturatef(__fmaf_rn(score, scale * 0x1p-6f, __fmaf_rn(bias, 0x1p-6f, 0.5f)));
    return __uint_as_float((__float_as_uint(__fadd_rn(place, 1.0f)) << 6) + (0x4F800000u - lift));
  }
}

/// P of the four keys of code word w, before rounding: exp2(logit + bias).
template <class Config>
__device__ __forceinline__ float4 exponentials(const float (&scores)[Config::kScores], const ScoreFactors<Config>& factors,
                                               const float (&bias)[2], int w) {
  const int s = first_score_of_word(w), half = half_of_word(w);
  const float scale = factors.of_score(half, s);
  return {exponential<Config>(scores[s], scale, bias[half]), exponential<Config>(scores[s + 1], scale, bias[half]),
          exponential<Config>(scores[s + 4], scale, bias[half]), exponential<Config>(scores[s + 5], scale, bias[half])};
}

/// Test mode: a thread's unfolded codes of the visible pairs, and the reference they were made with.
template <class Config>
__device__ __forceinline__ void record_codes(const std::uint32_t (&codes)[kCodeWords], const RowState<Config>& state,
                                             const Item& item, int first_key) {
  const ForwardParams& params = *item.params;
  const int c = ptx::thread_index() % 4;
#pragma unroll
  for (int w = 0; w < kCodeWords; ++w) {
    const int query = item.position(half_of_word(w));
    if (query >= item.length) continue;
    const std::int64_t row = item.first_row + query;
    params.recorded_reference[row * (params.record_keys / kKeyTile) + first_key / kKeyTile] = state.reference[half_of_word(w)];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first_key + 2 * first_score_of_word(w) - 4 * half_of_word(w) + 8 * (i / 2) + 2 * c + i % 2;
      if (key >= item.window.first_key(query) && key <= item.window.last_key(query, item.length)) {
        params.recorded_codes[row * params.record_keys + key] = static_cast<std::uint8_t>(codes[w] >> 8 * i);
      }
    }
  }
}

/// Codes in a tile that needs no row sums of its own. Token-blocks: folded by 2^shift, part of the bias; the columns of ones undo it in the sums.
///
/// Left alone, the compiler puts all 64 fmas in front of the first exponential, and the special function unit idles for 200 cycles. So the
/// bias of the next 32 keys waits for two words of these: their signs are or'ed to it, zeros, which the compiler does not know.
template <class Config>
__device__ __forceinline__ void make_codes(std::uint32_t (&codes)[kCodeWords], const float (&scores)[Config::kScores],
                                           const ScoreFactors<Config>& factors, const float (&bias)[2]) {
  constexpr int kSteps = kKeyTile / kBlock, kWordsPerStep = kCodeWords / kSteps;
  constexpr std::uint32_t kSigns = 0x80808080u;  // of codes, which have none
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    float late_bias[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      late_bias[half] =
          Config::kBiasFolds ? __fadd_rn(bias[half], factors.shift[step % ScoreFactors<Config>::kShifts]) : bias[half];
      if (step == 0) continue;
      const std::uint32_t nothing = codes[kWordsPerStep * step - 2 + half] & kSigns;
      late_bias[half] = __uint_as_float(__float_as_uint(late_bias[half]) | nothing);
    }
#pragma unroll
    for (int w = kWordsPerStep * step; w < kWordsPerStep * (step + 1); ++w) {
      const float4 p = exponentials<Config>(scores, factors, late_bias, w);
      codes[w] = ptx::pack_e4m3x4(p.x, p.y, p.z, p.w);
    }
  }
}

/// Test mode, for the same tile: its codes without the fold.
template <class Config>
__device__ __forceinline__ void record_unfolded(const float (&scores)[Config::kScores], const ScoreFactors<Config>& factors,
                                                const float (&bias)[2], const RowState<Config>& state, const Item& item,
                                                int first_key) {
  ScoreFactors<Config> plain = factors;
#pragma unroll
  for (float& shift : plain.shift) shift = 0.0f;
  std::uint32_t codes[kCodeWords];
  make_codes<Config>(codes, scores, plain, bias);
  record_codes<Config>(codes, state, item, first_key);
}

/// Row sums of 32 keys' codes against the columns of ones, with the very numbers that issue_output would give; asynchronous.
template <class Config>
__device__ __forceinline__ void issue_sums(float (&sums)[4], const std::uint32_t (&codes)[kCodeWords], std::uint32_t first,
                                           int step) {
  const std::uint64_t ones =
      ptx::descriptor(first + (Config::kBiasFolds ? 0 : step * (2 * Config::kValueGroupStride >> 4)), OnesOperand<Config>::kLayout);
  ptx::begin_products();
  if (step == 0)
    ptx::product_64x8<false>(sums, codes + 4 * step, ones);
  else
    ptx::product_64x8<true>(sums, codes + 4 * step, ones);
  ptx::commit_products();
}

/// 2^(value exponent - reach), the fold of V's exponent into P: at most 1 for every key that the row sees.
__device__ __forceinline__ float fold_factor(int value_exponent, int reach) {
  return power_of_two(clamp(value_exponent - reach, -126, 0));
}

/// Fold factors of the 16 keys behind `first_group`, as [half][group of eight keys][key parity]; `row` = 2^-reach. A key that the row does not
/// see has code 0 whatever its factor, short of infinity.
struct FoldFactors {
  float of[2][2][2];
};
template <class Config>
__device__ __forceinline__ FoldFactors fold_factors(const TileExponents<Config::kScaleEntries>& tile, const float (&row)[2],
                                                    int first_group, int lane) {
  FoldFactors factors;
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    const float2 value = *reinterpret_cast<const float2*>(&tile.value[8 * (first_group + group) + 2 * (lane % 4)]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factors.of[half][group][0] = fminf(value.x * row[half], 1.0f);
      factors.of[half][group][1] = fminf(value.y * row[half], 1.0f);
    }
  }
  return factors;
}

/// Codes in a tile with several value exponents: `folded` for the product with V, `plain` for the row sum. One exponential serves both.
/// The row sums are formed behind the next exponentials, 32 keys at a time. Per-token exponents: every code may have a fold of its own.
template <class Config>
__device__ __forceinline__ void make_token_folded_codes(std::uint32_t (&folded)[kCodeWords], float (&sums)[4], std::uint32_t ones,
                                                        const float (&scores)[Config::kScores], const ScoreFactors<Config>& factors,
                                                        const float (&bias)[2], const RowState<Config>& state, const Item& item,
                                                        int first_key, const TileExponents<Config::kScaleEntries>& tile,
                                                        RowPair reach, int lane) {
  const float row[2] = {power_of_two_full(-reach.of(0)), power_of_two_full(-reach.of(1))};
  std::uint32_t plain[kCodeWords];
#pragma unroll
  for (int step = 0; step < kKeyTile / 32; ++step) {
#pragma unroll
    for (int pair = 2 * step; pair < 2 * step + 2; ++pair) {  // two words: the same 16 keys, both rows
      const FoldFactors fold = fold_factors<Config>(tile, row, 2 * pair, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 p = exponentials<Config>(scores, factors, bias, 2 * pair + half);
        const auto& f = fold.of[half];
        plain[2 * pair + half] = ptx::pack_e4m3x4(p.x, p.y, p.z, p.w);
        folded[2 * pair + half] = ptx::pack_e4m3x4(p.x * f[0][0], p.y * f[0][1], p.z * f[1][0], p.w * f[1][1]);
      }
    }
    issue_sums<Config>(sums, plain, ones, step);
  }
  if constexpr (Config::kRecordCodes) record_codes<Config>(plain, state, item, first_key);
  ptx::wait_products<0>();
  ptx::fence_registers(sums);
}

/// The same with token-blocks, where exponents lie far apart or the mask's right edge cuts the tile.
template <class Config>
__device__ __forceinline__ void make_block_folded_codes(std::uint32_t (&codes)[kCodeWords], float (&sums)[4], std::uint32_t ones,
                                                        const float (&scores)[Config::kScores], const ScoreFactors<Config>& factors,
                                                        const float (&bias)[2], const RowState<Config>& state, const Item& item,
                                                        int first_key, const TileExponents<Config::kScaleEntries>& tile,
                                                        RowPair reach, int greatest) {
  constexpr int kSteps = kKeyTile / 32, kWords = kCodeWords / kSteps;
  std::uint32_t plain[kCodeWords];
  float4 p[kCodeWords];
#pragma unroll
  for (int step = 0; step <= kSteps; ++step) {
    if (step < kSteps) {
#pragma unroll
      for (int w = kWords * step; w < kWords * (step + 1); ++w) p[w] = exponentials<Config>(scores, factors, bias, w);
    }
    if (step == 0) continue;
    const int block = step - 1;
#pragma unroll
    for (int w = kWords * block; w < kWords * step; ++w) plain[w] = ptx::pack_e4m3x4(p[w].x, p[w].y, p[w].z, p[w].w);
    const int value = greatest + __float2int_rn(__int_as_float(tile.value[block]));
    const float fold[2] = {fold_factor(value, reach.of(0)), fold_factor(value, reach.of(1))};
#pragma unroll
    for (int w = kWords * block; w < kWords * step; ++w) {
      const float f = fold[half_of_word(w)];
      codes[w] = ptx::pack_e4m3x4(p[w].x * f, p[w].y * f, p[w].z * f, p[w].w * f);
    }
    issue_sums<Config>(sums, plain, ones, block);
  }
  if constexpr (Config::kRecordCodes) record_codes<Config>(plain, state, item, first_key);
  ptx::wait_products<0>();
  ptx::fence_registers(sums);
}

// ---- values ------------------------------------------------------------------------------------------------------------------

/// Partial O of a tile, in two products: the last 64 channels with the column of ones, which gives the row sums early, then, where
/// there are more, the first 64.
inline constexpr int kChannels = 64;  // of a product
struct Partial {
  float last[kChannels / 2 + 4];  // its last four registers: row sums of the codes
  float first[kChannels / 2];     // head dim 128 only
};
template <class Config>
inline constexpr bool kTwoProducts = Config::kHeadDim == 128;

/// Both products, a group each; asynchronous.
template <class Config>
__device__ __forceinline__ void issue_output(Partial& partial, const std::uint32_t (&codes)[kCodeWords], std::uint32_t value) {
  constexpr auto layout = ValueOperand<Config>::kLayout;
  constexpr std::uint32_t step = 2 * Config::kValueGroupStride >> 4;        // 32 tokens
  constexpr std::uint32_t last = 16 * (Config::kHeadDim - kChannels) >> 4;  // a channel is 16 bytes
  ptx::begin_products();
  ptx::product_64x72<false>(partial.last, codes, ptx::descriptor(value + last, layout));
#pragma unroll
  for (int k = 1; k < kKeyTile / 32; ++k) {
    ptx::product_64x72<true>(partial.last, codes + 4 * k, ptx::descriptor(value + last + k * step, layout));
  }
  ptx::commit_products();
  if constexpr (kTwoProducts<Config>) {
    ptx::product_n64<false>(partial.first, codes, ptx::descriptor(value, layout));
#pragma unroll
    for (int k = 1; k < kKeyTile / 32; ++k) {
      ptx::product_n64<true>(partial.first, codes + 4 * k, ptx::descriptor(value + k * step, layout));
    }
    ptx::commit_products();
  }
}

/// A <- A + partial: the promotion of a tile whose value exponent is the unit. An add, not an fma by one: it reads two registers, which
/// matters beside a running product.
template <class Config>
__device__ __forceinline__ void promote(RowState<Config>& state, const Partial& partial) {
  constexpr int last = Config::kOutputs - kChannels / 2;
#pragma unroll
  for (int i = 0; i < kChannels / 2; ++i) state.output[last + i] = __fadd_rn(state.output[last + i], partial.last[i]);
  if constexpr (kTwoProducts<Config>) {
#pragma unroll
    for (int i = 0; i < kChannels / 2; ++i) state.output[i] = __fadd_rn(state.output[i], partial.first[i]);
  }
}

/// A <- A + partial * 2^(value exponent - unit), rounded once: the general form, with the same result where both apply.
template <class Config>
__device__ __forceinline__ void promote_scaled(RowState<Config>& state, const Partial& partial, const float (&scale)[2]) {
  constexpr int last = Config::kOutputs - kChannels / 2;
#pragma unroll
  for (int i = 0; i < kChannels / 2; ++i)
    state.output[last + i] = __fmaf_rn(partial.last[i], scale[i / 2 % 2], state.output[last + i]);
  if constexpr (kTwoProducts<Config>) {
#pragma unroll
    for (int i = 0; i < kChannels / 2; ++i) state.output[i] = __fmaf_rn(partial.first[i], scale[i / 2 % 2], state.output[i]);
  }
}

/// A and l are multiplied by a power of two for each row. Before the first tile both are zero anyway.
template <class Config>
__device__ __forceinline__ void rescale(RowState<Config>& state, const float (&factor)[2]) {
  const bool nothing_yet = __all_sync(kFullWarp, state.sum[0] == 0.0f && state.sum[1] == 0.0f);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    state.sum[half] *= factor[half];
  }
  if (nothing_yet) return;
#pragma unroll
  for (int i = 0; i < Config::kOutputs; ++i) state.output[i] *= factor[i / 2 % 2];
}

}  // namespace flamia::sm90::forward
