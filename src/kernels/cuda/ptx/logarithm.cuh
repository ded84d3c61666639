// SPDX-License-Identifier: Apache-2.0
// Base-2 logarithms, and FP16 without rounding: for rounding in the exponent's domain.
#pragma once
#include <cstdint>

namespace flamia::ptx {

/// Two FP32 values as FP16, what does not fit cut off; `low` in the low half.
__device__ __forceinline__ std::uint32_t cut_f16x2(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float log2_approximate(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flamia::ptx
