// SPDX-License-Identifier: Apache-2.0
// The kernel of dQ alone: a persistent block per multiprocessor, two consumer warpgroups and a copying thread. An item is a tile of 128 queries
// of a head; its steps are the 64 keys each that these queries see.
#pragma once
#include "../../ptx/bulk_copy.cuh"
#include "../split/frame.cuh"
#include "query_consumer.cuh"

namespace flamia::sm90::ds16 {

/// The copying thread.
template <class Config>
__device__ __forceinline__ void copy_for_queries(const BackwardParams& params, QueryStorage<Config>& storage) {
  using Record = typename Config::Record;
  constexpr int score_bytes = kScoreBytes<Config::kScaleGroup>;
  const Window window{params.window_left, params.window_right};
  const int group = params.query_heads / params.key_heads;
  const std::uint8_t* const records = row_arrays<Config::kScaleGroup>(params.row_records, params.slots, params.query_heads).records;
  split::Tickets tickets(params, params.query_heads, params.heads_per_group * group);
  split::Ring<Config::kQueryBuffers> queries;
  split::Ring<Config::kStages> stages;
  for (;; queries = queries.next()) {
    const split::Assignment next = tickets.take();
    QueryBuffer<Config>& buffer = storage.queries[queries.slot];
    std::uint64_t* const queries_ready = &storage.queries_ready[queries.slot];
    ptx::barrier_wait(&storage.queries_free[queries.slot], queries.parity ^ 1);
    if (next.head < 0) {
      buffer.work.length = -1;
      ptx::barrier_arrive(queries_ready);
      break;
    }
    const Document& document = next.document;
    const int first_query = split::mirrored_tile(next.first, document.length);
    buffer.work = {document.token_start, document.length, first_query, next.head};
    const std::int64_t query_row = next.head * params.slots + document.slot_start + first_query;
    ptx::barrier_arrive_expect(queries_ready, Config::kScoreQueryBytes + Config::kQueryBytes + Config::kRecordBytes);
    ptx::bulk_copy(buffer.records, records + query_row / kGroup * Record::kBytes, Config::kRecordBytes, queries_ready);
    ptx::bulk_copy(buffer.query, params.query_rows + query_row * Config::kHeadDim * score_bytes, Config::kScoreQueryBytes,
                   queries_ready);
    ptx::bulk_copy(buffer.gradient, params.gradient_rows + query_row * Config::kHeadDim, Config::kQueryBytes, queries_ready);

    const TileRange steps = steps_of_keys(window, first_query, Config::kQueryTile, document.length);
    const std::int64_t document_row = next.head / group * params.slots + document.slot_start;
    for (int step = steps.first; step <= steps.last; ++step, stages = stages.next()) {
      const std::int64_t row = document_row + static_cast<std::int64_t>(step) * kKeyStep, at = row * Config::kHeadDim;
      KeyStage<Config>& stage = storage.stage[stages.slot];
      std::uint64_t* const ready = &storage.stage_ready[stages.slot];
      ptx::barrier_wait(&storage.stage_free[stages.slot], stages.parity ^ 1);
      ptx::barrier_arrive_expect(ready, Config::kScoreStepBytes + 3 * Config::kStepBytes + Config::kFactorBytes);
      ptx::bulk_copy(stage.key, params.key_rows + at * score_bytes, Config::kScoreStepBytes, ready);
      ptx::bulk_copy(stage.factors, static_cast<const KeyFactors*>(params.key_records) + row, Config::kFactorBytes, ready);
      ptx::bulk_copy(stage.value, params.value_rows + at, Config::kStepBytes, ready);
      ptx::bulk_copy(stage.key16, params.key_rows16 + at, 2 * Config::kStepBytes, ready);
      if (steps.last - step < split::kStepsAhead) tickets.fetch();
    }
  }
  tickets.finish();
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    query_gradient_kernel(const __grid_constant__ BackwardParams params, GradientFormat format, bool rotated) {
  extern __shared__ __align__(1024) std::uint8_t shared_memory[];
  auto& storage = *reinterpret_cast<QueryStorage<Config>*>(shared_memory);
  split::run_roles<Config>(
      [&] {
        split::initialise_ring(storage.queries_ready, storage.queries_free, Config::kConsumerWarps);
        split::initialise_ring(storage.stage_ready, storage.stage_free, Config::kConsumerWarps);
      },
      [&](int thread) {
        if (thread == 0) copy_for_queries<Config>(params, storage);
      },
      [&](int, int group) { consume_queries<Config>(params, storage, format, rotated, group); });
}

}  // namespace flamia::sm90::ds16
