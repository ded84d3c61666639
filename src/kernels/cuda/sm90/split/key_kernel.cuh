// SPDX-License-Identifier: Apache-2.0
// The kernel of dK and dV: a persistent block per multiprocessor, two consumer warpgroups and a copying thread. An item is a tile of 128 keys of
// a key head; its steps are 64 queries each, of the query heads of the group one after the other.
#pragma once
#include "../../ptx/bulk_copy.cuh"
#include "frame.cuh"
#include "key_consumer.cuh"
#include "tickets.cuh"

namespace flamia::sm90::split {

/// The copying thread.
template <class Config>
__device__ __forceinline__ void copy_for_keys(const BackwardParams& params, KeyStorage<Config>& storage) {
  const Window window{params.window_left, params.window_right};
  const int group = params.query_heads / params.key_heads;
  Tickets tickets(params, params.key_heads, params.heads_per_group);
  Ring<Config::kKeyBuffers> keys;
  Ring<Config::kStages> stages;
  for (;; keys = keys.next()) {
    const Assignment next = tickets.take();
    KeyBuffer<Config>& buffer = storage.keys[keys.slot];
    std::uint64_t* const keys_ready = &storage.keys_ready[keys.slot];
    ptx::barrier_wait(&storage.keys_free[keys.slot], keys.parity ^ 1);
    if (next.head < 0) {
      buffer.work.steps = -1;
      ptx::barrier_arrive(keys_ready);
      break;
    }
    const Document& document = next.document;
    const StepRange steps = step_range(window, next.first, document.length);
    const int total = steps.count * group;
    buffer.work = {document.slot_start, document.token_start, document.length, next.first, next.head, total};
    const std::int64_t key_row = next.head * params.slots + document.slot_start + next.first;
    ptx::barrier_arrive_expect(keys_ready, 2 * Config::kKeyBytes + kTileRecordBytes);
    ptx::bulk_copy(buffer.records, static_cast<const KeyRecord*>(params.key_records) + key_row, kTileRecordBytes, keys_ready);
    ptx::bulk_copy(buffer.key, params.key_rows + key_row * Config::kHeadDim, Config::kKeyBytes, keys_ready);
    ptx::bulk_copy(buffer.value, params.value_rows + key_row * Config::kHeadDim, Config::kKeyBytes, keys_ready);

    int head = next.head * group, block = 0;
    for (int step = 0; step < total; ++step, stages = stages.next()) {
      const int query = (steps.first + block) * kQueryStep;
      const std::int64_t row = head * params.slots + document.slot_start + query;
      const std::int64_t at = row * Config::kHeadDim;
      QueryStage<Config>& stage = storage.stage[stages.slot];
      std::uint64_t* const ready = &storage.stage_ready[stages.slot];
      ptx::barrier_wait(&storage.stage_free[stages.slot], stages.parity ^ 1);
      stage.query_position = query;
      stage.flags = step_flags(window, query, next.first, document.length);
      stage.head = head;
      ptx::barrier_arrive_expect(ready, 4 * Config::kStepBytes + kStepRecordBytes);
      ptx::bulk_copy(stage.records, static_cast<const std::uint8_t*>(params.row_records) + row / kGroup * kRowGroupBytes,
                     kStepRecordBytes, ready);
      ptx::bulk_copy(stage.query, params.query_rows + at, Config::kStepBytes, ready);
      ptx::bulk_copy(stage.gradient, params.gradient_rows + at, Config::kStepBytes, ready);
      ptx::bulk_copy(stage.gradient_transposed, params.gradient_transposed + at, Config::kStepBytes, ready);
      ptx::bulk_copy(stage.query_transposed, params.query_transposed + at, Config::kStepBytes, ready);
      if (++block == steps.count) block = 0, ++head;
      if (total - step <= kStepsAhead) tickets.fetch();
    }
  }
  tickets.finish();
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    key_gradients_kernel(const __grid_constant__ BackwardParams params, GradientFormat format, bool rotated) {
  extern __shared__ std::uint8_t shared_memory[];
  auto& storage = storage_in<KeyStorage<Config>>(shared_memory);
  run_roles<Config>(
      [&] {
        initialise_ring(storage.keys_ready, storage.keys_free, Config::kConsumerWarps);
        initialise_ring(storage.stage_ready, storage.stage_free, Config::kConsumerWarps);
      },
      [&](int thread) {
        if (thread == 0) copy_for_keys<Config>(params, storage);
      },
      [&](int thread, int group) { consume_keys<Config>(params, storage, format, rotated, thread, group); });
}

}  // namespace flamia::sm90::split
