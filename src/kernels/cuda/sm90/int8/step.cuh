// SPDX-License-Identifier: Apache-2.0
// What the INT8 kernels do with a tile of 64 rows: products, masks, rounding to codes.
//
// Fragment of a thread (lane = 4 g + c of its warp): register i belongs to row g + 8 * (i / 2 % 2) of the warp's 16 rows and to column
// 8 * (i / 4) + 2 c + i % 2. "Half" below is i / 2 % 2: every thread works on two rows.
#pragma once
#include <cstdint>

#include "../../ptx/convert.cuh"
#include "../../ptx/matrix.cuh"
#include "../../ptx/wgmma_s8.cuh"
#include "frame.cuh"

namespace flamia::sm90::int8 {

inline constexpr int kScores = 64;              // of a thread in a tile of 64 x 128
inline constexpr int kCodeWords = kScores / 4;  // the same as codes
inline constexpr float kMinusInfinity = -__builtin_huge_valf();
inline constexpr float kGridEnd =
    65536.0f;  // FP32 has no 1/32 left from here on: t is rounded before m is taken off (numerics.md §8)
inline constexpr float kLog2E = 1.4426950408889634f;

// ---- operands in shared memory -------------------------------------------------------------------------------------------------

template <int kHeadDim>
inline constexpr ptx::OperandLayout kRows{128, 8 * kHeadDim};  // INT8, contracted along d
template <int kHeadDim>
inline constexpr ptx::OperandLayout kRows16{128, 16 * kHeadDim};  // BF16, contracted along d
template <int kHeadDim>
inline constexpr ptx::OperandLayout kTransposed{16 * kHeadDim, 128};  // INT8, contracted along tokens

/// d = A B, 64 rows of A by 2 kCount rows of B, contracted along the channels. Asynchronous; `kCommit`: a group by itself.
template <int kHeadDim, bool kCommit = true, int kCount>
__device__ __forceinline__ void issue_scores(int (&d)[kCount], const std::uint8_t* a, const std::uint8_t* b) {
  constexpr auto layout = kRows<kHeadDim>;
  const std::uint32_t at = ptx::descriptor_low(a, layout), bt = ptx::descriptor_low(b, layout);
  ptx::begin_products();
#pragma unroll
  for (int k = 0; k < kHeadDim / 32; ++k) {
    const std::uint64_t x = ptx::descriptor(at + 16 * k, layout), y = ptx::descriptor(bt + 16 * k, layout);
    if constexpr (kCount == 64) {
      k == 0 ? ptx::product_s8_64x128<false>(d, x, y) : ptx::product_s8_64x128<true>(d, x, y);
    } else {
      k == 0 ? ptx::product_s8_64x64<false>(d, x, y) : ptx::product_s8_64x64<true>(d, x, y);
    }
  }
  if constexpr (kCommit) ptx::commit_products();
}

/// dP - D in BF16: d = A B with another step along K, in which the queries' operand is -D in three parts and the keys' is 1 where those lie.
/// `kQueryRows`: A is the queries'. Asynchronous, a group by itself.
template <int kHeadDim, bool kQueryRows, int kCount>
__device__ __forceinline__ void issue_gradient(float (&d)[kCount], const std::uint16_t* a, const std::uint16_t* b,
                                               const std::uint16_t* parts, const std::uint16_t* ones) {
  constexpr auto layout = kRows16<kHeadDim>;
  constexpr ptx::OperandLayout part_layout{0, 128},
      one_layout{128, 0};  // the second half along K is multiplied by 0; all keys are alike
  const std::uint32_t at = ptx::descriptor_low(a, layout), bt = ptx::descriptor_low(b, layout);
  const std::uint64_t of_parts = ptx::descriptor(ptx::descriptor_low(parts, part_layout), part_layout);
  const std::uint64_t of_ones = ptx::descriptor(ptx::descriptor_low(ones, one_layout), one_layout);
  ptx::begin_products();
#pragma unroll
  for (int k = 0; k <= kHeadDim / 16; ++k) {
    const bool extra = k == kHeadDim / 16;
    const std::uint64_t x = !extra ? ptx::descriptor(at + 16 * k, layout) : kQueryRows ? of_parts : of_ones;
    const std::uint64_t y = !extra ? ptx::descriptor(bt + 16 * k, layout) : kQueryRows ? of_ones : of_parts;
    if constexpr (kCount == 64) {
      k == 0 ? ptx::product_bf16_rows_64x128<false>(d, x, y) : ptx::product_bf16_rows_64x128<true>(d, x, y);
    } else {
      k == 0 ? ptx::product_bf16_rows_64x64<false>(d, x, y) : ptx::product_bf16_rows_64x64<true>(d, x, y);
    }
  }
  ptx::commit_products();
}

/// The keys' operand of that step: two core matrices, written by one warp.
struct Ones {
  alignas(128) std::uint16_t element[2][8][8];
};
__device__ __forceinline__ void write_ones(Ones& ones, int lane) {
  for (int i = lane; i < 128; i += 32) (&ones.element[0][0][0])[i] = i < 64 && i % 8 < 3 ? 0x3f80 : 0;
}

/// d = A B, A = kTokens columns of codes in registers, B = 2 kCount channels of `kTokens` tokens, transposed, from `channel` on. Asynchronous.
template <int kHeadDim, int kTokens, int kCount>
__device__ __forceinline__ void issue_codes(int (&d)[kCount], const std::uint32_t* codes, const std::uint8_t* transposed,
                                            int channel) {
  constexpr auto layout = kTransposed<kHeadDim>;
  const std::uint32_t at = ptx::descriptor_low(transposed, layout) + static_cast<std::uint32_t>(channel);  // 16 bytes a channel
  ptx::begin_products();
#pragma unroll
  for (int k = 0; k < kTokens / 32; ++k) {
    const std::uint64_t b = ptx::descriptor(at + 2 * kHeadDim * k, layout);
    if constexpr (kCount == 64) {
      k == 0 ? ptx::product_s8_64x128<false>(d, codes, b) : ptx::product_s8_64x128<true>(d, codes + 4 * k, b);
    } else if constexpr (kCount == 32) {
      k == 0 ? ptx::product_s8_64x64<false>(d, codes, b) : ptx::product_s8_64x64<true>(d, codes + 4 * k, b);
    } else {
      k == 0 ? ptx::product_s8_64x32<false>(d, codes, b) : ptx::product_s8_64x32<true>(d, codes + 4 * k, b);
    }
  }
  ptx::commit_products();
}

/// The same with A in shared memory, as store_code_word leaves it.
template <int kHeadDim, int kTokens>
__device__ __forceinline__ void issue_stored_codes(int (&d)[32], const std::uint8_t* codes, const std::uint8_t* transposed,
                                                   int channel) {
  constexpr auto layout = kTransposed<kHeadDim>;
  constexpr ptx::OperandLayout rows{128, 8 * kTokens};
  const std::uint32_t at = ptx::descriptor_low(codes, rows);
  const std::uint32_t bt = ptx::descriptor_low(transposed, layout) + static_cast<std::uint32_t>(channel);
  ptx::begin_products();
#pragma unroll
  for (int k = 0; k < kTokens / 32; ++k) {
    const std::uint64_t a = ptx::descriptor(at + 16 * k, rows), b = ptx::descriptor(bt + 2 * kHeadDim * k, layout);
    k == 0 ? ptx::product_s8_64x64<false>(d, a, b) : ptx::product_s8_64x64<true>(d, a, b);
  }
  ptx::commit_products();
}

/// Sums of codes as numbers, times `factor` if `beyond`; returns the factor that is left. Where |lse| is great t is rounded before lse is taken off: a
/// fused sum could exceed 0 by whole steps.
__device__ __forceinline__ float scores_of(float (&s)[kScores], const int (&product)[kScores], float factor, bool beyond) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) s[i] = __int2float_rn(product[i]);
  if (!beyond) return factor;
#pragma unroll
  for (int i = 0; i < kScores; ++i) s[i] = __fmul_rn(s[i], factor);
  return 1.0f;
}

// ---- codes ---------------------------------------------------------------------------------------------------------------------

/// x * inverse to nearest even, |x * inverse| <= 127, as the low byte of the word.
__device__ __forceinline__ std::uint32_t code_of(float x, float inverse) {
  constexpr float integers = 12582912.0f;  // 1.5 * 2^23: FP32 has nothing between integers here
  return __float_as_uint(__fmaf_rn(x, inverse, integers));
}
__device__ __forceinline__ std::uint32_t pack_bytes(std::uint32_t b0, std::uint32_t b1, std::uint32_t b2, std::uint32_t b3) {
  return __byte_perm(__byte_perm(b0, b1, 0x0040), __byte_perm(b2, b3, 0x0040), 0x5410);
}

/// Word `w` of the A operand made from an accumulator's fragment; its bytes belong to half w % 2.
template <int kCount>
__device__ __forceinline__ std::uint32_t code_word(const float (&x)[kCount], int w, const float (&inverses)[2]) {
  const int at = 4 * (w / 4 * 4 + w % 4 / 2 * 2) + 2 * (w % 2);
  const float inverse = inverses[w % 2];
  return pack_bytes(code_of(x[at], inverse), code_of(x[at + 1], inverse), code_of(x[at + 4], inverse), code_of(x[at + 5], inverse));
}

/// Puts word `w` where a product finds it as its A operand of 64 rows x kTokens columns (core matrices, columns first). `lane_base`: the operand's
/// address + 16 kTokens * warp + 4 * lane.
template <int kTokens>
__device__ __forceinline__ void store_code_word(std::uint32_t lane_base, int w, std::uint32_t word) {
  ptx::store_shared(lane_base + w % 2 * (8 * kTokens) + (w / 4 * 2 + w % 4 / 2) * 128, word);
}

/// Scales of a thread's two rows from the bits of their greatest magnitudes. NaN is the greatest of all and makes a scale NaN.
struct RowScales {
  float scale[2], inverse[2];
  __device__ explicit RowScales(const int (&greatest)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float amax = __int_as_float(greatest[half]);
      scale[half] = __fmul_rn(amax, 1.0f / kGreatestCode);
      inverse[half] = __fdividef(kGreatestCode, amax);
    }
  }
};

/// Over the four threads that share the two rows.
__device__ __forceinline__ void greatest_of_quad(int (&greatest)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    greatest[half] = max(greatest[half], __shfl_xor_sync(kFullWarp, greatest[half], 1));
    greatest[half] = max(greatest[half], __shfl_xor_sync(kFullWarp, greatest[half], 2));
  }
}

/// Bits of the greatest magnitude in each of the two rows: as integers they are ordered as the numbers are, NaN behind infinity.
__device__ __forceinline__ RowScales scales_of_magnitudes(const float (&x)[kScores]) {
  int greatest[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kScores; i += 8)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = i + 2 * half;
      greatest[half] = __vimax3_s32(greatest[half], __float_as_int(ptx::max_or_nan(fabsf(x[at]), fabsf(x[at + 1]))),
                                    __float_as_int(ptx::max_or_nan(fabsf(x[at + 4]), fabsf(x[at + 5]))));
    }
  greatest_of_quad(greatest);
  return RowScales(greatest);
}
/// The same of numbers that are not negative.
__device__ __forceinline__ RowScales scales_of_probabilities(const float (&x)[kScores]) {
  int greatest[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kScores; i += 4)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      greatest[half] = __vimax3_s32(greatest[half], __float_as_int(x[i + 2 * half]), __float_as_int(x[i + 2 * half + 1]));
  greatest_of_quad(greatest);
  return RowScales(greatest);
}

/// sum += d * factor, a factor a row.
template <int kCount, int kSums>
__device__ __forceinline__ void add_scaled(float (&sum)[kSums], const int (&d)[kCount], const float (&factor)[2], int first = 0) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[first + i] = __fmaf_rn(__int2float_rn(d[i]), factor[i / 2 % 2], sum[first + i]);
}

/// A factor that is not 0, so that a masked score of -infinity stays one. NaN stays.
__device__ __forceinline__ float above_zero(float factor) { return ptx::max_or_nan(factor, 0x1p-126f); }

}  // namespace flamia::sm90::int8
