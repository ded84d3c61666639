// SPDX-License-Identifier: Apache-2.0
// E4M3 codes as pairs of FP16 numbers (the way back is in half.cuh).
#pragma once
#include <cstdint>

namespace flamia::ptx {

/// Four codes as two pairs; exact. The codes of the low bytes in `low`.
__device__ __forceinline__ void unpack_e4m3x4_f16(std::uint32_t codes, std::uint32_t& low, std::uint32_t& high) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}

}  // namespace flamia::ptx
