// SPDX-License-Identifier: Apache-2.0
// The rotation's signs as the GPU applies them: to two 16-bit elements in one register, from a table that a lane reads 16 bytes of.
#pragma once
#include "numerics/hadamard.hpp"

namespace flamia::quantize::gpu {

/// Word i holds the sign bits of channels 2i (bit 15) and 2i + 1 (bit 31).
struct alignas(16) PackedSigns {
  std::uint32_t word[64];
};
constexpr PackedSigns packed_signs() {
  PackedSigns signs{};
  for (int i = 0; i < 64; ++i) {
    const auto negated = [](int c) { return numerics::kRotationSigns[c / 32] << (c % 32) & 0x80000000u; };
    signs.word[i] = negated(2 * i) >> 16 | negated(2 * i + 1);
  }
  return signs;
}
#if defined(__CUDACC__)
static __device__ const PackedSigns kPackedSigns = packed_signs();
#endif

}  // namespace flamia::quantize::gpu
