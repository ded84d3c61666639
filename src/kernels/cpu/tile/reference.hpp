// SPDX-License-Identifier: Apache-2.0
// The row reference of the 128 queries of a tile: numerics.md §8 (phase32) and §9 (tilesum). Every decision is a lane's own.
#pragma once
#include "kernels/cpu/tile/scores.hpp"
#include "numerics/softmax.hpp"

namespace flamia::cpu::FLAMIA_ISA {

namespace detail {

/// rows.greatest = greatest visible t of the tile, t = fl(y * rho), as ordered integers; INT32_MIN: nothing but NaN, or nothing.
static void greatest_scores(const TileShape& t, const float* y, TileRows& rows) {
  for (int i = 0; i < t.width; ++i) rows.greatest[i] = INT32_MIN;
  for (int j = 0; j < t.keys; ++j) {
    const float* row = y + j * kTile;
    const int first = rows.first[j], last = rows.last[j];
    if (first == 0 && last >= t.queries) {
      for (int i = 0; i < t.width; ++i) {
        const std::int32_t x = ordered(numerics::mul(row[i], rows.rho[i]));
        rows.greatest[i] = rows.greatest[i] > x ? rows.greatest[i] : x;
      }
    } else {
      for (int i = 0; i < t.width; ++i) {
        const std::int32_t x = (i >= first) & (i < last) ? ordered(numerics::mul(row[i], rows.rho[i])) : INT32_MIN;
        rows.greatest[i] = rows.greatest[i] > x ? rows.greatest[i] : x;
      }
    }
  }
}

/// The maximum as a float; 0 where there is nothing but NaN.
FLAMIA_FN float greatest_of(std::int32_t order) { return order == INT32_MIN ? 0.f : from_ordered(order); }

/// Where the maximum of a tile puts a careful row's reference.
FLAMIA_FN float careful_reference(const TileRows& rows, int i, float m) {
  const float x = greatest_of(rows.greatest[i]);
  return rows.fresh[i] ? numerics::careful_first(x) : numerics::careful_next(m, x);
}

static void move_tilesum(const TileShape& t, TileRows& rows) {
  for (int i = 0; i < t.width; ++i) {
    rows.correction[i] = 1.f;
    if (!rows.seen[i]) continue;
    const float old = rows.m[i];
    rows.m[i] = numerics::add(old, static_cast<float>(rows.rise[i]));
    rows.rise[i] = 0;
    if (rows.careful[i]) rows.m[i] = careful_reference(rows, i, rows.m[i]);
    rows.correction[i] = numerics::rescale(old, rows.m[i], rows.fresh[i] != 0);
    rows.fresh[i] = 0;
  }
}

}  // namespace detail

/// Moves rows.m for the rows that see a key of the tile; rows.correction = 2^(m_old - m_new), 1 for the others, 0 for a row's first tile.
static void move_reference(const Settings& s, const TileShape& t, const float* y, TileRows& rows) {
  detail::greatest_scores(t, y, rows);
  if (s.reference == numerics::RowReference::tilesum) return detail::move_tilesum(t, rows);
  for (int i = 0; i < t.width; ++i) {
    rows.correction[i] = 1.f;
    if (!rows.seen[i]) continue;
    const float old = rows.m[i];
    const float x = detail::greatest_of(rows.greatest[i]);
    // + 0 turns -0 into +0: the maximum's sign must not depend on the order of equal zeros
    rows.m[i] = numerics::add(rows.fresh[i] ? numerics::phase32_first(x) : numerics::phase32_next(old, x), 0.f);
    rows.correction[i] = numerics::rescale(old, rows.m[i], rows.fresh[i] != 0);
    rows.fresh[i] = 0;
  }
}

/// tilesum, once the tile's codes are made and summed (rows.sum): free rows whose sum is too great are careful again, and m and the
/// correction follow. Returns whether there are any: then the codes are to be made once more.
static bool reject_free_rows(const TileShape& t, TileRows& rows) {
  bool rejected = false;
  for (int i = 0; i < t.width; ++i) {
    if (!rows.seen[i] || rows.careful[i] || !(rows.sum[i] >= numerics::kTileSumLimit)) continue;
    const float old = rows.m[i];
    rows.m[i] = detail::careful_reference(rows, i, old);
    rows.correction[i] = numerics::mul(rows.correction[i], numerics::rescale(old, rows.m[i], false));
    rows.careful[i] = 1;
    rejected = true;
  }
  return rejected;
}

/// tilesum, after the tile: careful rows that are flat or settled are free from the next one on. rows.l holds the tile.
static void free_rows(const Settings& s, const TileShape& t, std::int64_t key_tile, std::int64_t document_length, TileRows& rows) {
  for (int i = 0; i < t.width; ++i) {
    if (!rows.seen[i] || !rows.careful[i]) continue;
    const schedule::Interval keys = schedule::visible_keys(s.reach, t.q0 + i, document_length);
    const std::int64_t first_tile = (keys.end - 1) / kTile;
    if (keys.begin / kTile == key_tile || !numerics::may_free(key_tile, first_tile)) continue;
    const float total = numerics::mul(rows.l[i], numerics::pow2(s.code_exponent));
    rows.rise[i] =
        numerics::tilesum_rise(rows.m[i], rows.sum[i], total, rows.seen[i], first_tile - key_tile >= numerics::kSettledTiles);
    rows.careful[i] = rows.rise[i] == 0;
  }
}

}  // namespace flamia::cpu::FLAMIA_ISA
