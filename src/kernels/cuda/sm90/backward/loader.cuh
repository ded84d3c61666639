// SPDX-License-Identifier: Apache-2.0
// Copies and scheduling, done by single lanes of the dQ warpgroup between its own work, warp by warp in turn so that none falls behind. The
// copies of steps run ahead of the computation, across items; K and V of the next item follow when the block has finished with the current ones.
//
// The chain ticket -> item -> document takes three trips to memory. One trip is begun per step, so its answer is there a step later.
#pragma once
#include <cstdint>

#include "../../ptx/barrier.cuh"
#include "../../ptx/bulk_copy.cuh"
#include "storage.hpp"
#include "work.hpp"

namespace flamia::sm90::backward {

template <class Config>
struct Loader {
  const BackwardParams& params;
  Storage<Config>& storage;

  /// One more trip of the chain; `first` takes the block's own first ticket instead of the counter.
  __device__ __forceinline__ void fetch(bool first) {
    CopyCursor& cursor = storage.cursor;
    if (cursor.progress == 0) {
      cursor.ticket = first ? static_cast<int>(blockIdx.x) : static_cast<int>(gridDim.x) + atomicAdd(params.counter, 1);
      cursor.progress = 1;
    } else if (cursor.progress == 1) {
      const auto items = static_cast<std::uint32_t>(*params.item_count);
      if (static_cast<std::uint32_t>(cursor.ticket) >= items * params.key_heads) {
        cursor.next.steps = -1;
        cursor.progress = 3;
        return;
      }
      const Ticket ticket = decode_ticket(cursor.ticket, items, params.key_heads, params.heads_per_group);
      cursor.fetched = params.items[ticket.item];
      cursor.key_head = ticket.head;
      cursor.progress = 2;
    } else if (cursor.progress == 2) {
      const Document document = params.documents[cursor.fetched.document];
      const Window window{params.window_left, params.window_right};
      const StepRange steps = step_range(window, cursor.fetched.first, document.length);
      cursor.next = {
          document.slot_start, document.token_start, document.length, cursor.fetched.first,
          cursor.key_head,     steps.first,          steps.count,     steps.count * (params.query_heads / params.key_heads)};
      cursor.progress = 3;
    }
  }

  /// Turns to the next item.
  __device__ __forceinline__ void next_item(bool first) {
    CopyCursor& cursor = storage.cursor;
    while (cursor.progress != 3) fetch(first);
    cursor.work = cursor.next;
    cursor.left = cursor.next.steps;
    cursor.head = cursor.next.key_head * (params.query_heads / params.key_heads);
    cursor.block = 0;
    cursor.progress = cursor.next.steps < 0 ? 3 : 0;
  }

  __device__ __forceinline__ void start() {
    storage.cursor.progress = 0;
    storage.cursor.item = 0;
    storage.cursor.ended = 0;
    next_item(true);
  }

  /// Starts the copies of the next step into a free stage. After the last item: a stage without data whose work slot says so.
  __device__ __forceinline__ void copy_step(std::uint32_t slot) {
    CopyCursor& cursor = storage.cursor;
    if (cursor.ended) return;
    if (cursor.left == 0) next_item(false);
    const Work work = cursor.work;
    std::uint64_t* const ready = &storage.stage_ready[slot];
    if (cursor.left == work.steps) storage.work[cursor.item++ % Config::kWorkSlots] = work;
    if (work.steps < 0) {
      cursor.ended = 1;
      ptx::barrier_arrive(ready);
      return;
    }
    const Window window{params.window_left, params.window_right};
    const int head = cursor.head, block = cursor.block, query = (work.first_step + block) * kQueryStep;
    Stage<Config>& stage = storage.stage[slot];
    stage.info = {query, step_flags(window, query, work.first_key, work.length) | (cursor.left == 1 ? kLastStep : 0), head,
                  min(work.length - work.first_key, kKeyTile) - 1};
    const std::int64_t row = head * params.slots + work.slot_start + query;
    const std::int64_t at = row * Config::kHeadDim;
    ptx::barrier_arrive_expect(ready, 4 * Config::kStepBytes + kStepRecordBytes);
    ptx::bulk_copy(stage.records, static_cast<const std::uint8_t*>(params.row_records) + row / kGroup * kRowGroupBytes,
                   kStepRecordBytes, ready);
    ptx::bulk_copy(stage.query, params.query_rows + at, Config::kStepBytes, ready);
    ptx::bulk_copy(stage.gradient, params.gradient_rows + at, Config::kStepBytes, ready);
    ptx::bulk_copy(stage.gradient_transposed, params.gradient_transposed + at, Config::kStepBytes, ready);
    ptx::bulk_copy(stage.query_transposed, params.query_transposed + at, Config::kStepBytes, ready);
    const bool next_head = block + 1 == work.blocks;
    cursor.block = next_head ? 0 : block + 1;
    cursor.head = next_head ? head + 1 : head;
    --cursor.left;
    if (cursor.progress < 3) fetch(false);
  }

  /// K, V, Kt and the key records of an item.
  __device__ __forceinline__ void copy_keys(const Work& work) {
    const std::int64_t row = work.key_head * params.slots + work.slot_start + work.first_key;
    const std::int64_t at = row * Config::kHeadDim;
    std::uint64_t* const ready = &storage.keys_ready;
    ptx::barrier_arrive_expect(ready, 3 * Config::kKeyBytes + kTileRecordBytes);
    ptx::bulk_copy(storage.key_records, static_cast<const KeyRecord*>(params.key_records) + row, kTileRecordBytes, ready);
    ptx::bulk_copy(storage.key, params.key_rows + at, Config::kKeyBytes, ready);
    ptx::bulk_copy(storage.value, params.value_rows + at, Config::kKeyBytes, ready);
    ptx::bulk_copy(storage.key_transposed, params.key_transposed + at, Config::kKeyBytes, ready);
  }

  /// The last block to run out of tickets leaves the counter as it found it.
  __device__ __forceinline__ void finish() {
    __threadfence();
    if (atomicAdd(params.counter + 1, 1) == static_cast<int>(gridDim.x) - 1) {
      params.counter[0] = 0;
      params.counter[1] = 0;
    }
  }
};

}  // namespace flamia::sm90::backward
