// SPDX-License-Identifier: Apache-2.0
// What the schedule should be, in plain loops.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "schedule/cuda/schedule.hpp"
#include "support/slots.hpp"

namespace flamia::test {

struct ScheduleModel {
  std::vector<sm90::Document> documents;
  std::vector<schedule::gpu::TokenBlock> blocks;
  std::vector<sm90::WorkItem> forward, backward;
  schedule::gpu::Totals totals{};
};

/// Tiles in which any token of the item meets a visible key (or a query that sees one), counted pair of tiles by pair of tiles.
inline std::int32_t count_visited(const schedule::MaskReach& reach, bool keys, int tile, int visit, std::int64_t first,
                                  std::int64_t length) {
  std::int32_t count = 0;
  const std::int64_t last = std::min<std::int64_t>(first + tile, length);
  for (std::int64_t other = 0; other < length; other += visit) {
    const std::int64_t end = std::min<std::int64_t>(other + visit, length);
    const auto found =
        keys ? schedule::tile_class(reach, other, end, first, last) : schedule::tile_class(reach, first, last, other, end);
    count += found != schedule::TileClass::empty;
  }
  return count;
}

/// Documents of at most `together` items keep them together.
inline std::vector<sm90::WorkItem> model_list(const ScheduleModel& model, const schedule::MaskReach& reach, bool keys, int tile,
                                              int visit, int together, schedule::gpu::ListTotals* totals) {
  struct Costed {
    sm90::WorkItem item;
    std::int32_t key;
  };
  std::vector<Costed> items;
  for (std::size_t b = 0; tile > 0 && b < model.documents.size(); ++b)
    for (std::int32_t first = 0; first < model.documents[b].length; first += tile) {
      const std::int32_t cost = count_visited(reach, keys, tile, visit, first, model.documents[b].length);
      const std::int32_t first_cost = count_visited(reach, keys, tile, visit, 0, model.documents[b].length);
      items.push_back({{static_cast<std::int32_t>(b), first}, model.documents[b].length <= tile * together ? first_cost : cost});
      totals->greatest_cost = std::max(totals->greatest_cost, cost);
      totals->total_cost += cost;
    }
  totals->items = static_cast<std::int32_t>(items.size());
  std::stable_sort(items.begin(), items.end(), [](const Costed& a, const Costed& b) { return a.key > b.key; });
  std::vector<sm90::WorkItem> sorted;
  for (const Costed& c : items) sorted.push_back(c.item);
  return sorted;
}

inline ScheduleModel model_schedule(const schedule::gpu::Shape& shape, const std::vector<std::int32_t>& cu_seqlens) {
  using namespace schedule::gpu;
  ScheduleModel model;
  Totals& totals = model.totals;
  const auto tokens = static_cast<std::int32_t>(shape.tokens);
  if (cu_seqlens[0] != 0) totals.violations |= kFirstNotZero;
  for (std::size_t b = 0; b < cu_seqlens.size(); ++b) {
    if (cu_seqlens[b] < 0 || cu_seqlens[b] > tokens) totals.violations |= kOutOfRow;
    if (b > 0 && cu_seqlens[b] < cu_seqlens[b - 1]) totals.violations |= kDecreasing;
  }
  std::int32_t reached = std::clamp(cu_seqlens[0], 0, tokens), slot = 0;
  totals.covered_begin = reached;
  for (std::size_t b = 1; b < cu_seqlens.size(); ++b) {
    const std::int32_t end = std::max(reached, std::clamp(cu_seqlens[b], 0, tokens));
    const std::int32_t length = end - reached;
    model.documents.push_back({slot, reached, length});
    for (std::int32_t p = 0; p < length; p += sm90::kBlock) model.blocks.push_back({reached + p, slot + p, p, length});
    totals.documents += length > 0;
    totals.longest = std::max(totals.longest, length);
    slot += static_cast<std::int32_t>(padded_slots(length));
    reached = end;
  }
  totals.covered_end = reached;
  totals.slots = slot;
  std::stable_sort(model.blocks.begin(), model.blocks.end(),
                   [](const TokenBlock& a, const TokenBlock& b) { return a.position < b.position; });
  for (int i = 0; i < kTailBlocks; ++i) model.blocks.push_back({reached, slot + i * sm90::kBlock, 0, 0});
  totals.token_blocks = static_cast<std::int32_t>(model.blocks.size());
  model.forward = model_list(model, shape.reach, false, shape.forward_tile, schedule::kTile, 0, &totals.forward);
  model.backward =
      model_list(model, shape.reach, true, shape.backward_tile, shape.backward_visit, shape.backward_together, &totals.backward);
  return model;
}

}  // namespace flamia::test
