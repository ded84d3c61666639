// SPDX-License-Identifier: Apache-2.0
// Host side of the schedule: sizes, memory, launches.
#include <algorithm>
#include <bit>
#include <cub/device/device_radix_sort.cuh>
#include <limits>
#include <string>

#include "kernels/cuda/device_status.hpp"
#include "schedule/cuda/kernels.cuh"
#include "schedule/cuda/workspace.hpp"

namespace flamia::schedule::gpu {
namespace {

std::int64_t filled(const Shape& shape) { return shape.documents < shape.tokens ? shape.documents : shape.tokens; }

/// Sum over documents of ceil(length / tile) is at most this.
std::int64_t item_capacity(const Shape& shape, int tile) { return tile == 0 ? 0 : shape.tokens / tile + filled(shape); }

ListSpec list_of(const Shape& shape, bool keys, int tile, int visit, int together) {
  const auto greatest = static_cast<std::uint64_t>(shape.tokens / visit + 2);
  return {shape.reach,
          keys,
          tile,
          visit,
          static_cast<std::int32_t>(item_capacity(shape, tile)),
          static_cast<int>(std::bit_width(greatest)),
          together};
}

template <class Element>
cudaError_t sort_on_device(void* memory, std::size_t& bytes, const std::uint32_t* keys, std::uint32_t* sorted_keys,
                           const Element* elements, Element* sorted, std::int64_t count, int bits, cudaStream_t stream) {
  return cub::DeviceRadixSort::SortPairsDescending(memory, bytes, keys, sorted_keys, elements, sorted, static_cast<int>(count), 0,
                                                   bits, stream);
}

template <class Element>
std::size_t device_sort_bytes(std::int64_t count) {
  std::size_t bytes = 0;
  sort_on_device<Element>(nullptr, bytes, nullptr, nullptr, nullptr, nullptr, count, 32, nullptr);
  return bytes;
}

class Divider {
 public:
  explicit Divider(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(std::int64_t count) {
    const std::size_t at = bytes_;
    bytes_ += (static_cast<std::size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return base_ ? reinterpret_cast<T*>(base_ + at) : nullptr;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  char* base_;
  std::size_t bytes_ = 0;
};

int position_bits(const Shape& shape) { return std::bit_width(static_cast<std::uint64_t>(shape.tokens / sm90::kBlock + 3)); }

std::int64_t chunk_count(const Shape& shape) {
  return shape.documents <= kThreads ? 1 : (shape.documents + kThreads - 1) / kThreads;
}

}  // namespace

ListSpec forward_list(const Shape& shape) { return list_of(shape, false, shape.forward_tile, kTile, 0); }
ListSpec backward_list(const Shape& shape) {
  return list_of(shape, true, shape.backward_tile, shape.backward_visit, shape.backward_together);
}

std::int64_t block_capacity(const Shape& shape) { return item_capacity(shape, sm90::kBlock) + kTailBlocks; }

bool fits_block_sort(const Shape& shape) {
  return item_capacity(shape, shape.forward_tile) <= kBlockSortItems &&
         item_capacity(shape, shape.backward_tile) <= kBlockSortItems && block_capacity(shape) <= kBlockSortItems;
}

Workspace divide(const Shape& shape, void* base) {
  const std::int64_t forward = item_capacity(shape, shape.forward_tile), backward = item_capacity(shape, shape.backward_tile);
  const std::int64_t blocks = block_capacity(shape);
  const bool small = fits_block_sort(shape);
  const std::int64_t items = std::max(forward, backward), keys = small ? 0 : std::max(items, blocks);
  Divider memory(base);
  Workspace w{};
  w.totals = memory.take<Totals>(1);
  w.counters = memory.take<std::int32_t>(kCounters);
  w.documents = memory.take<sm90::Document>(shape.documents);
  w.blocks = memory.take<TokenBlock>(blocks);
  w.block_offsets = memory.take<std::int32_t>(shape.documents + 1);
  w.forward = {memory.take<std::int32_t>(shape.documents + 1), memory.take<sm90::WorkItem>(forward)};
  w.backward = {memory.take<std::int32_t>(shape.documents + 1), memory.take<sm90::WorkItem>(backward)};
  w.chunk_maxima = memory.take<std::int32_t>(chunk_count(shape));
  w.chunk_sums = memory.take<ChunkSum>(chunk_count(shape));
  w.unsorted = memory.take<sm90::WorkItem>(small ? 2 * kBlockSortItems : items);
  w.unsorted_blocks = memory.take<TokenBlock>(blocks);
  w.keys = memory.take<std::uint32_t>(keys);
  w.sorted_keys = memory.take<std::uint32_t>(keys);
  w.sort_bytes = small ? 0 : std::max(device_sort_bytes<sm90::WorkItem>(items), device_sort_bytes<TokenBlock>(blocks));
  w.sort_memory = memory.take<char>(static_cast<std::int64_t>(w.sort_bytes));
  w.bytes = memory.bytes();
  return w;
}

Status check(const Shape& shape) {
  const auto bad_tile = [](int tile) { return tile < 0 || tile % 16 != 0; };
  if (shape.tokens < 0 || shape.tokens > std::numeric_limits<std::int32_t>::max())
    return Status::invalid("tokens = " + std::to_string(shape.tokens) + " must lie in 0 ... 2147483647 (cu_seqlens is int32)");
  if (shape.documents < 0 || shape.documents >= std::numeric_limits<std::int32_t>::max())
    return Status::invalid("documents = " + std::to_string(shape.documents) + " must lie in 0 ... 2147483646");
  if (sm90::slot_capacity(shape.tokens, shape.documents) > std::numeric_limits<std::int32_t>::max() - 2 * sm90::kTailSlots)
    return Status::unsupported("tokens = " + std::to_string(shape.tokens) + " in " + std::to_string(shape.documents) +
                               " documents need more than 2^31 slots; split the row");
  if (bad_tile(shape.forward_tile) || bad_tile(shape.backward_tile) || bad_tile(shape.backward_visit) || shape.backward_visit == 0)
    return Status::invalid("schedule tiles " + std::to_string(shape.forward_tile) + ", " + std::to_string(shape.backward_tile) +
                           ", " + std::to_string(shape.backward_visit) + " must be multiples of 16");
  return {};
}

std::size_t workspace_bytes(const Shape& shape) { return divide(shape, nullptr).bytes; }

View view(const Shape& shape, void* workspace) {
  const Workspace w = divide(shape, workspace);
  return {w.documents,
          w.blocks,
          w.forward.items,
          w.backward.items,
          w.totals,
          w.counters,
          block_capacity(shape),
          item_capacity(shape, shape.forward_tile),
          item_capacity(shape, shape.backward_tile)};
}

Status launch(const Shape& shape, const std::int32_t* cu_seqlens, void* workspace, cudaStream_t stream) {
  if (Status status = check(shape); !status.ok()) return status;
  if (cu_seqlens == nullptr) return Status::invalid("cu_seqlens is null; it needs documents + 1 entries in device memory");
  if (workspace == nullptr || reinterpret_cast<std::uintptr_t>(workspace) % 256 != 0)
    return Status::invalid("the schedule's workspace must be device memory aligned to 256 bytes");
  const Workspace w = divide(shape, workspace);
  const ListSpec forward = forward_list(shape), backward = backward_list(shape);
  const auto documents = static_cast<std::int32_t>(shape.documents);
  const TableParams table{cu_seqlens, static_cast<std::int32_t>(shape.tokens), documents, shape.forward_tile, shape.backward_tile,
                          w};
  const auto chunks = static_cast<unsigned>(chunk_count(shape));
  if (chunks > 1) {
    chunk_maxima<<<chunks, kThreads, 0, stream>>>(table);
    chunk_sums<<<chunks, kThreads, 0, stream>>>(table);
  }
  document_table<<<chunks, kThreads, 0, stream>>>(table);
  const std::int64_t blocks = block_capacity(shape);
  const ExpandParams expand{documents, static_cast<std::int32_t>(blocks), position_bits(shape), forward, backward, w};
  if (fits_block_sort(shape)) {
    expand_and_sort<<<3, kThreads, 0, stream>>>(expand);
    return device_status(cudaGetLastError(), "schedule");
  }
  const auto grid = [](std::int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); };
  std::size_t sort_bytes = w.sort_bytes;
  expand_token_blocks<<<grid(blocks), kThreads, 0, stream>>>(expand);
  cudaError_t error = sort_on_device(w.sort_memory, sort_bytes, w.keys, w.sorted_keys, w.unsorted_blocks, w.blocks, blocks,
                                     position_bits(shape), stream);
  for (const bool keys : {false, true}) {
    const ListSpec& spec = keys ? backward : forward;
    if (spec.capacity == 0 || error != cudaSuccess) continue;
    expand_items<<<grid(spec.capacity), kThreads, 0, stream>>>(expand, keys);
    cudaError_t error = sort_on_device(w.sort_memory, sort_bytes, w.keys, w.sorted_keys, w.unsorted,
                                       (keys ? w.backward : w.forward).items, spec.capacity, spec.cost_bits, stream);
  }
  return device_status(error != cudaSuccess ? error : cudaGetLastError(), "schedule");
}

}  // namespace flamia::schedule::gpu
