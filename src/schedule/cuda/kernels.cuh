// SPDX-License-Identifier: Apache-2.0
// The schedule's kernels.
//
//   document_table       1 thread block: clamps cu_seqlens, scans lengths into slots and item offsets, clears counters and totals
//   expand_and_sort      small rows: thread block 0 makes the forward list, 1 the backward list, the rest the token blocks
//   expand_items, expand_token_blocks   rows with more items: the same, one thread an item; a device-wide radix sort follows
#pragma once
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "schedule/cuda/workspace.hpp"

namespace flamia::schedule::gpu {

inline constexpr int kTableThreads = 1024;
inline constexpr int kTableItems = 8;  // documents per thread and round
inline constexpr int kExpandThreads = 1024;

struct TableParams {
  const std::int32_t* cu_seqlens;
  std::int32_t tokens, documents;
  int forward_tile, backward_tile;
  Workspace memory;
};

struct ExpandParams {
  std::int32_t documents;
  std::int32_t block_capacity;
  ListSpec forward, backward;
  Workspace memory;
};

/// Exclusive sums over documents.
struct Offsets {
  std::int32_t slots, blocks, forward, backward;
  __device__ friend Offsets operator+(Offsets a, Offsets b) {
    return {a.slots + b.slots, a.blocks + b.blocks, a.forward + b.forward, a.backward + b.backward};
  }
};

struct Greater {
  __device__ std::int32_t operator()(std::int32_t a, std::int32_t b) const { return a > b ? a : b; }
};
struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

__device__ inline std::int32_t tiles(std::int32_t length, int tile) {
  return tile == 0 ? 0 : static_cast<std::int32_t>((static_cast<std::int64_t>(length) + tile - 1) / tile);
}

/// What one document of this length adds to the offsets.
__device__ inline Offsets needs(std::int32_t length, const TableParams& p) {
  return {tiles(length, sm90::kSlotAlign) * sm90::kSlotAlign, tiles(length, sm90::kBlock), tiles(length, p.forward_tile),
          tiles(length, p.backward_tile)};
}

__global__ __launch_bounds__(kTableThreads) void document_table(const TableParams p) {
  using ScanMaximum = cub::BlockScan<std::int32_t, kTableThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  using ScanOffsets = cub::BlockScan<Offsets, kTableThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  using ReduceMaximum = cub::BlockReduce<std::int32_t, kTableThreads>;
  __shared__ union {
    typename ScanMaximum::TempStorage maximum;
    typename ScanOffsets::TempStorage offsets;
    typename ReduceMaximum::TempStorage reduce;
  } memory;
  const Workspace& w = p.memory;
  const auto clamped = [&](std::int32_t x) { return x < 0 ? 0 : x > p.tokens ? p.tokens : x; };

  const std::int32_t begin = clamped(p.cu_seqlens[0]);
  std::int32_t reached = begin;  // greatest entry so far
  Offsets before{};
  std::int32_t longest = 0;
  std::int32_t filled = 0;
  std::uint32_t violations = 0;
  for (std::int64_t base = 0; base < p.documents; base += kTableThreads * kTableItems) {
    const std::int64_t first = base + static_cast<std::int64_t>(threadIdx.x) * kTableItems;
    std::int32_t entry[kTableItems], start[kTableItems];
    std::int32_t previous = first <= p.documents ? p.cu_seqlens[first] : 0;
#pragma unroll
    for (int i = 0; i < kTableItems; ++i) {
      if (first + i < p.documents) {
        const std::int32_t raw = p.cu_seqlens[first + i + 1];
        violations |= raw < previous ? kDecreasing : 0u;
        violations |= raw < 0 || raw > p.tokens ? kOutOfRow : 0u;
        previous = raw;
        entry[i] = clamped(raw);
      } else {
        entry[i] = 0;  // neutral: the scan is a maximum of numbers that are not negative
      }
    }
    std::int32_t greatest;
    ScanMaximum(memory.maximum).ExclusiveScan(entry, start, reached, Greater{}, greatest);
    __syncthreads();
    Offsets own{};  // of this thread's documents together
#pragma unroll
    for (int i = 0; i < kTableItems; ++i) {
      entry[i] = entry[i] > start[i] && first + i < p.documents ? entry[i] - start[i] : 0;  // from here on: the length
      longest = entry[i] > longest ? entry[i] : longest;
      filled += entry[i] > 0 ? 1 : 0;
      own = own + needs(entry[i], p);
    }
    Offsets at, total;
    ScanOffsets(memory.offsets).ExclusiveScan(own, at, Offsets{}, Sum{}, total);
    at = before + at;
#pragma unroll
    for (int i = 0; i < kTableItems; ++i) {
      const std::int64_t b = first + i;
      if (b >= p.documents) break;
      w.documents[b] = {at.slots, start[i], entry[i]};
      w.block_offsets[b] = at.blocks;
      w.forward.offsets[b] = at.forward;
      w.backward.offsets[b] = at.backward;
      at = at + needs(entry[i], p);
    }
    before = before + total;
    reached = greatest > reached ? greatest : reached;
    __syncthreads();
  }
  longest = ReduceMaximum(memory.reduce).Reduce(longest, Greater{});
  __syncthreads();
  filled = ReduceMaximum(memory.reduce).Reduce(filled, Sum{});
  const bool decreasing = __syncthreads_or((violations & kDecreasing) != 0);
  const bool out_of_row = __syncthreads_or((violations & kOutOfRow) != 0);
  if (threadIdx.x < kCounters) w.counters[threadIdx.x] = 0;
  if (threadIdx.x != 0) return;
  w.block_offsets[p.documents] = before.blocks;
  w.forward.offsets[p.documents] = before.forward;
  w.backward.offsets[p.documents] = before.backward;
  const bool first_outside = p.cu_seqlens[0] < 0 || p.cu_seqlens[0] > p.tokens;
  Totals totals{};
  totals.slots = before.slots;
  totals.covered_begin = begin;
  totals.covered_end = reached;
  totals.documents = filled;
  totals.longest = longest;
  totals.token_blocks = before.blocks + kTailBlocks;
  totals.violations = (p.cu_seqlens[0] != 0 ? kFirstNotZero : 0u) | (decreasing ? kDecreasing : 0u) |
                      (out_of_row || first_outside ? kOutOfRow : 0u);
  totals.skewed = filled > 0 && static_cast<std::int64_t>(longest) * filled >=
                                    static_cast<std::int64_t>(kSkew) * (static_cast<std::int64_t>(reached) - begin);
  totals.forward.items = before.forward;
  totals.backward.items = before.backward;
  *w.totals = totals;
}

/// The document of item i: the last one whose items begin at or before i, which is never an empty one. offsets[documents] > i.
__device__ inline std::int32_t document_of(const std::int32_t* offsets, std::int32_t documents, std::int32_t i) {
  std::int32_t low = 0, high = documents;  // offsets[low] <= i < offsets[high]
  while (high - low > 1) {
    const std::int32_t middle = low + (high - low) / 2;
    (offsets[middle] <= i ? low : high) = middle;
  }
  return low;
}

struct Costed {
  sm90::WorkItem item;
  std::int32_t cost;
};
__device__ inline Costed make_item(const ListSpec& spec, const std::int32_t* offsets, const sm90::Document* documents,
                                   std::int32_t count, std::int32_t i) {
  const std::int32_t b = document_of(offsets, count, i);
  const std::int32_t first = (i - offsets[b]) * spec.tile;
  return {{b, first}, item_cost(spec.reach, spec.keys, spec.tile, spec.visit, first, documents[b].length)};
}

/// Entry i of the block table.
__device__ inline void make_token_block(const ExpandParams& p, std::int32_t i) {
  const Workspace& w = p.memory;
  const std::int32_t count = w.totals->token_blocks - kTailBlocks;
  if (i >= p.block_capacity) return;
  if (i >= count + kTailBlocks) {
    w.blocks[i] = {0, 0, 0, -1};
    return;
  }
  if (i >= count) {
    w.blocks[i] = {w.totals->covered_end, w.totals->slots + (i - count) * sm90::kBlock, 0, 0};
    return;
  }
  const std::int32_t b = document_of(w.block_offsets, p.documents, i);
  const sm90::Document document = w.documents[b];
  const std::int32_t position = (i - w.block_offsets[b]) * sm90::kBlock;
  w.blocks[i] = {document.token_start + position, document.slot_start + position, position, document.length};
}

struct ListStatistic {
  std::int64_t total;
  std::int32_t greatest;
  __device__ friend ListStatistic operator+(ListStatistic a, ListStatistic b) {
    return {a.total + b.total, a.greatest > b.greatest ? a.greatest : b.greatest};
  }
};

/// One list, sorted by descending cost and, among equals, by document and position. Whole thread block.
__device__ inline void make_list(const ExpandParams& p, const ListSpec& spec, const ListMemory& list, sm90::WorkItem* unsorted,
                                 ListTotals* totals) {
  constexpr int kItems = static_cast<int>(kBlockSortItems) / kExpandThreads;
  using Sort = cub::BlockRadixSort<std::uint32_t, kExpandThreads, kItems, std::uint16_t>;
  using Reduce = cub::BlockReduce<ListStatistic, kExpandThreads>;
  __shared__ union {
    typename Sort::TempStorage sort;
    typename Reduce::TempStorage reduce;
  } memory;
  const std::int32_t count = totals->items;
  std::uint32_t cost[kItems];
  std::uint16_t index[kItems];
  ListStatistic statistic{};
  for (int i = 0; i < kItems; ++i) {
    const auto at = static_cast<std::int32_t>(threadIdx.x) * kItems + i;
    index[i] = static_cast<std::uint16_t>(at);
    cost[i] = 0;
    if (at >= count) continue;
    const Costed made = make_item(spec, list.offsets, p.memory.documents, p.documents, at);
    unsorted[at] = made.item;
    cost[i] = static_cast<std::uint32_t>(made.cost);
    statistic = statistic + ListStatistic{made.cost, made.cost};
  }
  statistic = Reduce(memory.reduce).Reduce(statistic, Sum{});
  if (threadIdx.x == 0) {
    totals->greatest_cost = statistic.greatest;
    totals->total_cost = statistic.total;
  }
  __syncthreads();  // also: `unsorted` is complete
  Sort(memory.sort).SortDescendingBlockedToStriped(cost, index, 0, spec.cost_bits);
  for (int i = 0; i < kItems; ++i) {
    const auto at = static_cast<std::int32_t>(threadIdx.x) + i * kExpandThreads;
    if (at < count) list.items[at] = unsorted[index[i]];
  }
}

__global__ __launch_bounds__(kExpandThreads) void expand_and_sort(const ExpandParams p) {
  const Workspace& w = p.memory;
  if (blockIdx.x >= 2) {
    make_token_block(p, static_cast<std::int32_t>((blockIdx.x - 2) * kExpandThreads + threadIdx.x));
    return;
  }
  const bool keys = blockIdx.x == 1;
  const ListSpec& spec = keys ? p.backward : p.forward;
  if (spec.capacity == 0) return;
  make_list(p, spec, keys ? w.backward : w.forward, w.unsorted + (keys ? kBlockSortItems : 0),
            keys ? &w.totals->backward : &w.totals->forward);
}

__global__ __launch_bounds__(kExpandThreads) void expand_token_blocks(const ExpandParams p) {
  make_token_block(p, static_cast<std::int32_t>(blockIdx.x * kExpandThreads + threadIdx.x));
}

__global__ __launch_bounds__(kExpandThreads) void expand_items(const ExpandParams p, bool keys) {
  using Reduce = cub::BlockReduce<ListStatistic, kExpandThreads>;
  __shared__ typename Reduce::TempStorage memory;
  const Workspace& w = p.memory;
  const ListSpec& spec = keys ? p.backward : p.forward;
  ListTotals* totals = keys ? &w.totals->backward : &w.totals->forward;
  const auto i = static_cast<std::int32_t>(blockIdx.x * kExpandThreads + threadIdx.x);
  ListStatistic statistic{};
  if (i < spec.capacity) {
    std::uint32_t cost = 0;  // past the last item: sorts behind every item, whose cost is at least 1
    sm90::WorkItem item{0, 0};
    if (i < totals->items) {
      const Costed made = make_item(spec, (keys ? w.backward : w.forward).offsets, w.documents, p.documents, i);
      item = made.item;
      cost = static_cast<std::uint32_t>(made.cost);
      statistic = {made.cost, made.cost};
    }
    w.unsorted[i] = item;
    w.costs[i] = cost;
  }
  statistic = Reduce(memory).Reduce(statistic, Sum{});
  if (threadIdx.x == 0 && statistic.total != 0) {
    atomicMax(&totals->greatest_cost, statistic.greatest);
    atomicAdd(reinterpret_cast<unsigned long long*>(&totals->total_cost), static_cast<unsigned long long>(statistic.total));
  }
}

}  // namespace flamia::schedule::gpu
