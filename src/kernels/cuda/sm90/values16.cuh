// SPDX-License-Identifier: Apache-2.0
// E4M3 codes times a power of two as BF16 values.
#pragma once
#include <cstdint>

#include "../ptx/convert.cuh"

namespace flamia::sm90 {

/// From this factor on a product may exceed what FP32 and BF16 hold; it then becomes their largest finite value.
inline constexpr float kMayOverflow = 0x1p120f;

/// Infinities of two BF16 elements to the largest finite value.
__device__ __forceinline__ std::uint32_t finite16(std::uint32_t pair) {
  if ((pair & 0x7fffu) == 0x7f80u) --pair;
  if ((pair & 0x7fff0000u) == 0x7f800000u) pair -= 0x10000u;
  return pair;
}

/// Four codes, the first in the lowest byte, times `factor`. Infinite only from kMayOverflow on.
__device__ __forceinline__ uint2 products16(std::uint32_t codes, float factor) {
  float x[4];
  ptx::unpack_e4m3x2(static_cast<std::uint16_t>(codes), x[0], x[1]);
  ptx::unpack_e4m3x2(static_cast<std::uint16_t>(codes >> 16), x[2], x[3]);
  return {ptx::pack_bf16x2(__fmul_rn(x[0], factor), __fmul_rn(x[1], factor)),
          ptx::pack_bf16x2(__fmul_rn(x[2], factor), __fmul_rn(x[3], factor))};
}

/// The same, exact but for products that are subnormal in BF16 (to nearest even) and those that exceed its largest finite value (which they
/// become).
__device__ __forceinline__ uint2 values16(std::uint32_t codes, float factor) {
  const uint2 words = products16(codes, factor);
  if (factor >= kMayOverflow) return {finite16(words.x), finite16(words.y)};
  return words;
}

}  // namespace flamia::sm90
