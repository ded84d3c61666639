// SPDX-License-Identifier: Apache-2.0
// The mask, once, for every kernel, the oracle and the schedule: the keys that a query sees are one interval of its document.
#pragma once
#include "numerics/platform.hpp"

namespace flamia::schedule {

inline constexpr int kTile = 128;  // queries and keys per tile, counted from the document's start

/// Half-open interval of positions inside a document.
struct Interval {
  std::int64_t begin;
  std::int64_t end;
  FLAMIA_FN constexpr bool empty() const { return begin >= end; }
  FLAMIA_FN constexpr bool contains(std::int64_t j) const { return j >= begin && j < end; }
};

/// Reach of the mask around the diagonal, in keys; kUnlimited where there is no limit. `causal` is right = 0.
struct MaskReach {
  static constexpr std::int64_t kUnlimited = std::int64_t{1} << 40;
  std::int64_t left = kUnlimited;
  std::int64_t right = kUnlimited;
};

/// From the caller's mask (flamia::Mask: causal, left, right; -1 = unlimited).
FLAMIA_FN constexpr MaskReach reach_of(bool causal, std::int64_t left, std::int64_t right) {
  MaskReach reach;
  if (left >= 0 && left < MaskReach::kUnlimited) reach.left = left;
  if (right >= 0 && right < MaskReach::kUnlimited) reach.right = right;
  if (causal) reach.right = 0;
  return reach;
}

/// Keys that query i of a document of `length` tokens sees.
FLAMIA_FN constexpr Interval visible_keys(MaskReach reach, std::int64_t i, std::int64_t length) {
  const std::int64_t begin = i > reach.left ? i - reach.left : 0;
  const std::int64_t end = i + reach.right + 1;
  return {begin, end < length ? end : length};
}

/// Queries that see key j.
FLAMIA_FN constexpr Interval seeing_queries(MaskReach reach, std::int64_t j, std::int64_t length) {
  const std::int64_t begin = j > reach.right ? j - reach.right : 0;
  const std::int64_t end = j + reach.left + 1;
  return {begin, end < length ? end : length};
}

enum class TileClass { empty, full, partial };

/// What a tile of queries [q0, q1) and keys [k0, k1) (clipped to the document) holds: nothing visible, everything, or some.
FLAMIA_FN constexpr TileClass tile_class(MaskReach reach, std::int64_t q0, std::int64_t q1, std::int64_t k0, std::int64_t k1) {
  if (k0 > q1 - 1 + reach.right || k1 - 1 < q0 - reach.left || q0 >= q1 || k0 >= k1) return TileClass::empty;
  const bool full = k1 - 1 <= q0 + reach.right && k0 >= q1 - 1 - reach.left;
  return full ? TileClass::full : TileClass::partial;
}

}  // namespace flamia::schedule
