// SPDX-License-Identifier: Apache-2.0
// NVFP4 codes times their scale as FP16 values, which is exact.
#pragma once
#include <cstdint>

#include "../ptx/half.cuh"

namespace flamia::sm90 {

/// Eight codes, the first in the lowest four bits, times the E4M3 scale. 0x7f, that of a flagged token, counts as 0. Bits of E2M1 and E4M3 at the
/// upper end of FP16's mantissa are 2^-14 and 2^-8 of their value.
__device__ __forceinline__ uint4 nvfp4_values(std::uint32_t codes, std::uint32_t scale) {
  constexpr std::uint32_t kFlaggedScale = 0x7f, kTwoTo14 = 0x74007400, kTwoTo8 = 0x5c005c00;  // in FP16, twice
  const std::uint32_t bits = scale == kFlaggedScale ? 0u : scale << 7, factor = ptx::multiply_f16x2(bits | bits << 16, kTwoTo8);
  std::uint32_t words[4];
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const std::uint32_t low = codes >> 8 * pair & 15u, high = codes >> (8 * pair + 4) & 15u;
    const std::uint32_t both = low | high << 16, small = (both & 0x00070007u) << 9 | (both & 0x00080008u) << 12;
    words[pair] = ptx::multiply_f16x2(ptx::multiply_f16x2(small, kTwoTo14), factor);
  }
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace flamia::sm90
