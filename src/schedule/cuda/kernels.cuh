// SPDX-License-Identifier: Apache-2.0
// The schedule's kernels.
//
//   chunk_maxima, chunk_sums   rows of more than 1024 documents: what each chunk of 1024 leaves to the chunks after it
//   document_table             a thread a document: clamps cu_seqlens, scans lengths into slots and item offsets, clears the counters
//   expand_and_sort            small rows: thread block 0 makes the forward list, 1 the backward list, 2 the token blocks
//   expand_items, expand_token_blocks   rows with more items: the same, a thread an item; a device-wide radix sort follows
#pragma once
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "schedule/cuda/workspace.hpp"

namespace flamia::schedule::gpu {

inline constexpr int kThreads = 1024;  // documents of a chunk; items of a thread block that expands

struct TableParams {
  const std::int32_t* cu_seqlens;
  std::int32_t tokens, documents;
  int forward_tile, backward_tile;
  Workspace memory;
};

struct ExpandParams {
  std::int32_t documents;
  std::int32_t block_capacity;
  int position_bits;  // keys of token blocks are below 2^position_bits
  ListSpec forward, backward;
  Workspace memory;
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

__device__ inline Offsets operator+(Offsets a, Offsets b) {
  return {a.slots + b.slots, a.blocks + b.blocks, a.forward + b.forward, a.backward + b.backward};
}
__device__ inline ChunkSum operator+(ChunkSum a, ChunkSum b) {
  return {a.offsets + b.offsets, a.longest > b.longest ? a.longest : b.longest, a.filled + b.filled, a.violations | b.violations};
}

__device__ inline std::int32_t clamped(const TableParams& p, std::int32_t entry) {
  return entry < 0 ? 0 : entry > p.tokens ? p.tokens : entry;
}
__device__ inline std::int32_t tiles(std::int32_t length, int tile) {
  return tile == 0 ? 0 : static_cast<std::int32_t>((static_cast<std::int64_t>(length) + tile - 1) / tile);
}

using ReduceMaximum = cub::BlockReduce<std::int32_t, kThreads>;
using ReduceSum = cub::BlockReduce<ChunkSum, kThreads>;
using ScanMaximum = cub::BlockScan<std::int32_t, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
using ScanOffsets = cub::BlockScan<Offsets, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
union ChunkMemory {
  typename ReduceMaximum::TempStorage maximum;
  typename ReduceSum::TempStorage sum;
  typename ScanMaximum::TempStorage scan_maximum;
  typename ScanOffsets::TempStorage scan_offsets;
};

/// Clamped end of this thread's document; 0, neutral in a maximum, past the last one.
__device__ inline std::int32_t own_entry(const TableParams& p) {
  const std::int64_t b = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  return b < p.documents ? clamped(p, p.cu_seqlens[b + 1]) : 0;
}

__global__ __launch_bounds__(kThreads) void chunk_maxima(const TableParams p) {
  __shared__ ChunkMemory memory;
  const std::int32_t greatest = ReduceMaximum(memory.maximum).Reduce(own_entry(p), Greater{});
  if (threadIdx.x == 0) p.memory.chunk_maxima[blockIdx.x] = greatest;
}

/// Where this thread's document lies in the row; length 0 past the last one. Whole thread block.
struct Range {
  std::int32_t start, length;
};
__device__ inline Range own_range(const TableParams& p, ChunkMemory& memory, std::int32_t* shared_word) {
  std::int32_t earlier = clamped(p, p.cu_seqlens[0]);
  for (unsigned chunk = threadIdx.x; chunk < blockIdx.x; chunk += kThreads)
    earlier = Greater{}(earlier, p.memory.chunk_maxima[chunk]);
  if (blockIdx.x > 0) {
    earlier = ReduceMaximum(memory.maximum).Reduce(earlier, Greater{});
    if (threadIdx.x == 0) *shared_word = earlier;
    __syncthreads();
    earlier = *shared_word;
  }
  const std::int32_t end = own_entry(p);
  std::int32_t start;
  ScanMaximum(memory.scan_maximum).ExclusiveScan(end, start, earlier, Greater{});
  __syncthreads();
  return {start, end > start ? end - start : 0};
}

__device__ inline ChunkSum own_sum(const TableParams& p, Range range) {
  const std::int64_t b = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  std::uint32_t violations = 0;
  if (b < p.documents) {
    const std::int32_t before = p.cu_seqlens[b], entry = p.cu_seqlens[b + 1];
    violations = (entry < before ? kDecreasing : 0u) | (entry < 0 || entry > p.tokens ? kOutOfRow : 0u);
    if (b == 0) violations |= (before != 0 ? kFirstNotZero : 0u) | (before < 0 || before > p.tokens ? kOutOfRow : 0u);
  }
  return {{tiles(range.length, sm90::kSlotAlign) * sm90::kSlotAlign, tiles(range.length, sm90::kBlock),
           tiles(range.length, p.forward_tile), tiles(range.length, p.backward_tile)},
          range.length,
          range.length > 0 ? 1 : 0,
          violations};
}

__global__ __launch_bounds__(kThreads) void chunk_sums(const TableParams p) {
  __shared__ ChunkMemory memory;
  __shared__ std::int32_t word;
  const ChunkSum sum = ReduceSum(memory.sum).Reduce(own_sum(p, own_range(p, memory, &word)), Sum{});
  if (threadIdx.x == 0) p.memory.chunk_sums[blockIdx.x] = sum;
}

/// After the last document. `all` = sum over every document, `end` = token after the last one.
__device__ inline void write_totals(const TableParams& p, ChunkSum all, std::int32_t end) {
  const Workspace& w = p.memory;
  w.block_offsets[p.documents] = all.offsets.blocks;
  w.forward.offsets[p.documents] = all.offsets.forward;
  w.backward.offsets[p.documents] = all.offsets.backward;
  Totals totals{};
  totals.slots = all.offsets.slots;
  totals.covered_begin = clamped(p, p.cu_seqlens[0]);
  totals.covered_end = end;
  totals.documents = all.filled;
  totals.longest = all.longest;
  totals.token_blocks = all.offsets.blocks + kTailBlocks;
  totals.violations = all.violations;
  totals.forward.items = all.offsets.forward;
  totals.backward.items = all.offsets.backward;
  if (p.documents == 0) {  // nobody looked at the only entry
    const std::int32_t first = p.cu_seqlens[0];
    totals.violations = (first != 0 ? kFirstNotZero : 0u) | (first < 0 || first > p.tokens ? kOutOfRow : 0u);
  }
  *w.totals = totals;
}

__global__ __launch_bounds__(kThreads) void document_table(const TableParams p) {
  __shared__ ChunkMemory memory;
  __shared__ std::int32_t word;
  __shared__ ChunkSum earlier_chunks;
  const Workspace& w = p.memory;
  const Range range = own_range(p, memory, &word);
  const ChunkSum own = own_sum(p, range);

  ChunkSum earlier{};
  for (unsigned chunk = threadIdx.x; chunk < blockIdx.x; chunk += kThreads) earlier = earlier + w.chunk_sums[chunk];
  if (blockIdx.x > 0) earlier = ReduceSum(memory.sum).Reduce(earlier, Sum{});
  if (threadIdx.x == 0) earlier_chunks = earlier;
  __syncthreads();

  Offsets at, chunk_total;
  ScanOffsets(memory.scan_offsets).ExclusiveScan(own.offsets, at, Offsets{}, Sum{}, chunk_total);
  at = earlier_chunks.offsets + at;
  const std::int64_t b = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (b < p.documents) {
    w.documents[b] = {at.slots, range.start, range.length};
    w.block_offsets[b] = at.blocks;
    w.forward.offsets[b] = at.forward;
    w.backward.offsets[b] = at.backward;
  }
  if (blockIdx.x == 0 && threadIdx.x < kCounters) w.counters[threadIdx.x] = 0;
  if (blockIdx.x + 1 < gridDim.x) return;
  __syncthreads();
  if (threadIdx.x == kThreads - 1) word = range.start + range.length;  // ranges after the last document are empty and end there
  const ChunkSum chunk = ReduceSum(memory.sum).Reduce(own, Sum{});
  __syncthreads();
  if (threadIdx.x == 0) write_totals(p, earlier_chunks + chunk, word);
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
  std::uint32_t key;  // of the sort, greatest first
};
__device__ inline Costed make_item(const ListSpec& spec, const std::int32_t* offsets, const sm90::Document* documents,
                                   std::int32_t count, std::int32_t i) {
  const std::int32_t b = document_of(offsets, count, i);
  const std::int32_t first = (i - offsets[b]) * spec.tile;
  const std::int32_t length = documents[b].length;
  const std::int32_t cost = item_cost(spec.reach, spec.keys, spec.tile, spec.visit, first, length);
  const bool together = offsets[b + 1] - offsets[b] <= spec.together;
  const std::int32_t key = together ? item_cost(spec.reach, spec.keys, spec.tile, spec.visit, 0, length) : cost;
  return {{b, first}, cost, static_cast<std::uint32_t>(key)};
}

/// Entry i of the block table in document order, and the key by which it is sorted, greatest first: early positions, then the tail,
/// then what is no block.
struct KeyedBlock {
  TokenBlock block;
  std::uint32_t key;
};
__device__ inline KeyedBlock make_token_block(const ExpandParams& p, std::int32_t i) {
  const Workspace& w = p.memory;
  const std::int32_t count = w.totals->token_blocks - kTailBlocks;
  if (i >= count + kTailBlocks) return {{0, 0, 0, -1}, 0};
  if (i >= count) return {{w.totals->covered_end, w.totals->slots + (i - count) * sm90::kBlock, 0, 0}, 1};
  const std::int32_t b = document_of(w.block_offsets, p.documents, i);
  const sm90::Document document = w.documents[b];
  const std::int32_t index = i - w.block_offsets[b], position = index * sm90::kBlock;
  return {{document.token_start + position, document.slot_start + position, position, document.length},
          (1u << p.position_bits) - 1 - static_cast<std::uint32_t>(index)};
}

struct ListStatistic {
  std::int64_t total;
  std::int32_t greatest;
  __device__ friend ListStatistic operator+(ListStatistic a, ListStatistic b) {
    return {a.total + b.total, a.greatest > b.greatest ? a.greatest : b.greatest};
  }
};

using ReduceStatistic = cub::BlockReduce<ListStatistic, kThreads>;
template <int kItems>
using Sort = cub::BlockRadixSort<std::uint32_t, kThreads, kItems, std::uint16_t>;

/// Sorts up to kItems * kThreads elements by descending key, equal keys in their order. make(i) gives element and key of i, which is
/// stored as unsorted[i]; past `count` keys are 0. Whole thread block.
template <int kItems, class Element, class Make>
__device__ void sort_in_block(std::int32_t count, int bits, Make make, Element* unsorted, Element* sorted, void* memory) {
  std::uint32_t key[kItems];
  std::uint16_t index[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const auto at = static_cast<std::int32_t>(threadIdx.x) * kItems + i;
    index[i] = static_cast<std::uint16_t>(at);
    key[i] = at < count ? make(at, unsorted[at]) : 0;
  }
  __syncthreads();  // `unsorted` is complete
  Sort<kItems>(*static_cast<typename Sort<kItems>::TempStorage*>(memory)).SortDescendingBlockedToStriped(key, index, 0, bits);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const auto at = static_cast<std::int32_t>(threadIdx.x) + i * kThreads;
    if (at < count) sorted[at] = unsorted[index[i]];
  }
}

/// One work list: by descending key and, among equals, by document and position.
template <int kItems>
__device__ void make_list(const ExpandParams& p, bool keys, void* memory) {
  const Workspace& w = p.memory;
  const ListSpec& spec = keys ? p.backward : p.forward;
  const ListMemory& list = keys ? w.backward : w.forward;
  ListTotals* totals = keys ? &w.totals->backward : &w.totals->forward;
  ListStatistic statistic{};
  const auto make = [&](std::int32_t i, sm90::WorkItem& item) {
    const Costed made = make_item(spec, list.offsets, w.documents, p.documents, i);
    item = made.item;
    statistic = statistic + ListStatistic{made.cost, made.cost};
    return made.key;
  };
  sort_in_block<kItems>(totals->items, spec.cost_bits, make, w.unsorted + (keys ? kBlockSortItems : 0), list.items, memory);
  __syncthreads();
  statistic = ReduceStatistic(*static_cast<typename ReduceStatistic::TempStorage*>(memory)).Reduce(statistic, Sum{});
  if (threadIdx.x == 0) {
    totals->greatest_cost = statistic.greatest;
    totals->total_cost = statistic.total;
  }
}

inline constexpr int kFewItems = 1, kManyItems = static_cast<int>(kBlockSortItems) / kThreads;

__global__ __launch_bounds__(kThreads) void expand_and_sort(const ExpandParams p) {
  __shared__ union {
    typename ReduceStatistic::TempStorage reduce;
    typename Sort<kFewItems>::TempStorage few;
    typename Sort<kManyItems>::TempStorage many;
  } memory;
  if (blockIdx.x == 2) {
    const auto make = [&](std::int32_t i, TokenBlock& block) {
      const KeyedBlock made = make_token_block(p, i);
      block = made.block;
      return made.key;
    };
    if (p.block_capacity <= kThreads)
      sort_in_block<kFewItems>(p.block_capacity, p.position_bits, make, p.memory.unsorted_blocks, p.memory.blocks, &memory);
    else
      sort_in_block<kManyItems>(p.block_capacity, p.position_bits, make, p.memory.unsorted_blocks, p.memory.blocks, &memory);
    return;
  }
  const bool keys = blockIdx.x == 1;
  const std::int32_t capacity = keys ? p.backward.capacity : p.forward.capacity;
  if (capacity == 0) return;
  capacity <= kThreads ? make_list<kFewItems>(p, keys, &memory) : make_list<kManyItems>(p, keys, &memory);
}

__global__ __launch_bounds__(kThreads) void expand_token_blocks(const ExpandParams p) {
  const auto i = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= p.block_capacity) return;
  const KeyedBlock made = make_token_block(p, i);
  p.memory.unsorted_blocks[i] = made.block;
  p.memory.keys[i] = made.key;
}

__global__ __launch_bounds__(kThreads) void expand_items(const ExpandParams p, bool keys) {
  __shared__ typename ReduceStatistic::TempStorage memory;
  const Workspace& w = p.memory;
  const ListSpec& spec = keys ? p.backward : p.forward;
  ListTotals* totals = keys ? &w.totals->backward : &w.totals->forward;
  const auto i = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
  ListStatistic statistic{};
  if (i < spec.capacity) {
    std::uint32_t key = 0;  // past the last item: sorts behind every item, whose key is at least 1
    sm90::WorkItem item{0, 0};
    if (i < totals->items) {
      const Costed made = make_item(spec, (keys ? w.backward : w.forward).offsets, w.documents, p.documents, i);
      item = made.item;
      key = made.key;
      statistic = {made.cost, made.cost};
    }
    w.unsorted[i] = item;
    w.keys[i] = key;
  }
  statistic = ReduceStatistic(memory).Reduce(statistic, Sum{});
  if (threadIdx.x == 0 && statistic.total != 0) {
    atomicMax(&totals->greatest_cost, statistic.greatest);
    atomicAdd(reinterpret_cast<unsigned long long*>(&totals->total_cost), static_cast<unsigned long long>(statistic.total));
  }
}

}  // namespace flamia::schedule::gpu
