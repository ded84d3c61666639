// SPDX-License-Identifier: Apache-2.0
// Copies and scheduling, by three threads of three warps. They have 24 registers each, and a spilled one costs hundreds of cycles beside so
// much shared memory: so each has little to remember.
//
//   scheduler      ticket -> item -> document, three trips to memory, a few steps before the work is needed
//   early copies   K and V of an item; Q, dO' and records of its steps, and what is said about them
//   late copies    what the gradients of those steps need besides
#pragma once
#include <climits>
#include <cstdint>

#include "../../ptx/bulk_copy.cuh"
#include "../split/tickets.cuh"
#include "config.hpp"

namespace flamia::sm90::ds16 {

using backward::step_flags;
using backward::step_range;
using backward::StepRange;
using backward::Window;
using split::Ring;

// Naps in nanoseconds between two looks at a barrier: a step lasts well over a microsecond, and looking takes turns of the shared memory away.
inline constexpr std::uint32_t kSchedulerNap = 200, kCopyNap = 64;

/// StepFlags of a step. Where the edge of the mask cuts its 128-query tile, each key has a reference of its own: the step counts as masked.
FLAMIA_LAYOUT_FN int flags_of_step(Window window, int first_query, int first_key, int length) {
  const int tile_query = first_query / kKeyTile * kKeyTile;
  const bool cut = window.right >= 0 && first_key + kKeyTile - 1 - tile_query > window.right;
  const int masked = step_flags(window, first_query, first_key, length) & backward::kMasked;
  return cut ? backward::kMasked | backward::kCut : masked;
}

template <class Config>
struct Producer {
  using Record = typename Config::Record;
  const BackwardParams& params;
  const RowArrays& rows;
  Storage<Config>& storage;

  __device__ __forceinline__ Window window() const { return {params.window_left, params.window_right}; }
  __device__ __forceinline__ std::int64_t key_row(const Work& work) const {
    return work.key_head * params.slots + work.slot_start + work.first_key;
  }

  /// Fetches an item whenever one is wanted. The last of the grid to run out of tickets leaves the counter as it found it.
  __device__ __forceinline__ void schedule() const {
    split::Tickets<Config::kQueryGradients> tickets(params, params.key_heads, params.heads_per_group);
    for (int item = 0;; ++item) {
      if (item > 0) ptx::barrier_wait_patiently(&storage.item_wanted, (item & 1) ^ 1, kSchedulerNap);
      const split::Assignment next = tickets.take();
      Work& work = storage.work[item % Config::kWorkSlots];
      const StepRange steps = step_range(window(), next.first, next.document.length);
      work = {next.document.slot_start,
              next.document.token_start,
              next.document.length,
              next.first,
              next.head,
              steps.first,
              steps.count,
              next.head < 0 ? -1 : steps.count * (params.query_heads / params.key_heads),
              0,
              INT_MAX};
      if (next.document.length <= kOneBlockTokens) {  // the second tile has been before the first
        const StepRange added = step_range(window(), kKeyTile, next.first == 0 ? next.document.length : 0);
        work.added_first = added.first;
        work.added_blocks = added.count;
      }
      ptx::barrier_arrive(&storage.item_ready);
      if (next.head < 0) break;
    }
    tickets.finish();
  }

  __device__ __forceinline__ void copy_early() const {
    Ring<Config::kRing> now;
    for (int item = 0;; ++item) {
      ptx::barrier_wait_patiently(&storage.item_ready, item & 1, kCopyNap);
      const Work& work = storage.work[item % Config::kWorkSlots];
      ptx::barrier_wait_patiently(&storage.keys_free, (item & 1) ^ 1, kCopyNap);
      if (work.steps < 0) break;
      copy_keys(work);
      int head = work.key_head * (params.query_heads / params.key_heads), query = work.first_step * kQueryStep, left = work.steps;
      const int end = query + work.blocks * kQueryStep;
      int flags = flags_of_step(window(), query, work.first_key, work.length);
      for (; left > 0; --left) {
        const bool next_head = query + kQueryStep == end;
        const int next_query = next_head ? work.first_step * kQueryStep : query + kQueryStep;
        const int next_flags = flags_of_step(window(), next_query, work.first_key, work.length);
        if ((next_flags & backward::kMasked) != 0) flags |= backward::kNextMasked;
        const int after_first = query / kQueryStep - work.added_first;
        if (after_first < 0 || after_first >= work.added_blocks) flags |= kNothingAdded;
        copy_scores(now,
                    {query, static_cast<std::int32_t>(head * params.slots + work.slot_start + query), flags, work.length - query});
        now = now.next();
        if (left == min(work.steps, split::kStepsAhead)) ptx::barrier_arrive(&storage.item_wanted);
        flags = next_flags;
        query = next_query;
        if (next_head) ++head;
      }
    }
    ptx::barrier_wait_patiently(&storage.early_free[now.slot], now.parity ^ 1, kCopyNap);
    storage.info[now.slot].flags = backward::kEnd;
    ptx::barrier_arrive(&storage.early_ready[now.slot]);
    ptx::barrier_arrive(&storage.keys_ready);  // consumers end too
  }

  __device__ __forceinline__ void copy_late() const {
    Ring<Config::kRing> now;
    Ring<Config::kLateStages> late;
    for (std::uint32_t count = 0;; ++count, now = now.next(), late = late.next()) {
      ptx::barrier_wait_patiently(&storage.early_ready[now.slot], now.parity, kCopyNap);
      const StepInfo step = storage.info[now.slot];
      if ((step.flags & backward::kEnd) != 0) break;
      ptx::barrier_arrive(&storage.early_free[now.slot]);
      copy_gradients(late, storage.sums[count % Config::kSumSlots], step);
    }
  }

 private:
  __device__ __forceinline__ void copy_keys(const Work& work) const {
    const std::int64_t row = key_row(work);
    std::uint64_t* const ready = &storage.keys_ready;
    constexpr int kKeyScoreBytes =
        Config::kKeysFromMemory ? Config::kKeyBytes / 2 + Config::kKeyBytes / 16 : Config::kScoreKeyBytes;
    ptx::barrier_arrive_expect(ready, kKeyScoreBytes + Config::kKeyBytes + kTileFactorBytes);
    ptx::bulk_copy(storage.key_factors, static_cast<const KeyFactors*>(params.key_records) + row, kTileFactorBytes, ready);
    if constexpr (Config::kKeysFromMemory) {
      ptx::bulk_copy(storage.key_codes.nvfp4, params.key_nvfp4 + row * (Config::kHeadDim / 2), sizeof(storage.key_codes.nvfp4),
                     ready);
      ptx::bulk_copy(storage.key_codes.scales, params.key_scales + row * (Config::kHeadDim / 16), sizeof(storage.key_codes.scales),
                     ready);
    } else {
      ptx::bulk_copy(storage.key, params.key_rows + row * Config::kHeadDim * kScoreBytes<Config::kScaleGroup>,
                     Config::kScoreKeyBytes, ready);
    }
    ptx::bulk_copy(storage.value, params.value_rows + row * Config::kHeadDim, Config::kKeyBytes, ready);
  }
  __device__ __forceinline__ void copy_scores(Ring<Config::kRing> now, const StepInfo& step) const {
    EarlyStage<Config>& stage = storage.early[now.slot];
    std::uint64_t* const ready = &storage.early_ready[now.slot];
    const std::int64_t at = static_cast<std::int64_t>(step.row) * Config::kHeadDim;
    ptx::barrier_wait_patiently(&storage.early_free[now.slot], now.parity ^ 1, kCopyNap);
    storage.info[now.slot] = step;
    const bool cut = (step.flags & backward::kCut) != 0;
    ptx::barrier_arrive_expect(
        ready, Config::kScoreStepBytes + Config::kStepBytes + Record::kStepBytes + (cut ? sizeof(storage.tile_references[0]) : 0));
    if (cut) {
      ptx::bulk_copy(storage.tile_references[now.slot], rows.references + step.row - step.query % kKeyTile,
                     sizeof(storage.tile_references[0]), ready);
    }
    ptx::bulk_copy(stage.query, params.query_rows + at * kScoreBytes<Config::kScaleGroup>, Config::kScoreStepBytes, ready);
    ptx::bulk_copy(storage.records[now.slot], rows.records + static_cast<std::int64_t>(step.row) / kGroup * Record::kBytes,
                   Record::kStepBytes, ready);
    ptx::bulk_copy(stage.gradient, params.gradient_rows + at, Config::kStepBytes, ready);
  }
  __device__ __forceinline__ void copy_gradients(Ring<Config::kLateStages> late, SumInfo& sums, const StepInfo& step) const {
    constexpr bool scaled = Config::kQueryGradients && Config::kPartials == PartialFormat::f16;
    LateStage<Config>& stage = storage.late[late.slot];
    std::uint64_t* const ready = &storage.late_ready[late.slot];
    const std::int64_t at = static_cast<std::int64_t>(step.row) * Config::kHeadDim;
    ptx::barrier_wait_patiently(&storage.late_free[late.slot], late.parity ^ 1, kCopyNap);
    sums.group = (step.flags & kNothingAdded) != 0 ? ~(step.row / kGroup) : step.row / kGroup;
    sums.rows = step.rows;
    sums.masked = step.flags & backward::kMasked;
    ptx::barrier_arrive_expect(ready, 3 * Config::kStepBytes + sizeof(sums.group_words) + (scaled ? sizeof(sums.unit) : 0));
    ptx::bulk_copy(stage.gradient_transposed, params.gradient_transposed + at, Config::kStepBytes, ready);
    ptx::bulk_copy(sums.group_words, rows.records + static_cast<std::int64_t>(step.row) / kGroup * Record::kBytes + Record::kWords,
                   sizeof(sums.group_words), ready);
    if constexpr (scaled) ptx::bulk_copy(sums.unit, rows.units + step.row, sizeof(sums.unit), ready);
    ptx::bulk_copy(stage.query16, params.query_rows16 + at, 2 * Config::kStepBytes, ready);
  }
};

}  // namespace flamia::sm90::ds16
