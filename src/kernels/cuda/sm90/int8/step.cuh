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

/// The same in BF16.
template <int kHeadDim, int kCount>
__device__ __forceinline__ void issue_values(float (&d)[kCount], const std::uint16_t* a, const std::uint16_t* b) {
  constexpr auto layout = kRows16<kHeadDim>;
  const std::uint32_t at = ptx::descriptor_low(a, layout), bt = ptx::descriptor_low(b, layout);
  ptx::begin_products();
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    const std::uint64_t x = ptx::descriptor(at + 16 * k, layout), y = ptx::descriptor(bt + 16 * k, layout);
    if constexpr (kCount == 64) {
      k == 0 ? ptx::product_bf16_rows_64x128<false>(d, x, y) : ptx::product_bf16_rows_64x128<true>(d, x, y);
    } else {
      k == 0 ? ptx::product_bf16_rows_64x64<false>(d, x, y) : ptx::product_bf16_rows_64x64<true>(d, x, y);
    }
  }
  ptx::commit_products();
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

/// The same with A in shared memory: kTokens columns of codes as store_code_word leaves them; 64 channels of B.
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

/// P of the backward pass. t is rounded before lse is taken off: where both are great, a fused sum could exceed 0 by whole steps.
__device__ __forceinline__ float probability(int product, float factor, float lse) {
  return ptx::exp2_approximate(__fadd_rn(__fmul_rn(__int2float_rn(product), factor), -lse));
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
__device__ __forceinline__ std::uint32_t code_word(const float (&x)[kCount], int w, float inverse) {
  const int at = 4 * (w / 4 * 4 + w % 4 / 2 * 2) + 2 * (w % 2);
  return pack_bytes(code_of(x[at], inverse), code_of(x[at + 1], inverse), code_of(x[at + 4], inverse), code_of(x[at + 5], inverse));
}

/// Puts word `w` where a product finds it as its A operand of 64 rows x kTokens columns (core matrices, columns first). `lane_base`: the operand's
/// address + 16 kTokens * warp + 4 * lane.
template <int kTokens>
__device__ __forceinline__ void store_code_word(std::uint32_t lane_base, int w, std::uint32_t word) {
  ptx::store_shared(lane_base + w % 2 * (8 * kTokens) + (w / 4 * 2 + w % 4 / 2) * 128, word);
}

/// A block's scale from the bits of its greatest magnitude (NaN counts as the greatest and makes the scale NaN).
struct BlockScale {
  float scale, inverse;
  __device__ explicit BlockScale(std::uint32_t greatest) {
    const float amax = __uint_as_float(greatest);
    scale = amax / kGreatestCode;
    inverse = __fdividef(kGreatestCode, amax);
  }
};

/// sum += d * factor.
template <int kCount, int kSums>
__device__ __forceinline__ void add_scaled(float (&sum)[kSums], const int (&d)[kCount], float factor, int first = 0) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[first + i] = __fmaf_rn(__int2float_rn(d[i]), factor, sum[first + i]);
}

/// Bits of the greatest magnitude in [first, first + count).
template <int kCount>
__device__ __forceinline__ std::uint32_t greatest_magnitude(const float (&x)[kCount], int first, int count) {
  float greatest = 0.0f;
#pragma unroll
  for (int i = 0; i < count; ++i) greatest = ptx::max_or_nan(greatest, fabsf(x[first + i]));
  return __float_as_uint(greatest) & 0x7fffffffu;
}

/// A factor that is not 0, so that a masked score of -infinity stays one. NaN stays.
__device__ __forceinline__ float above_zero(float factor) { return ptx::max_or_nan(factor, 0x1p-126f); }

}  // namespace flamia::sm90::int8
