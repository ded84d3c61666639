// SPDX-License-Identifier: Apache-2.0
// Which queries see a tile of keys, in steps of 64 from the document's start. Pure arithmetic, host and device.
#pragma once
#include <cstdint>

#include "../forward/work.hpp"  // Window, decode_ticket
#include "records.hpp"

namespace flamia::sm90::backward {

using forward::decode_ticket;
using forward::Ticket;
using forward::Window;

/// Steps first ... first + count - 1 hold every query that sees a key of the tile at `first_key`.
struct StepRange {
  int first, count;
};
FLAMIA_LAYOUT_FN StepRange step_range(Window window, int first_key, int length) {
  if (first_key >= length) return {0, 0};
  const int last_key = first_key + kKeyTile < length ? first_key + kKeyTile - 1 : length - 1;
  const int begin = window.right < 0 || first_key <= window.right ? 0 : first_key - window.right;
  const int end = window.left < 0 || last_key >= length - 1 - window.left ? length : last_key + window.left + 1;  // exclusive
  const int first = begin / kQueryStep;
  return {first, (end + kQueryStep - 1) / kQueryStep - first};
}

/// What a step of 64 queries and a tile of 128 keys have in common.
enum StepFlags : int {
  kMasked = 1,  // some pair is not visible (or beyond the document)
  kCut = 2,     // some query's last key lies before the tile's end: what it may know of the tile differs from row to row

  kNextMasked = 4,  // some pair of the item's next step is not visible

  kFirstOfBatch = 16,  // the next batch can be planned
  kFetch = 32,         // the next item is being fetched
  kEnd = 64,           // no step: the kernel ends
  kNothing = 128,      // not even that
};
FLAMIA_LAYOUT_FN int step_flags(Window window, int first_query, int first_key, int length) {
  const int last_query = first_query + kQueryStep - 1, last_key = first_key + kKeyTile - 1;
  const bool right_free = window.right < 0 || last_key - first_query <= window.right;
  const bool left_free = window.left < 0 || last_query - first_key <= window.left;
  const bool masked = !(right_free && left_free && last_query < length && last_key < length);
  return (masked ? kMasked : 0) | (right_free ? 0 : kCut);
}

/// Index in the tile of the last key that the query sees, held inside the tile's keys (a query that sees none of them gets its first).
FLAMIA_LAYOUT_FN int last_key_of_tile(Window window, int query, int first_key, int length) {
  constexpr int kFar = 1 << 30;
  const int reach = query + (window.right < 0 || window.right > kFar ? kFar : window.right);  // positions stay below 2^30
  const int last = (reach < length - 1 ? reach : length - 1) - first_key;
  return last < 0 ? 0 : last < kKeyTile ? last : kKeyTile - 1;
}

/// Queries (as positions) that see key j: first ... end - 1.
struct QueryRange {
  int first, end;
};
FLAMIA_LAYOUT_FN QueryRange queries_of_key(Window window, int key, int length) {
  if (key >= length) return {length, length};
  const int first = window.right < 0 || key <= window.right ? 0 : key - window.right;
  const int end = window.left < 0 || key >= length - 1 - window.left ? length : key + window.left + 1;
  return {first, end};
}

}  // namespace flamia::sm90::backward
