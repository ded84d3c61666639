// SPDX-License-Identifier: Apache-2.0
// Arithmetic on pairs of FP16 numbers in one register, every result rounded once; approximate reciprocals.
#pragma once
#include "half.cuh"

namespace flamia::ptx {

__device__ __forceinline__ std::uint32_t magnitude_f16x2(std::uint32_t a) {
  std::uint32_t r;
  asm("abs.f16x2 %0, %1;" : "=r"(r) : "r"(a));
  return r;
}

__device__ __forceinline__ std::uint32_t subtract_f16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

/// a * b + c.
__device__ __forceinline__ std::uint32_t fma_f16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

__device__ __forceinline__ std::uint32_t min_f16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  asm("min.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ std::uint32_t max_f16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

/// 1 / x within an ulp; 0 for infinity, and infinity for 0 and subnormal numbers.
__device__ __forceinline__ float reciprocal_approximate(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

/// Both numbers as FP32 (exact).
__device__ __forceinline__ void unpack_f16x2(std::uint32_t pair, float& low, float& high) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}" : "=f"(low), "=f"(high) : "r"(pair));
}

}  // namespace flamia::ptx
