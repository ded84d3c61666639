// SPDX-License-Identifier: Apache-2.0
// The online softmax of one row: the reference m that scores are measured from, and how it moves (numerics.md §8, §9).
//
// m lies on a grid of 1/32 set by the first tile visited (the highest visible one); afterwards it moves by whole steps only, so every
// rescale of O and l is a power of two, exact, and the codes of P do not depend on which reference was current (short of subnormals).
// Every decision here is a function of the row alone. A decision shared by rows (a vote of a warp) would leak a later token.
#pragma once
#include "numerics/exp2.hpp"
#include "numerics/exponent.hpp"

namespace flamia::numerics {

enum class RowReference : std::uint8_t { phase32, tilesum };

/// Scores of 2^16 and more have no 1/32 left in FP32: there the reference is the maximum itself.
inline constexpr float kGridLimit = 65536.f;

/// Exponent B of the constant factor 2^B that codes of P carry: P = E4M3(exp2(t - m + B)).
FLAMIA_FN constexpr int code_exponent(RowReference reference) { return reference == RowReference::phase32 ? 8 : 7; }

FLAMIA_FN float ceil_of(float x) {
#if defined(__CUDA_ARCH__)
  return ceilf(x);
#else
  return __builtin_ceilf(x);
#endif
}

FLAMIA_FN float grid_of(float x) { return mul(ceil_of(mul(x, 32.f)), 1.f / 32.f); }

/// phase32, first visited tile: x = greatest visible t of the tile (NaN skipped; 0 if there is nothing but NaN).
FLAMIA_FN float phase32_first(float x) { return abs_of(x) >= kGridLimit ? x : grid_of(x); }

/// phase32, later tiles.
FLAMIA_FN float phase32_next(float m, float x) {
  const float rise = add(x, -m);
  if (abs_of(x) >= kGridLimit) return x > m ? x : m;
  return rise > 0.f ? add(m, ceil_of(rise)) : m;
}

/// tilesum, a free row: a tile is accepted while the sum of its codes (reference r, B = 7) stays below this; a saturated code alone is 448.
inline constexpr float kTileSumLimit = 440.f;

/// tilesum, a careful row: a tile of which it sees every key and whose codes add up to more than 2.5 times the greatest possible one shows
/// that the row is flat. Then r rises by at least kLeastRise steps: room for greater keys to come, which would have the tile done again.
inline constexpr float kFlatSum = 320.f;
inline constexpr int kLeastRise = 6;

/// ceil(log2 sum) for a sum of E4M3 codes (>= 0, finite, exact), from the bits.
FLAMIA_FN int ceil_log2(float sum) {
  const std::uint32_t u = bits_of(sum);
  return static_cast<int>(u >> 23) - 127 + ((u & 0x7fffffu) != 0 ? 1 : 0);
}

/// tilesum, after a tile of a careful row: whole steps by which r rises before the next one, and the row is free; 0: it stays careful.
/// `sum` = sum of the tile's codes at r, `seen` = visible keys of the tile by the mask, more = the row has more tiles to visit.
FLAMIA_FN int tilesum_rise(float r, float sum, int seen, bool more) {
  if (!more || seen < 128 || !(sum > kFlatSum) || abs_of(r) >= kGridLimit) return 0;
  return max_of(kLeastRise, ceil_log2(sum) - 7);
}

/// 2^(m_old - m_new), the factor of O and l; 0 for a row that has seen nothing yet.
FLAMIA_FN float rescale(float m_old, float m_new, bool fresh) { return fresh ? 0.f : exp2_reference(add(m_old, -m_new)); }

/// LSE in natural logarithm: (m + log2 l) * ln 2, l > 0; written once, in FP32, from the same operations on every machine except log2.
FLAMIA_FN float natural_lse(float m, float log2_l) { return mul(add(m, log2_l), 0.693147182f); }

}  // namespace flamia::numerics
