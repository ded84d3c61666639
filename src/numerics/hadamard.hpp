// SPDX-License-Identifier: Apache-2.0
// The rotation of Q and K: fixed signs, then the normalised Hadamard matrix. Scores are invariant; outlier channels are spread.
// Bits (numerics.md §5): x_c * s_c (exact); butterfly in FP32, Sylvester order, h = 1, 2, 4, ... d/2: (a, b) of channels c, c + h
// becomes (a + b, a - b); last, one multiplication by FP32 1/sqrt(d). The inverse: butterfly, constant, then the signs.
#pragma once
#include "numerics/platform.hpp"

namespace flamia::numerics {

/// The first 128 bits of pi's fraction, most significant first: bit c set negates channel c. d = 64 uses the first 64.
inline constexpr std::uint32_t kRotationSigns[4] = {0x243F6A88u, 0x85A308D3u, 0x13198A2Eu, 0x03707344u};

FLAMIA_FN constexpr bool rotation_supported(int d) { return d == 64 || d == 128; }

/// 0x80000000 where channel c is negated, else 0.
FLAMIA_FN std::uint32_t rotation_sign(int c) {
#if defined(__CUDA_ARCH__)
  const std::uint32_t word = c < 32 ? 0x243F6A88u : c < 64 ? 0x85A308D3u : c < 96 ? 0x13198A2Eu : 0x03707344u;
#else
  const std::uint32_t word = kRotationSigns[c / 32];
#endif
  return (word << (c % 32)) & 0x80000000u;
}

FLAMIA_FN float rotation_norm(int d) { return float_of(d == 128 ? 0x3DB504F3u : 0x3E000000u); }

/// In place on one row of D channels.
template <int D>
FLAMIA_FN void butterfly(float* x) {
  for (int h = 1; h < D; h *= 2)
    for (int block = 0; block < D; block += 2 * h)
      for (int c = block; c < block + h; ++c) {
        const float a = x[c], b = x[c + h];
        x[c] = add(a, b);
        x[c + h] = add(a, -b);
      }
  for (int c = 0; c < D; ++c) x[c] = mul(x[c], rotation_norm(D));
}

template <int D>
FLAMIA_FN void rotate(float* x) {
  for (int c = 0; c < D; ++c) x[c] = float_of(bits_of(x[c]) ^ rotation_sign(c));
  butterfly<D>(x);
}

template <int D>
FLAMIA_FN void rotate_back(float* x) {
  butterfly<D>(x);
  for (int c = 0; c < D; ++c) x[c] = float_of(bits_of(x[c]) ^ rotation_sign(c));
}

}  // namespace flamia::numerics
