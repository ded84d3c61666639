// SPDX-License-Identifier: Apache-2.0
// The rotation of Q and K: fixed signs, then the normalised Hadamard matrix. Scores are invariant; outlier channels are spread.
// Bits (numerics.md §5): x_c * s_c (exact); butterfly in FP32, Sylvester order, h = 1, 2, 4, ... d/2: (a, b) of channels c, c + h
// becomes (a + b, a - b); last, one multiplication by FP32 1/sqrt(d). The inverse: butterfly with h = 2 and 4 as its last two stages (a GPU's lanes hold
// these bits of the channel), constant, then the signs.
#pragma once
#include "numerics/platform.hpp"

namespace flamia::numerics {

/// The first 128 bits of pi's fraction, most significant first: bit c set negates channel c. d = 64 uses the first 64.
inline constexpr std::uint32_t kRotationSigns[4] = {0x243F6A88u, 0x85A308D3u, 0x13198A2Eu, 0x03707344u};

FLAMIA_FN constexpr bool rotation_supported(int d) { return d == 64 || d == 128; }

namespace detail {
struct SignMasks {
  std::uint32_t of[128];
};
constexpr SignMasks sign_masks() {
  SignMasks masks{};
  for (int c = 0; c < 128; ++c) masks.of[c] = (kRotationSigns[c / 32] << (c % 32)) & 0x80000000u;
  return masks;
}
inline constexpr SignMasks kSignMasks = sign_masks();
}  // namespace detail

/// 0x80000000 where channel c is negated, else 0.
FLAMIA_FN std::uint32_t rotation_sign(int c) {
#if defined(__CUDA_ARCH__)
  const std::uint32_t word = c < 32 ? 0x243F6A88u : c < 64 ? 0x85A308D3u : c < 96 ? 0x13198A2Eu : 0x03707344u;
  return (word << (c % 32)) & 0x80000000u;
#else
  return detail::kSignMasks.of[c];  // a table: not every instruction set shifts lanes by different amounts
#endif
}

FLAMIA_FN float rotation_norm(int d) { return float_of(d == 128 ? 0x3DB504F3u : 0x3E000000u); }

#if !defined(__CUDACC__)
namespace detail {
/// Eight channels. Stages h = 1, 2, 4 exchange lanes of one vector, the others add whole vectors; the same additions either way.
using Lanes [[gnu::vector_size(32)]] = float;
using LaneBits [[gnu::vector_size(32)]] = std::int32_t;

/// Lane i becomes lane(i ^ H) + (bit H of i set ? -lane(i) : lane(i)), that is a + b and a - b.
template <int H>
FLAMIA_FN void butterfly_inside(Lanes& x) {
  const auto minus = [](int i) { return i & H ? INT32_MIN : 0; };
  const LaneBits sign{minus(0), minus(1), minus(2), minus(3), minus(4), minus(5), minus(6), minus(7)};
  const Lanes partner = __builtin_shufflevector(x, x, 0 ^ H, 1 ^ H, 2 ^ H, 3 ^ H, 4 ^ H, 5 ^ H, 6 ^ H, 7 ^ H);
  x = partner + reinterpret_cast<Lanes>(reinterpret_cast<LaneBits>(x) ^ sign);
}
}  // namespace detail
#endif

/// In place on one row of D channels. kBack: stages h = 2 and 4 come last.
template <int D, bool kBack = false>
FLAMIA_FN void butterfly(float* x) {
#if defined(__CUDACC__)
  const auto stage = [&](int h) {
    for (int block = 0; block < D; block += 2 * h)
      for (int c = block; c < block + h; ++c) {
        const float a = x[c], b = x[c + h];
        x[c] = add(a, b);
        x[c + h] = add(a, -b);
      }
  };
  for (int h = 1; h < D; h *= 2)
    if (!kBack || (h != 2 && h != 4)) stage(h);
  if (kBack) {
    stage(2);
    stage(4);
  }
  for (int c = 0; c < D; ++c) x[c] = mul(x[c], rotation_norm(D));
#else
  static_assert(D % 8 == 0);
  constexpr std::int64_t n = D / 8;
  // Lane by lane in and out: with one copy of the whole array g++ 12 -O3 drops the multiplication of some lanes (tests/quantize and
  // tests/numerics compare every version of the compiled code).
  detail::Lanes lanes[n];
  for (std::int64_t i = 0; i < n; ++i) __builtin_memcpy(&lanes[i], x + 8 * i, sizeof(detail::Lanes));
  const auto stages_2_and_4 = [&lanes] {
    for (std::int64_t i = 0; i < n; ++i) {
      detail::butterfly_inside<2>(lanes[i]);
      detail::butterfly_inside<4>(lanes[i]);
    }
  };
  for (std::int64_t i = 0; i < n; ++i) detail::butterfly_inside<1>(lanes[i]);
  if constexpr (!kBack) stages_2_and_4();
  for (std::int64_t h = 1; h < n; h *= 2)
    for (std::int64_t block = 0; block < n; block += 2 * h)
      for (std::int64_t i = block; i < block + h; ++i) {
        const detail::Lanes a = lanes[i], b = lanes[i + h];
        lanes[i] = a + b;
        lanes[i + h] = a - b;
      }
  if constexpr (kBack) stages_2_and_4();
  for (std::int64_t i = 0; i < n; ++i) {
    const detail::Lanes scaled = lanes[i] * rotation_norm(D);
    __builtin_memcpy(x + 8 * i, &scaled, sizeof scaled);
  }
#endif
}

template <int D>
FLAMIA_FN void rotate(float* x) {
  for (int c = 0; c < D; ++c) x[c] = float_of(bits_of(x[c]) ^ rotation_sign(c));
  butterfly<D>(x);
}

template <int D>
FLAMIA_FN void rotate_back(float* x) {
  butterfly<D, true>(x);
  for (int c = 0; c < D; ++c) x[c] = float_of(bits_of(x[c]) ^ rotation_sign(c));
}

}  // namespace flamia::numerics
