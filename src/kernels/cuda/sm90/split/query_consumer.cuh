// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup of the dQ kernel: 64 queries of the item, whose dQ it sums in registers over all key tiles.
//
// Three products a tile pass through two sets of 64 registers, X and Y:
//
//   X   | next dP ................................................ |
//   Y   dS                     | dQ of the tile .. | next S ...... | dS in place
//       exponents, payload       (wait)   promote    (wait)        exp2, dS
//
// What waits lets the other warpgroup work. The loop's back edge lies where no product is in flight.
#pragma once
#include <cstdint>

#include "../backward/rows_out.cuh"
#include "query_tile.cuh"
#include "tickets.cuh"

namespace flamia::sm90::split {

template <class Config>
struct QueryConsumer {
  const BackwardParams& params;
  QueryStorage<Config>& storage;
  int group;               // of the two warpgroups
  std::uint32_t buffer;    // of Q and dO'
  std::uint32_t row;       // shared address of the records of the thread's first query
  std::uint32_t key_byte;  // where the record of the thread's first key lies in a tile's

  __device__ __forceinline__ Window window() const { return {params.window_left, params.window_right}; }
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ const QueryWork& work() const { return storage.queries[buffer].work; }
  /// Position of the thread's first query; the second is 8 on.
  __device__ __forceinline__ int first_row() const {
    return work().first_query + group * Config::kRowsPerConsumer + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane() / 4;
  }
  __device__ __forceinline__ std::uint32_t rows_of(const std::uint8_t* first_buffer) const {
    return ptx::descriptor_low(first_buffer + group * Config::kRowsPerConsumer * Config::kHeadDim, RowsOperand<Config>::kLayout) +
           buffer * static_cast<std::uint32_t>(sizeof(QueryBuffer<Config>) >> 4);
  }
  __device__ __forceinline__ std::uint32_t queries() const { return rows_of(storage.queries[0].query); }
  __device__ __forceinline__ std::uint32_t gradients() const { return rows_of(storage.queries[0].gradient); }
  static __device__ __forceinline__ std::uint32_t stage_words(std::uint32_t slot) {
    return slot * static_cast<std::uint32_t>(sizeof(KeyStage<Config>) >> 4);
  }
  __device__ __forceinline__ std::uint32_t keys(std::uint32_t slot) const {
    return ptx::descriptor_low(storage.stage[0].key, RowsOperand<Config>::kLayout) + stage_words(slot);
  }
  __device__ __forceinline__ std::uint32_t values(std::uint32_t slot) const {
    return ptx::descriptor_low(storage.stage[0].value, RowsOperand<Config>::kLayout) + stage_words(slot);
  }
  __device__ __forceinline__ std::uint32_t keys_transposed(std::uint32_t slot) const {
    return ptx::descriptor_low(storage.stage[0].key_transposed, TransposedOperand<Config>::kLayout) + stage_words(slot);
  }
  __device__ __forceinline__ std::uint32_t records(std::uint32_t slot) const {
    return ptx::shared_address(storage.stage[0].records) + slot * static_cast<std::uint32_t>(sizeof(KeyStage<Config>));
  }

  /// The tiles, by their first keys, of which every one of the warpgroup's queries sees every key.
  struct FreeTiles {
    int first, last;
  };
  __device__ __forceinline__ FreeTiles free_tiles() const {
    constexpr int far = 1 << 30;
    const int first_query = work().first_query + group * Config::kRowsPerConsumer;
    const int first = params.window_left < 0 ? 0 : first_query + Config::kRowsPerConsumer - 1 - params.window_left;
    const int reach = params.window_right < 0 ? far : first_query + min(params.window_right, far) - kKeyTile + 1;
    return {__shfl_sync(kFullWarp, first, 0), __shfl_sync(kFullWarp, min(work().length - kKeyTile, reach), 0)};
  }

  /// dS of a tile whose scores are in Y and whose dP is in X; in a mixed tile times the keys' lifted 2^eK.
  __device__ __forceinline__ void finish_gradient(TileRegisters<Config>& tile, const RowFactors& rows, KeyFactors<Config>& factors,
                                                  std::uint32_t slot, int first_key, FreeTiles free) const {
    if (factors.mixed) {
      multiply_by_keys<false>(tile.y, records(slot) + key_byte, kSlopeAt);
      multiply_by_keys<false>(tile.x, records(slot) + key_byte, kValueAt);
    }
    if (first_key < free.first || first_key > free.last) {
      const VisibleKeys visible = visible_keys(window(), first_row(), first_key, work().length, lane());
      make_tile_gradient<Config, true>(tile.x, tile.y, rows, factors, visible);
    } else {
      make_tile_gradient<Config, false>(tile.x, tile.y, rows, factors, VisibleKeys{});
    }
    if (factors.mixed) {
      multiply_by_keys<true>(tile.y, records(slot) + key_byte, kSlopeAt);
      factors.slope[0] = 1.0f / kLifted;
    }
  }

  /// dS of an item's first tile.
  __device__ __forceinline__ void begin(TileRegisters<Config>& tile, const RowFactors& rows, KeyFactors<Config>& factors,
                                        Ring<Config::kStages> now, int first_key, FreeTiles free) const {
    ptx::barrier_wait(&storage.stage_ready[now.slot], now.parity);
    ptx::fence_registers(tile.x);
    ptx::fence_registers(tile.y);
    issue_tile<Config>(tile.x, gradients(), values(now.slot));
    issue_tile<Config>(tile.y, queries(), keys(now.slot));
    factors = load_factors<Config>(records(now.slot));
    ptx::wait_products<0>();
    ptx::fence_registers(tile.x);
    ptx::fence_registers(tile.y);
    finish_gradient(tile, rows, factors, now.slot, first_key, free);
  }

  /// The rest of a tile, whose dS is in Y, and, if there is one, the beginning of the next.
  template <bool kMore>
  __device__ __forceinline__ void step(float (&sum)[Config::kSums], TileRegisters<Config>& tile, const RowFactors& rows,
                                       KeyFactors<Config>& factors, Ring<Config::kStages> now, int first_key,
                                       FreeTiles free) const {
    auto& part = tile.part();
    const Ring<Config::kStages> after = now.next();
    if constexpr (kMore) {
      ptx::barrier_wait(&storage.stage_ready[after.slot], after.parity);
      ptx::fence_registers(tile.x);
      issue_tile<Config>(tile.x, gradients(), values(after.slot));
    }
    const int exponents = payload_exponents<Config>(tile.y, factors);
    std::uint32_t codes[kPayloadWords];
    round_payload<Config>(codes, tile.y, exponents, factors);
    ptx::fence_registers(part);
    issue_query_gradient<Config>(part, codes, keys_transposed(now.slot));
    if constexpr (kMore) factors = load_factors<Config>(records(after.slot));
    ptx::wait_products<0>();
    ptx::fence_registers(tile.x);
    ptx::fence_registers(part);
    ptx::hold_operand(codes);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(&storage.stage_free[now.slot]);
    promote_tile(sum, part, exponents);
    if constexpr (kMore) {
      ptx::fence_registers(tile.y);
      issue_tile<Config>(tile.y, queries(), keys(after.slot));
      ptx::wait_products<0>();
      ptx::fence_registers(tile.y);
      finish_gradient(tile, rows, factors, after.slot, first_key + kKeyTile, free);
    }
  }

  /// dQ leaves; Q and dO' may be overwritten.
  __device__ __forceinline__ void write(float (&sum)[Config::kSums], GradientFormat format, bool rotated) const {
    const int query = first_row();
    const bool valid[2] = {query < work().length, query + 8 < work().length};
    const std::int64_t stride = static_cast<std::int64_t>(params.query_heads) * Config::kHeadDim;
    const std::int64_t at = (static_cast<std::int64_t>(work().token_start) + query) * stride +
                            static_cast<std::int64_t>(work().head) * Config::kHeadDim;
    float unit[2];
    load_rows(unit, row, kDqUnit);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(&storage.queries_free[buffer]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int whole = __float_as_int(unit[half]);
      unit[half] = power_of_two(clamp(whole - carried_unit(whole), -126, 126));
    }
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) sum[i] *= unit[i / 2 % 2];
    const float factor[2] = {params.softmax_scale, params.softmax_scale};
    write_turned_back<Config::kHeadDim>(params.d_query, format, at, 8 * stride, sum, factor, rotated, valid, lane());
  }
};

/// All items of the block. Both warpgroups run the same code: two copies of it would not fit the instruction cache.
template <class Config>
__device__ __forceinline__ void consume_queries(const BackwardParams& params, QueryStorage<Config>& storage, GradientFormat format,
                                                bool rotated, int thread, int group) {
  const int warp = __shfl_sync(kFullWarp, thread / 32, 0), lane = thread % 32;
  QueryConsumer<Config> consumer{params, storage, group, 0, 0, static_cast<std::uint32_t>(lane % 4 * 2 * kKeyRecordBytes)};
  const std::uint32_t row = ptx::shared_address(storage.queries[0].records) +
                            (group * (Config::kRowsPerConsumer / kGroup) + warp) * kRowGroupBytes + pi_column(lane / 4) * 4;
  float sum[Config::kSums];
  TileRegisters<Config> tile;
  Ring<Config::kStages> now;
  for (Ring<Config::kQueryBuffers> buffer;; buffer = buffer.next()) {
    ptx::barrier_wait(&storage.queries_ready[buffer.slot], buffer.parity);
    const QueryWork& work = storage.queries[buffer.slot].work;
    if (__shfl_sync(kFullWarp, work.length, 0) < 0) return;
    consumer.buffer = buffer.slot;
    consumer.row = row + buffer.slot * static_cast<std::uint32_t>(sizeof(QueryBuffer<Config>));
    int first_key = __shfl_sync(kFullWarp, work.first_tile, 0) * kKeyTile;
    const int last = first_key + (__shfl_sync(kFullWarp, work.tiles, 0) - 1) * kKeyTile;
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) sum[i] = 0.0f;
    const RowFactors rows = load_row_factors(consumer.row);
    const auto free = consumer.free_tiles();
    KeyFactors<Config> factors;
    consumer.begin(tile, rows, factors, now, first_key, free);
#pragma unroll 1
    for (; first_key != last; first_key += kKeyTile, now = now.next())
      consumer.template step<true>(sum, tile, rows, factors, now, first_key, free);
    consumer.template step<false>(sum, tile, rows, factors, now, first_key, free);
    now = now.next();
    consumer.write(sum, format, rotated);
  }
}

}  // namespace flamia::sm90::split
