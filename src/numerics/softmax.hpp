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
inline constexpr int kCodeExponent = 8;

/// How far m lies above the greatest t where the maximum sets it: then the greatest code is 2^8 (phase32) or 2^7 (tilesum, a careful row).
FLAMIA_FN constexpr float headroom(RowReference reference) { return reference == RowReference::phase32 ? 0.f : 1.f; }

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

/// tilesum, a careful row: the rule of phase32, one step higher.
FLAMIA_FN float careful_first(float x) { return add(phase32_first(x), 1.f); }
FLAMIA_FN float careful_next(float m, float x) {
  const float covered = add(m, -1.f);
  return x > covered ? add(phase32_next(covered, x), 1.f) : m;
}

/// tilesum, a free row: a tile is accepted while the sum of its codes stays below this; a saturated code alone is 448.
inline constexpr float kTileSumLimit = 440.f;

/// tilesum, a careful row becomes free after a tile
/// - if it is flat: its l, in codes, exceeds five times the greatest code, so no key decides it alone. m then rises by at least kFlatRise
///   steps: room for greater keys to come, which would have a tile done again;
/// - if it is settled: it has kSettledTiles tiles behind it, so that greater keys are rare. m rises by at least kSettledRise steps.
/// A tile of which it sees fewer than kFlatKeys keys shows nothing. Only a row's first kFirstTiles tiles and every kFreeingTiles-th of the
/// document are looked at: a row that is neither flat nor settled pays for little, and a group of rows seldom frees one that fails at once.
inline constexpr float kFlatSum = 640.f;
inline constexpr int kFlatKeys = 32, kFlatRise = 6, kSettledTiles = 16, kSettledRise = 7, kFirstTiles = 3, kFreeingTiles = 8;

/// Whether careful rows whose first tile (the highest) was `first_tile` may become free after `tile`.
FLAMIA_FN constexpr bool may_free(std::int64_t tile, std::int64_t first_tile) {
  return first_tile - tile < kFirstTiles || tile % kFreeingTiles == 0;
}

/// ceil(log2 sum) for a sum of E4M3 codes (>= 0, finite, exact), from the bits.
FLAMIA_FN int ceil_log2(float sum) {
  const std::uint32_t u = bits_of(sum);
  return static_cast<int>(u >> 23) - 127 + ((u & 0x7fffffu) != 0 ? 1 : 0);
}

/// tilesum, after a tile of a careful row that may free it: whole steps by which m rises before the next one, and the row is free; 0: it
/// stays careful. `sum` = sum of the tile's codes at m, `total` = that of all tiles so far, `seen` = visible keys of the tile by the mask,
/// `settled` = kSettledTiles lie behind the row. It must have more tiles to visit.
FLAMIA_FN int tilesum_rise(float m, float sum, float total, int seen, bool settled) {
  const bool flat = total > kFlatSum;
  if (seen < kFlatKeys || !(flat || (settled && total > 0.f)) || abs_of(m) >= kGridLimit) return 0;
  const int unseen = seen == 128 ? 0 : seen >= 64 ? 1 : 2;  // binades that as many keys as a whole tile has may add
  return max_of(flat ? kFlatRise : kSettledRise, ceil_log2(sum > 1.f ? sum : 1.f) + unseen - 7);
}

/// 2^(m_old - m_new), the factor of O and l; 0 for a row that has seen nothing yet.
FLAMIA_FN float rescale(float m_old, float m_new, bool fresh) { return fresh ? 0.f : exp2_reference(add(m_old, -m_new)); }

/// LSE in natural logarithm: (m + log2 l) * ln 2, l > 0; written once, in FP32, from the same operations on every machine except log2.
FLAMIA_FN float natural_lse(float m, float log2_l) { return mul(add(m, log2_l), 0.693147182f); }

}  // namespace flamia::numerics
