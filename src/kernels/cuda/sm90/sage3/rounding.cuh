// SPDX-License-Identifier: Apache-2.0
// P of a 64 x 128 tile in NVFP4 with two levels: a row's blocks of 16 keys have an E4M3 scale below the row's first level.
//
// Fragment of a thread (lane = 4 g + c of its warp): score register i belongs to row g + 8 * (i / 2 % 2) of the warp's 16 rows and to key
// 8 * (i / 4) + 2 c + i % 2. So registers 8 b ... 8 b + 7 are the thread's share of block b, four for each of its two rows ("halves"), and
// packed in pairs they are the A operand of the product that contracts the block.
//
// What concerns a block is done once a quad: lane c of it looks after blocks 2 c and 2 c + 1 of both rows.
#pragma once
#include <cuda_fp8.h>

#include "kernels/cuda/ptx/arithmetic.cuh"
#include "kernels/cuda/ptx/convert.cuh"
#include "kernels/cuda/ptx/half.cuh"
#include "kernels/cuda/ptx/logarithm.cuh"
#include "kernels/cuda/ptx/mma_f16.cuh"
#include "numerics/exponent.hpp"

namespace flamia::sm90::sage3 {

inline constexpr unsigned kFullWarp = 0xFFFFFFFFu;
inline constexpr int kBlocks = 8;  // of 16 keys
inline constexpr float kMinusInfinity = -__builtin_huge_valf();

/// P's operand carries code * scale * 2^-kOperandShift.
inline constexpr int kOperandShift = 7;

/// Over the four threads that share a row; NaN wins.
__device__ __forceinline__ float quad_maximum(float value) {
  value = ptx::max_or_nan(value, __shfl_xor_sync(kFullWarp, value, 1));
  return ptx::max_or_nan(value, __shfl_xor_sync(kFullWarp, value, 2));
}

/// Greatest scores; NaN wins.
struct Maxima {
  float block[2][2];  // of the lane's blocks, [block][half]
  float row[2];
};

__device__ __forceinline__ Maxima find_maxima(const float (&scores)[8 * kBlocks], int lane) {
  float all[kBlocks][2], four[4][2];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 8 * b + 2 * half;
      all[b][half] = ptx::max_or_nan(ptx::max_or_nan(scores[i], scores[i + 1]), ptx::max_or_nan(scores[i + 4], scores[i + 5]));
    }
  Maxima maxima;
  const bool upper = (lane & 2) != 0, odd = (lane & 1) != 0;
#pragma unroll
  for (int b = 0; b < 4; ++b)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float keep = upper ? all[b + 4][half] : all[b][half], give = upper ? all[b][half] : all[b + 4][half];
      four[b][half] = ptx::max_or_nan(keep, __shfl_xor_sync(kFullWarp, give, 2));
    }
#pragma unroll
  for (int b = 0; b < 2; ++b)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float keep = odd ? four[b + 2][half] : four[b][half], give = odd ? four[b][half] : four[b + 2][half];
      maxima.block[b][half] = ptx::max_or_nan(keep, __shfl_xor_sync(kFullWarp, give, 1));
    }
#pragma unroll
  for (int half = 0; half < 2; ++half)
    maxima.row[half] = quad_maximum(ptx::max_or_nan(maxima.block[0][half], maxima.block[1][half]));
  return maxima;
}

/// t - m of a score is score * scale - reference, a row's own.
struct Exponent {
  float scale[2], reference[2];
};

/// The first level of P in a row; `top`: its greatest probability. As quantize::first_level, but not below 2^-80: O is kept in units of it.
__device__ __forceinline__ float row_level(float top) { return top == 0.f ? 1.f : fmaxf(__fmul_rn(top, 1.f / 2688.f), 0x1p-80f); }

/// P in the operand's form, and the row sums of its values in the same unit: 2^kOperandShift times the first level is outside.
///
/// A code is exp2 of the score with the inverse of its scale in the exponent, times 2^-14: as FP16 this has E2M1's code in its upper bits, short of
/// the rounding, which halves of a step take upwards. (The conversion cuts off what FP16 does not hold: ties alone differ from ties to even.)
__device__ __forceinline__ void round_rows(std::uint32_t (&words)[4 * kBlocks], float (&sums)[4],
                                           const float (&scores)[8 * kBlocks], const Maxima& maxima, const Exponent& exponent,
                                           const float (&first_level)[2], const float (&inverse_level)[2], int lane) {
  constexpr std::uint32_t kGreatest = 0x0e000e00, kHalfStep = 0x01000100,
                          kCode = 0xfe00fe00;         // 6, and the bits, times 2^-14, twice
  constexpr std::uint32_t kOperandUnit = 0x58005800;  // 2^(14 - kOperandShift), twice
  constexpr std::uint32_t kOnes = 0x3c003c00;
  static_assert(kOperandShift == 7);
  float bias[2][2];
  std::uint32_t scales[2];
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    float quotient[2], scale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float p = ptx::exp2_approximate(__fmaf_rn(maxima.block[b][half], exponent.scale[half], -exponent.reference[half]));
      quotient[half] = __fmul_rn(p, __fmul_rn(inverse_level[half], 1.f / 6.f));
    }
    const __half2_raw decoded = __nv_cvt_fp8x2_to_halfraw2(ptx::pack_e4m3x2(quotient[0], quotient[1]), __NV_E4M3);
    const std::uint32_t both = decoded.x | static_cast<std::uint32_t>(decoded.y) << 16;
    ptx::unpack_f16x2(both, scale[0], scale[1]);
    scales[b] = ptx::multiply_f16x2(both, kOperandUnit);
#pragma unroll
    for (int half = 0; half < 2; ++half)  // a scale of 0 has codes 0
      bias[b][half] = scale[half] == 0.f
                          ? kMinusInfinity
                          : -14.f - exponent.reference[half] - ptx::log2_approximate(__fmul_rn(scale[half], first_level[half]));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = 0.f;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int owner = (lane & ~3) | b / 2;
    const std::uint32_t scale = __shfl_sync(kFullWarp, scales[b % 2], owner);
    std::uint32_t(&a)[4] = reinterpret_cast<std::uint32_t(&)[4]>(words[4 * b]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float own = __shfl_sync(kFullWarp, bias[b % 2][half], owner);
      const std::uint32_t factor = __byte_perm(scale, 0, half == 0 ? 0x1010 : 0x3232);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int i = 8 * b + 2 * half + 4 * k;
        const std::uint32_t pair = ptx::cut_f16x2(ptx::exp2_approximate(__fmaf_rn(scores[i], exponent.scale[half], own)),
                                                  ptx::exp2_approximate(__fmaf_rn(scores[i + 1], exponent.scale[half], own)));
        a[half + 2 * k] = ptx::multiply_f16x2((ptx::min_f16x2(pair, kGreatest) + kHalfStep) & kCode, factor);
      }
    }
    ptx::warp_product_f16(sums, a, kOnes, kOnes);
  }
}

}  // namespace flamia::sm90::sage3
