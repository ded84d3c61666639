// SPDX-License-Identifier: Apache-2.0
// NVFP4 of a token that a lane holds (token_row.cuh): 16 channels share an E4M3 scale, amax / 6 or amax / 4, whichever errs less (numerics.md,
// section 7). Codes, scales and their products in FP16, which are exact, equal the host's bit for bit.
#pragma once
#include <cuda_fp8.h>

#include "kernels/cuda/ptx/arithmetic.cuh"
#include "kernels/cuda/ptx/registers.cuh"
#include "quantize/cuda/block_scale.cuh"
#include "quantize/cuda/quantise.hpp"
#include "quantize/cuda/token_row.cuh"

namespace flamia::quantize::gpu {

inline constexpr std::uint32_t kFlaggedScale = 0x7f;
inline constexpr int kScaleChannels = 16;

inline constexpr std::uint32_t kOne = 0x3c003c00, kSix = 0x46004600;  // FP16, twice
inline constexpr std::uint32_t kSigns = 0x80008000;

/// Nearest numbers of E2M1, ties to even, of two FP16 numbers in -7 ... 7, but for the sign of zero: the addition of 768 = 2^9 * 1.5 times the power of
/// two below a magnitude (at least 1) leaves one bit of mantissa.
__device__ __forceinline__ std::uint32_t round_e2m1x2(std::uint32_t pair) {
  constexpr std::uint32_t k768 = 0x62006200, kMinus768 = 0xe200e200;
  const std::uint32_t power = ptx::max_f16x2(pair & 0x7c007c00u, kOne);
  return ptx::fma_f16x2(power, kMinus768, ptx::fma_f16x2(power, k768, pair));
}
/// x / 6, rounded to nearest: equal to the division for every x that does not make a scale of zero.
__device__ __forceinline__ float sixth(float x) {
  constexpr float kInverse = 1.f / 6.f;
  const float near = numerics::mul(x, kInverse);
  return numerics::fma(numerics::fma(-6.f, near, x), kInverse, near);
}
/// One of the two scales of 16 channels, and what it makes of them.
struct RowCandidate {
  std::uint32_t rounded[8];   // E2M1, FP16: by amax / 6 magnitudes, by amax / 4 numbers but for the sign of zero
  std::uint32_t quotient[8];  // of the values, or their magnitudes, and the scale
  float error;                // in units of the scale squared (encode.hpp)
};

/// y: the inverse of the scale. By amax / 6 quotients may lie above 6, and are clamped.
template <bool kBySix>
__device__ __forceinline__ RowCandidate round_group(const float* value, float y) {
  RowCandidate candidate;
  float octet[2];
#pragma unroll
  for (int o = 0; o < 2; ++o) {
    std::uint32_t sums = 0;
#pragma unroll
    for (int p = 4 * o; p < 4 * o + 4; ++p) {
      const auto quotient = [&](float v) { return numerics::mul(kBySix ? fabsf(v) : v, y); };
      const std::uint32_t quotients = ptx::pack_f16x2(quotient(value[2 * p]), quotient(value[2 * p + 1]));
      candidate.quotient[p] = quotients;
      candidate.rounded[p] = round_e2m1x2(kBySix ? ptx::min_f16x2(quotients, kSix) : quotients);
      const std::uint32_t off = ptx::subtract_f16x2(quotients, candidate.rounded[p]);
      sums = ptx::fma_f16x2(off, off, sums);
    }
    float even, odd;
    ptx::unpack_f16x2(sums, even, odd);
    octet[o] = numerics::add(even, odd);
  }
  candidate.error = numerics::add(octet[0], octet[1]);
  return candidate;
}

/// Codes of eight channels from the pairs' FP16: times 2^-14 a number of E2M1 has its code in the upper bits.
__device__ __forceinline__ std::uint32_t codes_of(const std::uint32_t* rounded) {
  constexpr std::uint32_t kTwoToMinus14 = 0x04000400;
  std::uint32_t half[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    std::uint32_t nibbles[2];  // even channel from bit 0 on, odd channel from bit 16 on
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const std::uint32_t bits = ptx::multiply_f16x2(rounded[2 * h + p], kTwoToMinus14);  // sign at 15, magnitude from 9 on
      nibbles[p] = (bits >> 9 & 0x00070007u) | (bits >> 12 & 0x00080008u);
    }
    const std::uint32_t both = nibbles[0] + (nibbles[1] << 8);
    half[h] = both | both >> 12;  // its lower 16 bits
  }
  return __byte_perm(half[0], half[1], 0x5410);
}

/// What is stored of 16 channels.
struct Nvfp4Group {
  std::uint32_t codes[2];  // low nibble = first channel
  std::uint32_t scale;     // E4M3
  std::uint32_t half[8];   // code * scale
};

/// `amax`: of the group. All zero but for the scale if the token is flagged, whatever the values are.
__device__ __forceinline__ Nvfp4Group encode_group(const float* value, float amax, bool flagged, bool codes_wanted) {
  const std::uint16_t scales = ptx::pack_e4m3x2(sixth(amax), numerics::mul(amax, .25f));
  const __half2_raw decoded = __nv_cvt_fp8x2_to_halfraw2(scales, __NV_E4M3);
  const std::uint32_t both = decoded.x | static_cast<std::uint32_t>(decoded.y) << 16;
  float six, four;
  ptx::unpack_f16x2(both, six, four);
  const RowCandidate by_six = round_group<true>(value, nearest_inverse(fmaxf(six, 0x1p-9f)));
  // Quotients by amax / 4 stay below 7, so none becomes more than 6, but where the scale is E4M3's greatest: there both scales are the same.
  const RowCandidate by_four = round_group<false>(value, four == 0.f ? 0.f : nearest_inverse(four));  // then every code is 0
  const float six_error = numerics::mul(numerics::mul(six, six), by_six.error);
  const bool smaller =
      !flagged & ((six == 0.f) | ((four != six) & (numerics::mul(numerics::mul(four, four), by_four.error) < six_error)));

  Nvfp4Group out{};
  out.scale = flagged ? kFlaggedScale : smaller ? scales >> 8 : scales & 0xff;
  const std::uint32_t factor = flagged ? 0u : __byte_perm(both, 0, smaller ? 0x3232 : 0x1010);
  const std::uint32_t signs = flagged || four == 0.f ? 0u : kSigns;
  std::uint32_t rounded[8];
#pragma unroll
  for (int p = 0; p < 8; ++p) {
    // never NaN: that becomes 6
    rounded[p] = ((smaller ? by_four.rounded[p] : by_six.rounded[p]) & ~signs) | (by_four.quotient[p] & signs);
    out.half[p] = ptx::multiply_f16x2(rounded[p], factor);
  }
  if (codes_wanted) {
    out.codes[0] = flagged ? 0u : codes_of(rounded);
    out.codes[1] = flagged ? 0u : codes_of(rounded + 4);
  }
  return out;
}

}  // namespace flamia::quantize::gpu
