// SPDX-License-Identifier: Apache-2.0
// Pairs of FP16 numbers in one register, and their way to E4M3.
#pragma once
#include <cstdint>

namespace flamia::ptx {

/// Two FP32 values rounded to FP16 (nearest even); `low` in the low half.
__device__ __forceinline__ std::uint32_t pack_f16x2(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

/// Greater magnitudes of two pairs; NaN gives way to a number.
__device__ __forceinline__ std::uint32_t max_magnitude_f16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  asm("{\n.reg .b32 x, y;\nabs.f16x2 x, %1;\nabs.f16x2 y, %2;\nmax.f16x2 %0, x, y;\n}" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

__device__ __forceinline__ std::uint32_t multiply_f16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

/// A pair as E4M3 (nearest even, saturating; NaN becomes 0x7F), the low half in the low byte.
__device__ __forceinline__ std::uint16_t pack_e4m3x2_f16(std::uint32_t pair) {
  std::uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(packed) : "r"(pair));
  return packed;
}

/// Two pairs as four E4M3 codes.
__device__ __forceinline__ std::uint32_t pack_e4m3x4_f16(std::uint32_t low, std::uint32_t high) {
  std::uint32_t packed;
  asm("mov.b32 %0, {%1, %2};" : "=r"(packed) : "h"(pack_e4m3x2_f16(low)), "h"(pack_e4m3x2_f16(high)));
  return packed;
}

/// The low half as FP32 (exact).
__device__ __forceinline__ float low_f16(std::uint32_t pair) {
  float f;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;\n}" : "=f"(f) : "r"(pair));
  return f;
}
__device__ __forceinline__ float high_f16(std::uint32_t pair) { return low_f16(pair >> 16); }

}  // namespace flamia::ptx
