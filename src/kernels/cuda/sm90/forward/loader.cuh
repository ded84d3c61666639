// SPDX-License-Identifier: Apache-2.0
// The roles of the loader warpgroup: the scheduler warp hands out work, the copy warp brings operands and exponents; where shared memory is short
// (NVFP4, d = 128) the query warp brings Q.
#pragma once
#include <cstdint>

#include "../../ptx/barrier.cuh"
#include "../../ptx/bulk_copy.cuh"
#include "../../ptx/grid.cuh"
#include "../../ptx/registers.cuh"
#include "block_exponents.cuh"
#include "config.hpp"
#include "exponents.cuh"
#include "storage.hpp"
#include "work.hpp"

namespace flamia::sm90::forward {

// Nanoseconds a waiting warp sleeps at most: a stage lasts about 1,500, an item many times that.
inline constexpr std::uint32_t kSleep = 2000;

/// Scheduler (one thread): turns a ticket into work when the copy warp asks for it, not before: a ticket held early is work that another
/// block could have begun.
template <class Config>
__device__ __forceinline__ void schedule(const ForwardParams& params, Storage<Config>& storage) {
  const auto items = static_cast<std::uint32_t>(*params.item_count);
  const std::uint32_t tickets = items * params.query_heads;
  const int group = params.query_heads / params.key_heads;
  Ring<Config::kWorkSlots> ring;
  bool more = true;
  for (bool first = true; more; first = false) {
    ptx::barrier_wait_asleep(&storage.work_taken[ring.slot], ring.parity ^ 1, kSleep);
    const std::uint32_t ticket = first ? blockIdx.x : gridDim.x + atomicAdd(params.counter, 1);
    more = ticket < tickets;
    Work work{};
    work.length = -1;
    if (more) {
      const Ticket decoded = decode_ticket(ticket, items, params.query_heads, params.heads_per_group);
      const WorkItem item = params.items[decoded.item];
      const Document document = params.documents[item.document];
      const int first_query = aligned_first(item.first, document.length, Config::kRowsPerConsumer, Config::kConsumers);
      work = {document.slot_start, document.token_start, document.length, first_query, decoded.head, decoded.head / group, {}};
    }
    storage.work[ring.slot] = work;
    ptx::barrier_arrive(&storage.work_ready[ring.slot]);
    ring.advance();
  }
  ptx::wait_for_previous_grid();  // it may still run: whoever waits for this kernel waits for it too
  // The last block to run out of tickets leaves the counter as it found it.
  if (atomicAdd(params.counter + 1, 1) == static_cast<int>(gridDim.x) - 1) {
    params.counter[0] = 0;
    params.counter[1] = 0;
  }
}

/// Where the copy warp stands in its rings.
template <class Config>
struct CopyState {
  Ring<Config::kWorkSlots> work;
  Ring<Config::kQueryBuffers> query;
  Ring<Config::kStages> stage;
};

template <class Config>
__device__ __forceinline__ void copy_queries(const ForwardParams& params, Storage<Config>& storage, CopyState<Config>& state,
                                             const Work& work, int lane) {
  constexpr int per_lane = Config::kQueryTile / 32, kRow = Config::kHeadDim * Config::kScoreBytes;
  const std::int64_t row = work.head * params.slots + work.slot_start + work.first;
  const int absent = max(0, -work.first);  // rows in front of the document: whole groups
  std::uint8_t exponents[per_lane];
#pragma unroll
  for (int i = 0; i < per_lane; ++i) exponents[i] = 32 * i < absent ? 0 : __ldg(params.query_exponents + row + 32 * i + lane);

  const std::uint32_t slot = state.query.slot;
  ptx::barrier_wait_asleep(&storage.query_free[slot], state.query.parity ^ 1, kSleep);
  if (ptx::elect_lane()) {
    ptx::bulk_copy(storage.query[slot] + absent * kRow, params.query_codes + (row + absent) * kRow,
                   Config::kQueryBytes - absent * kRow, &storage.query_ready[slot]);
  }
#pragma unroll
  for (int i = 0; i < per_lane; ++i) storage.query_scale[slot][32 * i + lane] = query_scale(params.softmax_scale, exponents[i]);
  if (lane == 0)  // every lane arrives for the scales that it wrote
    ptx::barrier_arrive_expect(&storage.query_ready[slot], Config::kQueryBytes - absent * kRow);
  else
    ptx::barrier_arrive(&storage.query_ready[slot]);
  __syncwarp();
  state.query.advance();
}

/// Whether the phase of this parity has completed, for every lane; unlike barrier_passed it does not wait a while first.
__device__ __forceinline__ bool all_passed_now(ptx::Barrier* barrier, std::uint32_t parity) {
  return __all_sync(kFullWarp, cuda::ptx::mbarrier_test_wait_parity(barrier, parity));
}

/// Query warp: each consumer's 64 queries for themselves, as soon as it has formed the last scores of its item before.
template <class Config>
__device__ __forceinline__ void copy_queries_apart(const ForwardParams& params, Storage<Config>& storage, int lane) {
  constexpr int kRow = Config::kHeadDim * Config::kScoreBytes, kBytes = Config::kRowsPerConsumer * kRow;
  constexpr int per_lane = Config::kRowsPerConsumer / 32;
  constexpr std::uint32_t kPause = 64;  // nanoseconds
  Ring<Config::kWorkSlots> ring;
  Ring<1> places;
  for (int turn = 0;; turn = turn == Config::kConsumers - 1 ? 0 : turn + 1) {
    ptx::barrier_wait_asleep(&storage.work_ready[ring.slot], ring.parity, kSleep);
    const Work work = storage.work[ring.slot];
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(&storage.work_taken[ring.slot]);
    ring.advance();
    if (work.length < 0) return;
    const std::int64_t row = work.head * params.slots + work.slot_start + work.first;
    std::uint32_t pending = (1u << Config::kConsumers) - 1;
    while (true) {
#pragma unroll 1
      for (int place = 0; place < Config::kConsumers; ++place) {
        if ((pending >> place & 1) == 0) continue;
        if (!all_passed_now(&storage.query_free[place], places.parity ^ 1)) continue;
        pending ^= 1u << place;
        const int group = place + turn < Config::kConsumers ? place + turn : place + turn - Config::kConsumers;
        const int first = Config::kRowsPerConsumer * group;
        const bool present = work.first + first >= 0;  // otherwise in front of the document, as a whole
        if (present && lane == 0)
          ptx::bulk_copy(storage.query[0] + place * kBytes, params.query_codes + (row + first) * kRow, kBytes,
                         &storage.query_ready[place]);
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
          const int byte = present ? __ldg(params.query_exponents + row + first + 32 * i + lane) : 0;
          storage.query_scale[0][Config::kRowsPerConsumer * place + 32 * i + lane] = query_scale(params.softmax_scale, byte);
        }
        if (present && lane == 0)  // every lane arrives for the scales that it wrote
          ptx::barrier_arrive_expect(&storage.query_ready[place], kBytes);
        else
          ptx::barrier_arrive(&storage.query_ready[place]);
      }
      if (pending == 0) break;
      __nanosleep(kPause);
    }
    places.advance();
  }
}

/// The tile's values: one copy a token group, for the ones between the groups stay. By one lane, and one that `elect_lane` chose: the compiler then
/// knows the addresses to be uniform. Given a lane a copy it loops over the lanes, nine instructions each.
template <class Config>
__device__ __forceinline__ void copy_values(const ForwardParams& params, Stage<Config>& stage, std::int64_t row) {
  if (ptx::elect_lane()) {
#pragma unroll
    for (int group = 0; group < Config::kTokenGroups; ++group)
      ptx::bulk_copy(stage.value + group * Config::kValueGroupStride,
                     params.value_codes + row * Config::kHeadDim + group * Config::kValueGroupBytes, Config::kValueGroupBytes,
                     &stage.ready);
  }
}

/// Exponent bytes of a tile, asked for early.
template <class Config>
__device__ __forceinline__ auto load_exponents(const ForwardParams& params, std::int64_t first_slot, int lane) {
  if constexpr (Config::kScaleGroup == ScaleGroup::block)
    return load_block_exponents(params.key_exponents, params.value_exponents, first_slot, lane);
  else
    return load_token_exponents(params.key_exponents, params.value_exponents, first_slot, lane);
}

/// The exponents are on their way from global memory while the copies are issued; the copy warp is slow beside the consumers, every instruction
/// of a tile counts.
template <class Config>
__device__ __forceinline__ void copy_tile(const ForwardParams& params, Storage<Config>& storage, CopyState<Config>& state,
                                          const Work& work, int tile, int lane) {
  Stage<Config>& stage = storage.stages[state.stage.slot];
  const std::int64_t row = work.key_head * params.slots + work.slot_start + static_cast<std::int64_t>(tile) * kKeyTile;
  const auto bytes = load_exponents<Config>(params, row, lane);
  constexpr std::uint32_t value_bytes = Config::kTokenGroups * Config::kValueGroupBytes;

  ptx::barrier_wait_asleep(&stage.free, state.stage.parity ^ 1, kSleep);
  if (ptx::elect_lane()) {
    ptx::bulk_copy(stage.key, params.key_codes + row * (Config::kHeadDim * Config::kScoreBytes), Config::kKeyBytes, &stage.ready);
  }
  copy_values<Config>(params, stage, row);
  const auto found = examine(bytes, work.length - tile * kKeyTile, lane);
  if constexpr (Config::kTokenBlocks) {
    set_ones<Config>(stage, found.blocks, lane);
    store_exponents<Config>(stage.exponents, found, lane);
  } else {
    int values = found.one_value ? 0 : Flags::kMixedValues;
    bool by_token = true;
    if constexpr (Config::kBiasFolds) {
      if (params.value_blocks) {
        const BlockShifts blocks = find_blocks(found, lane);
        set_ones<Config>(stage, blocks, lane);
        values = __shfl_sync(kFullWarp, blocks.values, 0);  // uniform for the compiler too
        if (values == Flags::kClose) {
          const Window window{params.window_left, params.window_right};
          by_token = !found.one_key || tile * kKeyTile + kKeyTile - 1 > window.last_key(max(work.first, 0), work.length);
        }
        store_shifts<Config>(stage, found, blocks, by_token, lane);
      }
    }
    if (__any_sync(kFullWarp, by_token)) store_exponents<Config>(stage.exponents, found, values, lane);
  }
  if (lane == 0)  // last of all, for the exponents: every lane that wrote some arrives for its own
    ptx::barrier_arrive_expect(&stage.ready, Config::kKeyBytes + value_bytes);
  else if (lane < Config::kExponentWriters)
    ptx::barrier_arrive(&stage.ready);
  __syncwarp();
  state.stage.advance();
}

/// Copy warp: per work item the queries, then its key tiles from the highest down. The slot of the item before is handed back to the scheduler, which then takes the next ticket, only near
/// the end of the running item.
template <class Config>
__device__ __forceinline__ void copy_operands(const ForwardParams& params, Storage<Config>& storage, int lane) {
  const Window window{params.window_left, params.window_right};
  CopyState<Config> state;
  for (bool first_item = true;; first_item = false) {
    const std::uint32_t slot = state.work.slot;
    ptx::barrier_wait_asleep(&storage.work_ready[slot], state.work.parity, kSleep);
    const Work work = uniform(storage.work[slot]);
    state.work.advance();
    if (work.length < 0) return;

    if constexpr (!Config::kLarge) copy_queries<Config>(params, storage, state, work, lane);
    const TileRange range = tile_range(window, work.first, Config::kQueryTile, work.length);
    const int ask_at = range.last - range.first < Config::kTilesAhead ? range.last : range.first + Config::kTilesAhead - 1;
    if (range.last < range.first && !first_item && lane == 0) ptx::barrier_arrive(&storage.work_taken[slot ^ 1]);
    for (int tile = range.last; tile >= range.first; --tile) {
      if (tile == ask_at && !first_item && lane == 0) ptx::barrier_arrive(&storage.work_taken[slot ^ 1]);
      copy_tile<Config>(params, storage, state, work, tile, lane);
    }
  }
}

}  // namespace flamia::sm90::forward
