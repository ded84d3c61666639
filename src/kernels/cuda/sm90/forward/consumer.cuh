// SPDX-License-Identifier: Apache-2.0
// The consumer role: a warpgroup that owns 64 queries of every work item.
#pragma once
#include <cstdint>

#include "../../ptx/barrier.cuh"
#include "config.hpp"
#include "epilogue.cuh"
#include "exponents.cuh"
#include "row_reference_phase32.cuh"
#include "row_reference_tilesum.cuh"
#include "storage.hpp"
#include "tile_output.cuh"
#include "work.hpp"

namespace flamia::sm90::forward {

inline constexpr int kNoUnit = 1000;
inline constexpr int kFirstConsumerBarrier = 1;  // named barriers 1 ... kConsumers; 0 is __syncthreads

/// A consumer's place in the block and in its rings.
template <class Config>
struct Consumer {
  int index;   // 0 ... kConsumers - 1
  int thread;  // 0 ... 127
  int warp;    // 0 ... 3, uniform
  int lane;
  Ring<Config::kWorkSlots> work;
  Ring<Config::kQueryBuffers> query;
  Ring<Config::kStages> stage;

  /// One lane of every warp hands buffers back: a warp's own reads, of operands and of exponents, come before its own arrival.
  __device__ __forceinline__ bool elected() const { return lane == 0; }
};

/// Hands a stage back unread: only other warpgroups need it. One warp waits for it, so that nobody frees a stage that is not yet full, and
/// arrives for all; the warpgroup must meet again before another round of the ring (the next product does that, or leave_together).
template <class Config>
__device__ __forceinline__ void skip_tile(Storage<Config>& storage, Consumer<Config>& self) {
  if (self.warp == 0) {
    ptx::barrier_wait(&storage.key_ready[self.stage.slot], self.stage.parity);
    ptx::barrier_wait(&storage.value_ready[self.stage.slot], self.stage.parity);
    if (self.elected()) {
      ptx::barrier_arrive_many(&storage.key_free[self.stage.slot], kWarpsPerConsumer);
      ptx::barrier_arrive_many(&storage.value_free[self.stage.slot], kWarpsPerConsumer);
    }
    __syncwarp();
  }
  self.stage.advance();
}

template <class Config>
__device__ __forceinline__ void leave_together(const Consumer<Config>& self) {
  ptx::named_barrier_sync(kFirstConsumerBarrier + self.index, 128);
}

/// A row's state before its first tile. The queries have landed.
template <class Config>
__device__ __forceinline__ void begin_rows(RowState<Config>& state, Storage<Config>& storage, const Consumer<Config>& self) {
  const float* const scale =
      storage.query_scale[self.query.slot] + Config::kRowsPerConsumer * self.index + 16 * self.warp + self.lane / 4;
  storage.row_scale[128 * self.index + self.thread] = {scale[0], scale[8]};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    state.sum[half] = 0.0f;
    state.reference[half] = kNoReference;
  }
#pragma unroll
  for (int i = 0; i < Config::kOutputs; ++i) state.output[i] = 0.0f;
}

/// A is kept in units of 2^unit, the value exponent of the first key of the first tile visited (an earlier token of every row): then the
/// usual tile needs no scale at all. Kept near 0 so that no amplitude between 2^-70 and 2^60 can leave FP32's range.
template <class Config>
__device__ __forceinline__ int value_unit(const TileExponents<Config::kScaleEntries>& tile, const int4& header) {
  return clamp(header.y != 0 ? tile.value[0] : header.w, -40, 40);
}

/// Greatest value exponent that a row may know of a mixed tile.
template <class Config>
__device__ __forceinline__ int row_reach(const TileExponents<Config::kScaleEntries>& tile, const Item& item, int half,
                                         int first_key) {
  const int last = clamp(item.window.last_key(item.position(half), item.length) - first_key, 0, kKeyTile - 1);
  return tile.reach[Config::kScaleGroup == ScaleGroup::block ? last / kBlock : last];
}

/// What a tile is, known before its scores are.
template <class Config>
struct TileKind {
  ScoreFactors<Config> factors;
  int value_exponent;
  bool mixed_values, scaled_values;  // several value exponents; one or several, but not the unit
};

/// S of one tile with the row's mask. Everything that does not need the scores happens while they are being multiplied.
template <class Config>
__device__ __forceinline__ TileKind<Config> masked_scores(float (&scores)[Config::kScores], Storage<Config>& storage,
                                                          const Consumer<Config>& self, const Item& item, int first_key,
                                                          int& unit) {
  const std::uint32_t slot = self.stage.slot;
  const TileExponents<Config::kScaleEntries>& exponents = storage.exponents[slot];
  issue_scores<Config>(scores, item.query, ptx::descriptor_low(storage.key[slot], QueryOperand<Config>::kLayout));
  const int4 header = *reinterpret_cast<const int4*>(&exponents);
  TileKind<Config> kind;
  kind.factors = score_factors<Config>(exponents, storage.row_scale[ptx::thread_index() - 128], header);
  if (unit == kNoUnit) unit = __shfl_sync(kFullWarp, value_unit<Config>(exponents, header), 0);
  kind.value_exponent = header.w;
  kind.mixed_values = __any_sync(kFullWarp, header.y != 0);
  kind.scaled_values = __any_sync(kFullWarp, header.y != 0 || header.w != unit);
  const bool right_edge = first_key + kKeyTile - 1 > item.window.last_key(item.first_query, item.length);
  const bool left_edge = first_key < item.window.first_key(item.first_query + Config::kRowsPerConsumer - 1);
  const bool special = __any_sync(kFullWarp, header.x != 0 || right_edge || left_edge);
  ptx::barrier_wait(&storage.value_ready[slot], self.stage.parity);  // a wait in the product's shadow: nothing above sinks below it
  ptx::wait_products<0>();
  ptx::fence_registers(scores);
  if (special) {
    if (header.x != 0) {
      if constexpr (Config::kScaleGroup == ScaleGroup::block)
        flag_blocks<Config>(scores, kind.factors, exponents);
      else
        apply_key_factors<Config>(scores, exponents, self.lane);
    }
    if (right_edge || left_edge) keep_above_zero<Config>(kind.factors);
    if (right_edge) mask_after<Config>(scores, item, first_key, self.lane);
    if (left_edge) mask_before<Config>(scores, item, first_key, self.lane);
  }
  return kind;
}

/// Codes of a tile. In a tile of several value exponents also the row sums (otherwise PV's column of ones gives them), and the scales of
/// the partial O wherever they are not one; both are parked in shared memory.
template <class Config>
__device__ __forceinline__ void tile_codes(std::uint32_t (&codes)[kCodeWords], Storage<Config>& storage, std::uint32_t slot,
                                           const float (&scores)[Config::kScores], const TileKind<Config>& kind,
                                           const RowState<Config>& state, std::uint32_t value, const Item& item, int first_key,
                                           int unit) {
  constexpr float shift = kCodeShift<Config::kReference>;
  const float bias[2] = {shift - state.reference[0], shift - state.reference[1]};
  if (!kind.scaled_values) {
    make_codes<Config>(codes, scores, kind.factors, bias, state, item, first_key);
    return;
  }
  const int thread = ptx::thread_index() - 128;
  RowPair reach{kind.value_exponent, kind.value_exponent};
  if (kind.mixed_values) {
    const TileExponents<Config::kScaleEntries>& exponents = storage.exponents[slot];
    reach = {row_reach<Config>(exponents, item, 0, first_key), row_reach<Config>(exponents, item, 1, first_key)};
    float sums[4];
    make_folded_codes<Config>(codes, sums, value, scores, kind.factors, bias, state, item, first_key, exponents, reach,
                              thread % 32);
    ptx::wait_products<0>();
    ptx::fence_registers(sums);
    storage.mixed_sums[thread] = {sums[0], sums[2]};
  } else {
    make_codes<Config>(codes, scores, kind.factors, bias, state, item, first_key);
  }
  storage.value_scale[thread] = {power_of_two(clamp(reach.of(0) - unit, -126, 127)),
                                 power_of_two(clamp(reach.of(1) - unit, -126, 127))};
}

/// Before the codes: moves the references that must move. `again`: some row of the warpgroup was rejected, the tile is done once more.
/// `watched` (tile sums): tiles whose maxima are still looked at in advance.
template <class Config>
__device__ __forceinline__ void update_references(RowState<Config>& state, const float (&scores)[Config::kScores],
                                                  const ScoreFactors<Config>& factors, const Item& item, int first_key, bool again,
                                                  int& watched) {
  if constexpr (Config::kReference == RowReference::phase32) {
    raise_reference<Config>(state, scores, factors);
  } else {
    const bool fresh = __any_sync(kFullWarp, state.reference[0] == kNoReference || state.reference[1] == kNoReference);
    if (!again && !fresh && watched <= 0) return;
    float maximum[2];
    row_maxima<Config>(maximum, scores, factors);
    --watched;
    if (!again && !fresh && !nearly_rejected<Config>(state, maximum)) return;
    if (settle_references<Config>(state, scores, factors, item, first_key, maximum)) watched = kWatchedTiles;
  }
}

/// One key tile: S, softmax with the row reference, PV, promotion. With the tile-sum reference a rejected tile is done once more.
template <class Config>
__device__ __forceinline__ void attend_tile(Storage<Config>& storage, Consumer<Config>& self, RowState<Config>& state,
                                            const Item& item, int tile, int& unit, int& watched) {
  const std::uint32_t slot = self.stage.slot;
  const int first_key = tile * kKeyTile;
  const std::uint32_t value = ptx::descriptor_low(storage.value[slot], ValueOperand<Config>::kLayout);
  constexpr bool may_redo = Config::kReference == RowReference::tilesum;

  ptx::barrier_wait(&storage.key_ready[slot], self.stage.parity);
  float partial[Config::kPartials];
  bool scaled_values;
#pragma unroll 1
  for (int attempt = 0;; ++attempt) {
    float scores[Config::kScores];
    const TileKind<Config> kind = masked_scores<Config>(scores, storage, self, item, first_key, unit);
    scaled_values = kind.scaled_values;
    if (!may_redo && self.elected()) ptx::barrier_arrive(&storage.key_free[slot]);
    update_references<Config>(state, scores, kind.factors, item, first_key, attempt > 0, watched);

    std::uint32_t codes[kCodeWords];
    tile_codes<Config>(codes, storage, slot, scores, kind, state, value, item, first_key, unit);
    issue_output<Config>(partial, codes, value);
    ptx::wait_products<0>();
    ptx::fence_registers(partial);
    if (kind.mixed_values) {
      const float2 sums = storage.mixed_sums[ptx::thread_index() - 128];
      partial[Config::kOutputs] = sums.x;
      partial[Config::kOutputs + 2] = sums.y;
    }
    if (!may_redo || attempt > 0) break;
    const bool suspect = fmaxf(partial[Config::kOutputs], partial[Config::kOutputs + 2]) >= kSuspectSum;
    if (!__any_sync(kFullWarp, ptx::named_barrier_any(kFirstConsumerBarrier + self.index, 128, suspect))) break;
    watched = kWatchedTiles;
  }
  __syncwarp();
  if (self.elected()) {
    if (may_redo) ptx::barrier_arrive(&storage.key_free[slot]);
    ptx::barrier_arrive(&storage.value_free[slot]);
  }
  self.stage.advance();

  if (scaled_values) {
    const float2 scale = storage.value_scale[ptx::thread_index() - 128];
    promote_scaled<Config>(state, partial, {scale.x, scale.y});
  } else {
    promote<Config>(state, partial);
  }
  state.sum[0] += partial[Config::kOutputs];
  state.sum[1] += partial[Config::kOutputs + 2];
}

/// All key tiles of one work item for this warpgroup's 64 queries, from the highest down.
template <class Config>
__device__ __forceinline__ void attend(const ForwardParams& params, Storage<Config>& storage, Consumer<Config>& self,
                                       const Work& work) {
  const Window window{params.window_left, params.window_right};
  const int first_query = work.first + Config::kRowsPerConsumer * self.index;
  const TileRange all = tile_range(window, work.first, Config::kQueryTile, work.length);
  const TileRange own = tile_range(window, first_query, Config::kRowsPerConsumer, work.length);
  std::uint64_t* const query_free = &storage.query_free[self.query.slot];

  if (own.last < own.first) {  // the warpgroup's queries lie past the document's end
    if (self.warp == 0) {
      ptx::barrier_wait(&storage.query_ready[self.query.slot], self.query.parity);
      if (self.elected()) ptx::barrier_arrive_many(query_free, kWarpsPerConsumer);
    }
    for (int tile = all.last; tile >= all.first; --tile) skip_tile<Config>(storage, self);
    leave_together<Config>(self);
    return;
  }

  const std::uint8_t* const queries = storage.query[self.query.slot] + self.index * Config::kRowsPerConsumer * Config::kHeadDim;
  const Item item{ptx::descriptor_low(queries, QueryOperand<Config>::kLayout),
                  first_query,
                  work.length,
                  window,
                  &params,
                  work.head * params.slots + work.slot_start};
  int unit = kNoUnit;
  int watched = 0;

  for (int tile = all.last; tile > own.last; --tile) skip_tile<Config>(storage, self);
  ptx::barrier_wait(&storage.query_ready[self.query.slot], self.query.parity);
  RowState<Config> state;
  begin_rows<Config>(state, storage, self);
  for (int tile = own.last; tile >= own.first; --tile) attend_tile<Config>(storage, self, state, item, tile, unit, watched);
  if (self.elected()) ptx::barrier_arrive(query_free);
  store_rows<Config>(params, work, state, unit, first_query + 16 * self.warp, self.lane);
  if (own.first > all.first) {
    for (int tile = own.first - 1; tile >= all.first; --tile) skip_tile<Config>(storage, self);
    leave_together<Config>(self);
  }
}

template <class Config>
__device__ __forceinline__ void consume(const ForwardParams& params, Storage<Config>& storage, int index, int thread) {
  Consumer<Config> self{index, thread, __shfl_sync(kFullWarp, thread / 32, 0), thread % 32, {}, {}, {}};
  while (true) {
    ptx::barrier_wait(&storage.work_ready[self.work.slot], self.work.parity);
    Work work = storage.work[self.work.slot];
    __syncwarp();
    if (self.lane == 0) ptx::barrier_arrive(&storage.work_taken[self.work.slot]);
    self.work.advance();
    work.length = __shfl_sync(kFullWarp, work.length, 0);  // uniform for the compiler too: tile bounds stay in uniform registers
    work.first = __shfl_sync(kFullWarp, work.first, 0);
    if (work.length < 0) return;
    attend<Config>(params, storage, self, work);
    self.query.advance();
  }
}

}  // namespace flamia::sm90::forward
