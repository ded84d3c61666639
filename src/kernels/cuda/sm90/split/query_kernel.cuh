// SPDX-License-Identifier: Apache-2.0
// The kernel of dQ: a persistent block per multiprocessor, two consumer warpgroups and a copying thread. An item is a tile of 128 queries of a
// head; its steps are the tiles of 128 keys that these queries see.
#pragma once
#include "../../ptx/bulk_copy.cuh"
#include "frame.cuh"
#include "query_consumer.cuh"

namespace flamia::sm90::split {

/// The copying thread.
template <class Config>
__device__ __forceinline__ void copy_for_queries(const BackwardParams& params, QueryStorage<Config>& storage) {
  const Window window{params.window_left, params.window_right};
  const int group = params.query_heads / params.key_heads;
  Tickets tickets(params, params.query_heads, params.heads_per_group * group);
  Ring<Config::kQueryBuffers> queries;
  Ring<Config::kStages> stages;
  for (;; queries = queries.next()) {
    const Assignment next = tickets.take();
    QueryBuffer<Config>& buffer = storage.queries[queries.slot];
    std::uint64_t* const queries_ready = &storage.queries_ready[queries.slot];
    ptx::barrier_wait(&storage.queries_free[queries.slot], queries.parity ^ 1);
    if (next.head < 0) {
      buffer.work.length = -1;
      ptx::barrier_arrive(queries_ready);
      break;
    }
    const Document& document = next.document;
    const int first_query = mirrored_tile(next.first, document.length);
    const forward::TileRange range = forward::tile_range(window, first_query, Config::kQueryTile, document.length);
    buffer.work = {document.token_start, document.length, first_query, next.head, range.first, range.last - range.first + 1};
    const std::int64_t query_row = next.head * params.slots + document.slot_start + first_query;
    ptx::barrier_arrive_expect(queries_ready, 2 * Config::kQueryBytes + Config::kQueryRecordBytes);
    ptx::bulk_copy(buffer.records, static_cast<const std::uint8_t*>(params.row_records) + query_row / kGroup * kRowGroupBytes,
                   Config::kQueryRecordBytes, queries_ready);
    ptx::bulk_copy(buffer.query, params.query_rows + query_row * Config::kHeadDim, Config::kQueryBytes, queries_ready);
    ptx::bulk_copy(buffer.gradient, params.gradient_rows + query_row * Config::kHeadDim, Config::kQueryBytes, queries_ready);

    const std::int64_t document_row = next.head / group * params.slots + document.slot_start;
    for (int tile = range.first; tile <= range.last; ++tile, stages = stages.next()) {
      const std::int64_t row = document_row + static_cast<std::int64_t>(tile) * kKeyTile, at = row * Config::kHeadDim;
      KeyStage<Config>& stage = storage.stage[stages.slot];
      std::uint64_t* const ready = &storage.stage_ready[stages.slot];
      ptx::barrier_wait(&storage.stage_free[stages.slot], stages.parity ^ 1);
      ptx::barrier_arrive_expect(ready, 3 * Config::kKeyBytes + kTileRecordBytes);
      ptx::bulk_copy(stage.records, static_cast<const KeyRecord*>(params.key_records) + row, kTileRecordBytes, ready);
      ptx::bulk_copy(stage.key, params.key_rows + at, Config::kKeyBytes, ready);
      ptx::bulk_copy(stage.value, params.value_rows + at, Config::kKeyBytes, ready);
      ptx::bulk_copy(stage.key_transposed, params.key_transposed + at, Config::kKeyBytes, ready);
      if (range.last - tile < kStepsAhead) tickets.fetch();
    }
  }
  tickets.finish();
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    query_gradient_kernel(const __grid_constant__ BackwardParams params, GradientFormat format, bool rotated) {
  extern __shared__ std::uint8_t shared_memory[];
  auto& storage = storage_in<QueryStorage<Config>>(shared_memory);
  run_roles<Config>(
      [&] {
        initialise_ring(storage.queries_ready, storage.queries_free, Config::kConsumerWarps);
        initialise_ring(storage.stage_ready, storage.stage_free, Config::kConsumerWarps);
      },
      [&](int thread) {
        if (thread == 0) copy_for_queries<Config>(params, storage);
      },
      [&](int thread, int group) { consume_queries<Config>(params, storage, format, rotated, thread, group); });
}

}  // namespace flamia::sm90::split
