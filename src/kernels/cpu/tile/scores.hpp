// SPDX-License-Identifier: Apache-2.0
// One 128 x 128 tile of scores, transposed: [key][query], so that a vector holds queries and every decision is one lane's own.
#pragma once
#include "kernels/cpu/buffers.hpp"
#include "kernels/cpu/tile/lanes.hpp"
#include "kernels/cpu/tile/operand.hpp"
#include "kernels/cpu/tile/product.hpp"
#include "numerics/softmax.hpp"

namespace flamia::cpu::FLAMIA_ISA {

struct TileShape {
  std::int64_t q0, k0;  // first query and key, positions in the document
  int queries, keys;    // clipped to the document
  int width;            // queries rounded up to whole vectors
  bool right_cut;       // the right edge of the mask (the diagonal) runs through the tile, as if the document filled it
};

FLAMIA_FN std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
FLAMIA_FN std::int64_t greatest(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
FLAMIA_FN int clipped(std::int64_t x, int limit) { return static_cast<int>(greatest(0, least(x, limit))); }

/// The tile, and who sees whom in it (rows.first, last, seen).
static TileShape place_tile(const Settings& s, const Document& document, std::int64_t query_tile, std::int64_t key_tile,
                            TileRows& rows) {
  TileShape t;
  t.q0 = query_tile * kTile;
  t.k0 = key_tile * kTile;
  t.queries = clipped(document.length - t.q0, kTile);
  t.keys = clipped(document.length - t.k0, kTile);
  t.width = (t.queries + 15) / 16 * 16;
  t.right_cut = t.k0 + kTile - 1 > t.q0 + s.reach.right;  // by position alone: whether tokens follow must change nothing
  for (int j = 0; j < t.keys; ++j) {
    const schedule::Interval queries = schedule::seeing_queries(s.reach, t.k0 + j, document.length);
    rows.first[j] = clipped(queries.begin - t.q0, t.queries);
    rows.last[j] = numerics::max_of(rows.first[j], clipped(queries.end - t.q0, t.queries));
  }
  for (int i = 0; i < t.width; ++i) {
    const schedule::Interval keys = schedule::visible_keys(s.reach, t.q0 + i, document.length);
    rows.seen[i] = i < t.queries ? numerics::max_of(0, clipped(keys.end - t.k0, t.keys) - clipped(keys.begin - t.k0, t.keys)) : 0;
  }
  return t;
}

/// Key tiles that hold a key which some query of the tile sees: [first, last).
static schedule::Interval key_tiles(const Settings& s, const Document& document, std::int64_t query_tile) {
  const std::int64_t q0 = query_tile * kTile, q1 = least(q0 + kTile, document.length);
  const schedule::Interval low = schedule::visible_keys(s.reach, q0, document.length);
  const schedule::Interval high = schedule::visible_keys(s.reach, q1 - 1, document.length);
  return {low.begin / kTile, (high.end + kTile - 1) / kTile};
}

/// Query tiles that hold a query which sees some key of the tile.
static schedule::Interval query_tiles(const Settings& s, const Document& document, std::int64_t key_tile) {
  const std::int64_t k0 = key_tile * kTile, k1 = least(k0 + kTile, document.length);
  const schedule::Interval low = schedule::seeing_queries(s.reach, k0, document.length);
  const schedule::Interval high = schedule::seeing_queries(s.reach, k1 - 1, document.length);
  return {low.begin / kTile, (high.end + kTile - 1) / kTile};
}

/// rows.rho = FP32(c log2 e) * 2^eQ (times Q's factor of the token), the factor that turns y = acc * 2^eK into t; NaN for a flagged query, whose pairs are all NaN.
/// A smoothed Q has its exponent and factors in y, beside the mean's part (smoothing.hpp).
static void row_factors(const Settings& s, int queries, int width, TileRows& rows) {
  const float base = s.smooth_q ? s.scale_log2 : numerics::mul(numerics::mul(s.scale_log2, rows.q_factor), rows.k_factor);
  for (int i = 0; i < width; ++i)
    rows.rho[i] = i >= queries        ? 0.f
                  : rows.q_flagged[i] ? numerics::quiet_nan()
                  : s.smooth_q        ? base
                                      : times_pow2(numerics::mul(base, rows.q_scale[i]), rows.q_exponent[i]);
}

/// y[j][i] = (K_j . Q_i) * 2^eK_j (times K's factor of the token); NaN for a key whose K or V is flagged.
static void scores(const Settings& s, const TileShape& t, const TileRows& rows, const float* k, const float* q_t, float* y) {
  product(s.accumulator, {k, s.head_dim, 1}, {q_t, kTile}, y, kTile, t.keys, t.width, s.head_dim);
  for (int j = 0; j < t.keys; ++j) {
    const bool flagged = rows.k_flagged[j] || rows.v_flagged[j];
    const int e = rows.k_exponent[j];
    if (e == 0 && rows.k_scale[j] == 1.f && !flagged) continue;
    const float a = flagged ? numerics::quiet_nan() : numerics::mul(numerics::pow2(e >> 1), rows.k_scale[j]),
                b = numerics::pow2(e - (e >> 1));
    float* row = y + j * kTile;
    for (int i = 0; i < t.width; ++i) row[i] = numerics::mul(numerics::mul(row[i], a), b);
  }
}

namespace detail {
FLAMIA_FN float at(float shift, int) { return shift; }
FLAMIA_FN float at(const float* shift, int i) { return shift[i]; }

/// Whether some row's reference lies where FP32 has no 1/32 left.
static bool any_beyond_grid(const float* m, int width) {
  std::uint32_t greatest_bits = 0;
  for (int i = 0; i < width; ++i) {
    const std::uint32_t bits = numerics::bits_of(m[i]) & 0x7fffffffu;
    greatest_bits = greatest_bits > bits ? greatest_bits : bits;
  }
  return greatest_bits >= numerics::bits_of(numerics::kGridLimit);
}
}  // namespace detail

/// x[i] = t - m[i] + shift of one key row, t = y * rho; `shift` is one float or one a row, a small integer.
/// On the grid t - m + shift is one fma with an exact addend (numerics.md §8). Beyond it (|m| >= 2^16) the addend would lose the shift, and
/// the unrounded t could exceed the rounded maximum m by whole steps: there t is rounded first, as it was for the maximum.
template <class Shift>
static void log_probabilities(const float* y, const float* rho, const float* m, Shift shift, int width, float* x) {
  if (detail::any_beyond_grid(m, width))
    for (int i = 0; i < width; ++i) {
      const bool beyond = numerics::abs_of(m[i]) >= numerics::kGridLimit;
      const float rounded = numerics::add(numerics::add(numerics::mul(y[i], rho[i]), -m[i]), detail::at(shift, i));
      const float exact = numerics::fma(y[i], rho[i], numerics::add(detail::at(shift, i), -m[i]));
      x[i] = beyond ? rounded : exact;
    }
  else
    for (int i = 0; i < width; ++i) x[i] = numerics::fma(y[i], rho[i], numerics::add(detail::at(shift, i), -m[i]));
}

/// 2 to the power of log_probabilities().
template <class Shift>
static void probabilities(const Settings& s, int key, const float* y, const float* rho, const float* m, Shift shift, int width,
                          float* x) {
  log_probabilities(y, rho, m, shift, width, x);
  exp2_lanes(s, key, x, width);
}

/// Selects lanes [first, last), 0 elsewhere: a masked pair is 0 whatever was computed for it.
static void mask_lanes(float* x, int first, int last, int width) {
  if (first == 0 && last == width) return;
  for (int i = 0; i < width; ++i) x[i] = (i >= first) & (i < last) ? x[i] : 0.f;
}

/// rows.reference[i] = R of numerics.md §8: the greatest exponent of V among the tile's keys that do not lie beyond the reach of row i.
/// Flagged keys do not count. Returns whether some visible key's exponent differs from its row's R.
static bool fold_reference(const Settings& s, const TileShape& t, TileRows& rows) {
  int running = numerics::kLeastExponent, low = 1000, high = -1000;
  for (int j = 0; j < t.keys; ++j) {
    if (!rows.v_flagged[j]) {
      running = numerics::max_of(running, rows.v_exponent[j]);
      low = numerics::min_of(low, rows.v_exponent[j]);
      high = numerics::max_of(high, rows.v_exponent[j]);
    }
    rows.prefix[j] = running;
  }
  for (int i = 0; i < t.width; ++i) {
    const std::int64_t last = least(t.q0 + i + s.reach.right - t.k0, t.keys - 1);
    rows.reference[i] = last >= 0 ? rows.prefix[last] : 0;
  }
  return low < high;
}

}  // namespace flamia::cpu::FLAMIA_ISA
