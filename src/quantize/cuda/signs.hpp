// SPDX-License-Identifier: Apache-2.0
// The rotation's signs as the GPU applies them: to two 16-bit elements in one register.
#pragma once
#include "numerics/hadamard.hpp"

namespace flamia::quantize::gpu {

/// Eight sign bits, of channels 8 * octet ... 8 * octet + 7, the first in the highest of the 32 bits.
FLAMIA_FN std::uint32_t sign_octet(int octet) {
  const std::uint32_t word = octet < 4    ? 0x243F6A88u
                             : octet < 8  ? 0x85A308D3u
                             : octet < 12 ? 0x13198A2Eu
                                          : 0x03707344u;
  return word << (8 * (octet % 4));
}

/// Sign bits of channels 2 * pair and 2 * pair + 1 of an octet, where a pair of 16-bit elements has them.
FLAMIA_FN std::uint32_t packed_signs(std::uint32_t octet_bits, int pair) {
  return ((octet_bits << (2 * pair)) >> 16 & 0x8000u) | ((octet_bits << (2 * pair + 1)) & 0x80000000u);
}

}  // namespace flamia::quantize::gpu
