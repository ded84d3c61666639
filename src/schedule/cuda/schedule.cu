// SPDX-License-Identifier: Apache-2.0
// Host side of the schedule: sizes, memory, launches.
#include <bit>
#include <cub/device/device_radix_sort.cuh>
#include <limits>
#include <string>

#include "schedule/cuda/kernels.cuh"
#include "schedule/cuda/workspace.hpp"

namespace flamia::schedule::gpu {
namespace {

std::int64_t filled(const Shape& shape) { return shape.documents < shape.tokens ? shape.documents : shape.tokens; }

/// Sum over documents of ceil(length / tile) is at most this.
std::int64_t item_capacity(const Shape& shape, int tile) { return tile == 0 ? 0 : shape.tokens / tile + filled(shape); }

ListSpec list_of(const Shape& shape, bool keys, int tile, int visit) {
  const auto greatest = static_cast<std::uint64_t>(shape.tokens / visit + 2);
  return {shape.reach, keys, tile, visit, static_cast<std::int32_t>(item_capacity(shape, tile)), static_cast<int>(std::bit_width(greatest))};
}

std::size_t device_sort_bytes(std::int64_t items) {
  std::size_t bytes = 0;
  cub::DeviceRadixSort::SortPairsDescending(nullptr, bytes, static_cast<const std::uint32_t*>(nullptr),
                                            static_cast<std::uint32_t*>(nullptr), static_cast<const sm90::WorkItem*>(nullptr),
                                            static_cast<sm90::WorkItem*>(nullptr), static_cast<int>(items));
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

Status device_error(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return {};
  return {StatusCode::device_error, std::string(what) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error)};
}

Status sort_on_device(const ListSpec& spec, const ListMemory& list, const Workspace& w, cudaStream_t stream) {
  std::size_t bytes = w.sort_bytes;
  return device_error("schedule: sorting the work list",
                      cub::DeviceRadixSort::SortPairsDescending(w.sort_memory, bytes, w.costs, w.sorted_costs, w.unsorted,
                                                                list.items, spec.capacity, 0, spec.cost_bits, stream));
}

}  // namespace

ListSpec forward_list(const Shape& shape) { return list_of(shape, false, shape.forward_tile, kTile); }
ListSpec backward_list(const Shape& shape) { return list_of(shape, true, shape.backward_tile, shape.backward_visit); }

std::int64_t block_capacity(const Shape& shape) { return item_capacity(shape, sm90::kBlock) + kTailBlocks; }

bool fits_block_sort(const Shape& shape) {
  return item_capacity(shape, shape.forward_tile) <= kBlockSortItems && item_capacity(shape, shape.backward_tile) <= kBlockSortItems;
}

Workspace divide(const Shape& shape, void* base) {
  const std::int64_t forward = item_capacity(shape, shape.forward_tile), backward = item_capacity(shape, shape.backward_tile);
  const bool small = fits_block_sort(shape);
  const std::int64_t greater = forward > backward ? forward : backward;
  Divider memory(base);
  Workspace w{};
  w.totals = memory.take<Totals>(1);
  w.counters = memory.take<std::int32_t>(kCounters);
  w.documents = memory.take<sm90::Document>(shape.documents);
  w.blocks = memory.take<TokenBlock>(block_capacity(shape));
  w.block_offsets = memory.take<std::int32_t>(shape.documents + 1);
  w.forward = {memory.take<std::int32_t>(shape.documents + 1), memory.take<sm90::WorkItem>(forward)};
  w.backward = {memory.take<std::int32_t>(shape.documents + 1), memory.take<sm90::WorkItem>(backward)};
  w.unsorted = memory.take<sm90::WorkItem>(small ? 2 * kBlockSortItems : greater);
  w.costs = memory.take<std::uint32_t>(small ? 0 : greater);
  w.sorted_costs = memory.take<std::uint32_t>(small ? 0 : greater);
  w.sort_bytes = small ? 0 : device_sort_bytes(greater);
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
  return {w.documents,  w.blocks, w.forward.items, w.backward.items, w.totals, w.counters, block_capacity(shape),
          item_capacity(shape, shape.forward_tile), item_capacity(shape, shape.backward_tile)};
}

Status launch(const Shape& shape, const std::int32_t* cu_seqlens, void* workspace, cudaStream_t stream) {
  if (Status status = check(shape); !status.ok()) return status;
  if (cu_seqlens == nullptr) return Status::invalid("cu_seqlens is null; it needs documents + 1 entries in device memory");
  if (workspace == nullptr || reinterpret_cast<std::uintptr_t>(workspace) % 256 != 0)
    return Status::invalid("the schedule's workspace must be device memory aligned to 256 bytes");
  const Workspace w = divide(shape, workspace);
  const ListSpec forward = forward_list(shape), backward = backward_list(shape);
  const TableParams table{cu_seqlens,      static_cast<std::int32_t>(shape.tokens), static_cast<std::int32_t>(shape.documents),
                          shape.forward_tile, shape.backward_tile, w};
  document_table<<<1, kTableThreads, 0, stream>>>(table);
  const ExpandParams expand{static_cast<std::int32_t>(shape.documents), static_cast<std::int32_t>(block_capacity(shape)), forward,
                            backward, w};
  const auto blocks_for = [](std::int64_t threads) { return static_cast<unsigned>((threads + kExpandThreads - 1) / kExpandThreads); };
  const unsigned token_blocks = blocks_for(block_capacity(shape));
  if (fits_block_sort(shape)) {
    expand_and_sort<<<2 + token_blocks, kExpandThreads, 0, stream>>>(expand);
    return device_error("schedule", cudaGetLastError());
  }
  expand_token_blocks<<<token_blocks, kExpandThreads, 0, stream>>>(expand);
  for (const bool keys : {false, true}) {
    const ListSpec& spec = keys ? backward : forward;
    if (spec.capacity == 0) continue;
    expand_items<<<blocks_for(spec.capacity), kExpandThreads, 0, stream>>>(expand, keys);
    if (Status status = sort_on_device(spec, keys ? w.backward : w.forward, w, stream); !status.ok()) return status;
  }
  return device_error("schedule", cudaGetLastError());
}

}  // namespace flamia::schedule::gpu
