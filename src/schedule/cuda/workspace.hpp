// SPDX-License-Identifier: Apache-2.0
// How the schedule's workspace is divided, and which of the two ways of sorting a shape takes.
#pragma once
#include "schedule/cuda/schedule.hpp"

namespace flamia::schedule::gpu {

/// Up to this many items one thread block sorts a list in shared memory (one launch); above it the device-wide radix sort does.
inline constexpr std::int64_t kBlockSortItems = 4096;

struct ListSpec {
  MaskReach reach;
  bool keys;  // items are tiles of keys
  int tile, visit;
  std::int32_t capacity;
  int cost_bits;  // every cost is below 2^cost_bits
  int together;   // documents of at most so many items keep them together
};
ListSpec forward_list(const Shape& shape);
ListSpec backward_list(const Shape& shape);

struct ListMemory {
  std::int32_t* offsets;  // [documents + 1], exclusive sum of the documents' items
  sm90::WorkItem* items;
};

/// Sums over documents.
struct Offsets {
  std::int32_t slots, blocks, forward, backward;
};
struct ChunkSum {
  Offsets offsets;
  std::int32_t longest, filled;
  std::uint32_t violations;
};

/// All pointers null when `base` is null: then only `bytes` counts.
struct Workspace {
  Totals* totals;
  std::int32_t* counters;
  sm90::Document* documents;
  TokenBlock* blocks;
  std::int32_t* block_offsets;
  ListMemory forward, backward;
  // scratch
  std::int32_t* chunk_maxima;
  ChunkSum* chunk_sums;
  sm90::WorkItem* unsorted;  // block sort: [2][kBlockSortItems]; device sort: one list after the other
  TokenBlock* unsorted_blocks;
  std::uint32_t* keys;  // device sort only: in and out
  std::uint32_t* sorted_keys;
  void* sort_memory;
  std::size_t sort_bytes;
  std::size_t bytes;
};
Workspace divide(const Shape& shape, void* base);
bool fits_block_sort(const Shape& shape);
std::int64_t block_capacity(const Shape& shape);

}  // namespace flamia::schedule::gpu
