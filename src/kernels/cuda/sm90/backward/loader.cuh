// SPDX-License-Identifier: Apache-2.0
// Copies and scheduling, done by the dQ warpgroup between its own work: each of its warps copies a quarter of every step, so that none falls
// behind the others. The copies of steps run ahead of the computation, across items; K and V of the next item follow as soon as the consumers
// have finished with the current ones, Kt when the dQ warpgroup has.
//
// Steps are planned in batches by the 32 lanes of one warp, a step a lane, as soon as the copies reach the batch before: copying one takes a
// load of its plan and one bulk copy. The chain ticket -> item -> document takes three trips to memory; each is begun a step after the one
// before.
#pragma once
#include <cstdint>

#include "../../ptx/barrier.cuh"
#include "../../ptx/bulk_copy.cuh"
#include "../../ptx/registers.cuh"
#include "power.cuh"
#include "storage.hpp"
#include "work.hpp"

namespace flamia::sm90::backward {

inline constexpr int kPlanningWarp = 3, kTransposedWarp = 2;

template <class Config>
struct Loader {
  const BackwardParams& params;
  Storage<Config>& storage;
  int warp, lane;

  /// One more trip of the chain; `first` takes the block's own first ticket instead of the counter.
  __device__ __forceinline__ void fetch(bool first) const {
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
  __device__ __forceinline__ void next_item(bool first) const {
    CopyCursor& cursor = storage.cursor;
    while (cursor.progress != 3) fetch(first);
    cursor.work = cursor.next;
    cursor.left = cursor.next.steps;
    cursor.head = cursor.next.key_head * (params.query_heads / params.key_heads);
    cursor.block = 0;
    cursor.progress = cursor.next.steps < 0 ? 3 : 0;
    storage.work[cursor.item++ % Config::kWorkSlots] = cursor.work;
  }

  /// Plans the next steps of the current item, at most a warp's worth, or the end of the kernel. Called by the planning warp.
  __device__ __forceinline__ void plan_batch() const {
    CopyCursor& cursor = storage.cursor;
    if (lane == 0 && cursor.left == 0) next_item(false);
    __syncwarp();
    const Work work = cursor.work;
    const int left = cursor.left, planned = cursor.planned, count = min(left, 32);
    StepInfo& step = storage.plan[(planned + lane) % Config::kPlanSlots];
    if (left < 0) {
      if (lane < 2 * Config::kStages) step = {0, 0, 0, static_cast<std::uint16_t>(lane == 0 ? kEnd : kNothing), 0};
      return;
    }
    const int at = cursor.block + lane, heads_on = at / work.blocks, block = at % work.blocks, head = cursor.head + heads_on;
    if (lane < count) {
      const Window window{params.window_left, params.window_right};
      const int query = (work.first_step + block) * kQueryStep;
      const int next_query = block + 1 == work.blocks ? work.first_step * kQueryStep : query + kQueryStep;
      int flags = step_flags(window, query, work.first_key, work.length);
      if ((step_flags(window, next_query, work.first_key, work.length) & kMasked) != 0) flags |= kNextMasked;
      if (lane == 0) flags |= kFirstOfBatch;
      if (work.steps - left + lane < 3) flags |= kFetch;
      step = {query, head, static_cast<std::int32_t>(head * params.slots + work.slot_start + query),
              static_cast<std::uint16_t>(flags), static_cast<std::uint16_t>(min(work.length - work.first_key, kKeyTile) - 1)};
    }
    __syncwarp();
    if (lane == count - 1) {
      cursor.planned = planned + count;
      cursor.left = left - count;
      const bool next_head = block + 1 == work.blocks;
      cursor.block = next_head ? 0 : block + 1;
      cursor.head = next_head ? head + 1 : head;
    }
    __syncwarp();
  }

  /// Starts the warp's share of the copies of a step whose stage is free.
  __device__ __forceinline__ void copy_step(StepCounter<Config> now) const {
    const StepInfo step = storage.info(now);
    if ((step.flags & kNothing) == 0 && ptx::elect_lane()) copy_share(now.stage(), step);
  }
  /// What the copies of a step make possible or need. A barrier of the warpgroup lies between it and the copies of the next step.
  __device__ __forceinline__ void plan_ahead(StepCounter<Config> now) const {
    if (warp != kPlanningWarp) return;
    const int flags = storage.info(now).flags;
    if ((flags & kFirstOfBatch) != 0) plan_batch();
    if (lane == 0 && (flags & kFetch) != 0) fetch(false);
    __syncwarp();
  }
  __device__ __forceinline__ void copy_share(std::uint32_t slot, const StepInfo& step) const {
    std::uint64_t* const ready = &storage.stage_ready[slot];
    if ((step.flags & kEnd) != 0) return ptx::barrier_arrive(ready);
    Stage<Config>& stage = storage.stage[slot];
    const std::uint8_t* const operand = warp == 0   ? params.query_rows
                                        : warp == 1 ? params.gradient_rows
                                        : warp == 2 ? params.query_transposed
                                                    : params.gradient_transposed;
    ptx::barrier_arrive_expect(ready, Config::kStepBytes + (warp == 0 ? kStepRecordBytes : 0));
    ptx::bulk_copy(stage.operands + warp * Config::kStepBytes, operand + static_cast<std::int64_t>(step.row) * Config::kHeadDim,
                   Config::kStepBytes, ready);
    if (warp == 0) {
      ptx::bulk_copy(
          stage.records,
          static_cast<const std::uint8_t*>(params.row_records) + static_cast<std::int64_t>(step.row) / kGroup * kRowGroupBytes,
          kStepRecordBytes, ready);
    }
  }

  /// The first steps of the block. Called by all four warps.
  __device__ __forceinline__ void start(std::uint32_t barrier) const {
    if (warp == kPlanningWarp) {
      if (lane == 0) {
        storage.cursor.progress = storage.cursor.item = storage.cursor.planned = 0;
        next_item(true);
      }
      plan_batch();
    }
    for (StepCounter<Config> step; step.count < Config::kStages; step = step.next()) {
      ptx::named_barrier_sync(barrier, 128);
      copy_step(step);
      plan_ahead(step);
    }
  }

  /// K, V and the key records of an item, a copy a warp; none after the last.
  __device__ __forceinline__ void copy_keys(const Work& work) const {
    if (work.steps < 0 || warp == kTransposedWarp || !ptx::elect_lane()) return;
    const std::int64_t row = first_row(work), at = row * Config::kHeadDim;
    std::uint64_t* const ready = &storage.keys_ready;
    if (warp == 3) {
      ptx::barrier_arrive_expect(ready, kTileRecordBytes);
      ptx::bulk_copy(storage.key_records, static_cast<const KeyRecord*>(params.key_records) + row, kTileRecordBytes, ready);
    } else {
      ptx::barrier_arrive_expect(ready, Config::kKeyBytes);
      ptx::bulk_copy(warp == 0 ? storage.key : storage.value, (warp == 0 ? params.key_rows : params.value_rows) + at,
                     Config::kKeyBytes, ready);
    }
  }
  /// Its Kt.
  __device__ __forceinline__ void copy_transposed_keys(const Work& work) const {
    if (warp != kTransposedWarp || !ptx::elect_lane()) return;
    ptx::barrier_arrive_expect(&storage.transposed_keys_ready, Config::kKeyBytes);
    ptx::bulk_copy(storage.key_transposed, params.key_transposed + first_row(work) * Config::kHeadDim, Config::kKeyBytes,
                   &storage.transposed_keys_ready);
  }
  __device__ __forceinline__ std::int64_t first_row(const Work& work) const {
    return work.key_head * params.slots + work.slot_start + work.first_key;
  }

  /// The last block to run out of tickets leaves the counter as it found it.
  __device__ __forceinline__ void finish() const {
    if (warp != 0 || lane != 0) return;
    __threadfence();
    if (atomicAdd(params.counter + 1, 1) == static_cast<int>(gridDim.x) - 1) {
      params.counter[0] = 0;
      params.counter[1] = 0;
    }
  }
};

}  // namespace flamia::sm90::backward
