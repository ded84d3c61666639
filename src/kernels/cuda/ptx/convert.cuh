// SPDX-License-Identifier: Apache-2.0
// The special-function exponential and 8-bit conversions.
#pragma once
#include <cstdint>

namespace flamia::ptx {

/// 2^x by the special function unit; results below 2^-126 are zero, 2^-inf is zero, exact for whole x.
__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Two values as E4M3 (round to nearest even, saturating; NaN becomes 0x7F); `low` in the low byte.
__device__ __forceinline__ std::uint16_t pack_e4m3x2(float low, float high) {
  std::uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}

/// Four values as E4M3 in one register, the first in the lowest byte.
__device__ __forceinline__ std::uint32_t pack_e4m3x4(float b0, float b1, float b2, float b3) {
  std::uint32_t packed;
  asm("mov.b32 %0, {%1, %2};" : "=r"(packed) : "h"(pack_e4m3x2(b0, b1)), "h"(pack_e4m3x2(b2, b3)));
  return packed;
}

/// Two E4M3 codes as values; exact.
__device__ __forceinline__ void unpack_e4m3x2(std::uint16_t codes, float& low, float& high) {
  asm("{\n"
      ".reg .b32 halves;\n"
      ".reg .b16 x, y;\n"
      "cvt.rn.f16x2.e4m3x2 halves, %2;\n"
      "mov.b32 {x, y}, halves;\n"
      "cvt.f32.f16 %0, x;\n"
      "cvt.f32.f16 %1, y;\n"
      "}"
      : "=f"(low), "=f"(high)
      : "h"(codes));
}

/// Two values as BF16 (round to nearest even); `low` in the low half.
__device__ __forceinline__ std::uint32_t pack_bf16x2(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

/// The sum of two values after rounding each to E4M3; exact.
__device__ __forceinline__ float round_to_e4m3_sum(float a, float b) {
  float sum;
  asm("{\n"
      ".reg .b32 halves;\n"
      ".reg .b16 low, high;\n"
      ".reg .f32 x, y;\n"
      "cvt.rn.f16x2.e4m3x2 halves, %1;\n"
      "mov.b32 {low, high}, halves;\n"
      "cvt.f32.f16 x, low;\n"
      "cvt.f32.f16 y, high;\n"
      "add.rn.f32 %0, x, y;\n"
      "}"
      : "=f"(sum)
      : "h"(pack_e4m3x2(a, b)));
  return sum;
}

/// The greater of two values; NaN if either is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float greater;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(greater) : "f"(a), "f"(b));
  return greater;
}

}  // namespace flamia::ptx
