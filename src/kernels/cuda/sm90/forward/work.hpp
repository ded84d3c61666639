// SPDX-License-Identifier: Apache-2.0
// Which keys a group of queries sees, and which work a ticket stands for. Pure arithmetic, host and device.
#pragma once
#include <cstdint>

#include "../layout.hpp"

namespace flamia::sm90::forward {

/// FlashAttention's window: query i sees keys i - left ... i + right; a negative side is unlimited.
struct Window {
  int left, right;

  FLAMIA_LAYOUT_FN int first_key(int query) const { return left < 0 || query < left ? 0 : query - left; }
  FLAMIA_LAYOUT_FN int last_key(int query, int length) const {
    return right < 0 || query >= length - 1 - right ? length - 1 : query + right;
  }
};

/// Key tiles first ... last of the document, visited from last to first.
struct TileRange {
  int first, last;
};

/// Tiles of `keys` keys in which any of the queries first_query ... first_query + count - 1 (clipped to the document) sees a key; empty past its end.
FLAMIA_LAYOUT_FN TileRange tile_range(Window window, int first_query, int count, int length, int keys = kKeyTile) {
  if (first_query >= length) return {0, -1};
  const int last_query = first_query + count < length ? first_query + count - 1 : length - 1;
  return {window.first_key(first_query) / keys, window.last_key(last_query, length) / keys};
}

/// A document's items are aligned to its end: the one that is not full, in groups of `rows` queries, is the first, which has the fewest keys
/// (causal). Position of an item whose place in the list of whole items is `first`; negative for an item that is not full.
FLAMIA_LAYOUT_FN int aligned_first(int first, int length, int rows, int groups_per_item) {
  const int groups = (length + rows - 1) / rows, missing = (groups_per_item - groups % groups_per_item) % groups_per_item;
  return first - missing * rows;
}

/// Tickets run over groups of heads, in a group over the items, in an item over the heads of the group: the keys and values of a group
/// stay in the L2 cache while its items, dearest first, are worked off.
struct Ticket {
  int item, head;
};
FLAMIA_LAYOUT_FN Ticket decode_ticket(std::uint32_t ticket, std::uint32_t items, std::uint32_t heads,
                                      std::uint32_t heads_per_group) {
  const std::uint32_t group = ticket / (items * heads_per_group);
  const std::uint32_t first_head = group * heads_per_group;
  const std::uint32_t in_group = first_head + heads_per_group <= heads ? heads_per_group : heads - first_head;
  const std::uint32_t rest = ticket - group * items * heads_per_group;
  return {static_cast<int>(rest / in_group), static_cast<int>(first_head + rest % in_group)};
}

}  // namespace flamia::sm90::forward
