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

inline constexpr int kFirstConsumerBarrier = 1;  // named barriers 1 ... kConsumers; 0 is __syncthreads

/// A consumer's place in the block and in its rings.
template <class Config>
struct Consumer {
  int index;   // 0 ... kConsumers - 1
  int group;   // which 64 queries of the item: changes from item to item, for the last 64 have the most tiles
  int thread;  // 0 ... 127
  int warp;    // 0 ... 3, uniform
  int lane;
  std::uint32_t row;  // where the scales of its rows are parked
  Ring<Config::kWorkSlots> work;
  Ring<Config::kQueryBuffers> query;
  Ring<Config::kStages> stage;

  /// Which third of the queries' buffer is its own, and which barriers tell of it.
  __device__ __forceinline__ int third() const { return Config::kLarge ? index : group; }
  __device__ __forceinline__ std::uint32_t query_barrier() const {
    return Config::kLarge ? static_cast<std::uint32_t>(index) : query.slot;
  }

  /// One lane of every warp hands buffers back: a warp's own reads, of operands and of exponents, come before its own arrival.
  __device__ __forceinline__ bool elected() const { return lane == 0; }
};

/// Hands a stage back unread: only other warpgroups need it. One warp waits for it, so that nobody frees a stage that is not yet full, and
/// arrives for all; the warpgroup must meet again before another round of the ring (the next product does that, or leave_together).
template <class Config>
__device__ __forceinline__ void skip_tile(Storage<Config>& storage, Consumer<Config>& self) {
  if (self.warp == 0) {
    ptx::barrier_wait(&storage.tile_ready[self.stage.slot], self.stage.parity);
    if (self.elected()) ptx::barrier_arrive_many(&storage.tile_free[self.stage.slot], kWarpsPerConsumer);
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
      storage.query_scale[self.query.slot] + Config::kRowsPerConsumer * self.third() + 16 * self.warp + self.lane / 4;
  constexpr float sign = Config::kReference == RowReference::tilesum ? -1.0f : 1.0f;  // is_careful
  storage.row_scale[128 * self.index + self.thread] = {copysignf(scale[0], sign), copysignf(scale[8], sign)};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    state.sum[half] = 0.0f;
    state.reference[half] = kNoReference;
  }
#pragma unroll
  for (int i = 0; i < Config::kOutputs; ++i) state.output[i] = 0.0f;
}

/// A is kept in units of 2^unit, the greatest value exponent of the first tile visited: then the usual tile needs no scale at all. A power of
/// two changes no bit of A, so that a later token's exponent may be meant; but where it is far above that of the tile's first key, which
/// every row sees, the latter counts: no amplitude between 2^-70 and 2^60 may leave FP32's range.
template <class Config>
__device__ __forceinline__ int value_unit(const TileExponents<Config::kScaleEntries>& tile) {
  const int4 header = ptx::load_shared_int4(ptx::shared_address(&tile));
  const int word = ptx::load_shared_int(ptx::shared_address(tile.value));  // per token: written where values are mixed
  const int of_first_key = Config::kTokenBlocks ? header.w + __float2int_rn(__int_as_float(word)) : (word >> 23) - kExponentBias;
  const int first = Config::kTokenBlocks || header.y != 0 ? of_first_key : header.w;
  return clamp(header.w - first <= 8 ? header.w : first, -40, 40);
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
  bool usual;                        // one value exponent, the unit
  int mixed_values, value_exponent;  // of the tile's exponents; uniform
  bool careful;                      // some row of the warp is (phase32: always)
};

/// S of one tile with the row's mask. Everything that does not need the scores happens while they are being multiplied: the loads are such
/// that the compiler cannot put them between the products.
template <class Config>
__device__ __forceinline__ TileKind<Config> masked_scores(float (&scores)[Config::kScores], Storage<Config>& storage,
                                                          const Consumer<Config>& self, const Item& item, int first_key, int unit) {
  const std::uint32_t slot = self.stage.slot;
  const TileExponents<Config::kScaleEntries>& exponents = storage.exponents[slot];
  issue_scores<Config>(scores, item.query, ptx::descriptor_low(storage.key[slot], QueryOperand<Config>::kLayout));
  if (first_key < 0) ptx::mark();  // no load below moves up between the products
  const int4 header = ptx::load_shared_int4(ptx::shared_address(&exponents));
  const float2 row = ptx::load_shared_float2(self.row);
  TileKind<Config> kind;
  kind.factors = score_factors<Config>(exponents, row, header);
  kind.careful = Config::kReference == RowReference::phase32 || __any_sync(kFullWarp, is_careful(row.x) | is_careful(row.y));
  kind.value_exponent = __shfl_sync(kFullWarp, header.w, 0);
  const bool right_edge = first_key + kKeyTile - 1 > item.last_common;
  kind.mixed_values = __shfl_sync(kFullWarp, Config::kTokenBlocks && !right_edge ? header.y & Values::kMixed : header.y, 0);
  kind.usual = !__any_sync(kFullWarp, (kind.mixed_values | (header.w ^ unit)) != 0);
  const bool left_edge = first_key < item.first_common;
  const bool special = __any_sync(kFullWarp, header.x != 0 || right_edge || left_edge);
  if (special) ptx::mark();  // no vote sinks below the wait
  ptx::wait_products<0>();
  ptx::fence_registers(scores);
  if (special) {
    if (__any_sync(kFullWarp, header.x != 0)) {
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

/// Codes of a tile. In a tile of several value exponents also the row sums (otherwise PV's column of ones gives them). Those, and scales of
/// the partial O that are not one, are parked in shared memory. Returns whether there are such.
template <class Config>
__device__ __forceinline__ bool tile_codes(std::uint32_t (&codes)[kCodeWords], Storage<Config>& storage,
                                           const Consumer<Config>& self, std::uint32_t slot, const float (&scores)[Config::kScores],
                                           const TileKind<Config>& kind, const float (&bias)[2], const RowState<Config>& state,
                                           std::uint32_t value, const Item& item, int first_key, int unit) {
  if (kind.usual) {
    make_codes<Config>(codes, scores, kind.factors, bias, first_key);
    if constexpr (Config::kRecordCodes) record_unfolded<Config>(scores, kind.factors, bias, state, item, first_key);
    return false;
  }
  const TileExponents<Config::kScaleEntries>& exponents = storage.exponents[slot];
  const bool right_edge = first_key + kKeyTile - 1 > item.last_common;
  RowPair reach{kind.value_exponent, kind.value_exponent};
  if (kind.mixed_values != 0) {
    if (right_edge) {
      reach = {row_reach<Config>(exponents, item, 0, first_key), row_reach<Config>(exponents, item, 1, first_key)};
    }
    float sums[4];
    if constexpr (Config::kScaleGroup == ScaleGroup::block) {
      make_block_folded_codes<Config>(codes, sums, ptx::descriptor_low(storage.ones, OnesOperand<Config>::kLayout), scores,
                                      kind.factors, bias, state, item, first_key, exponents, reach, kind.value_exponent);
    } else {
      make_token_folded_codes<Config>(codes, sums, value + (Config::kValueGroupBytes >> 4), scores, kind.factors, bias, state, item,
                                      first_key, exponents, reach, ptx::thread_index() % 32);
    }
    ptx::store_shared_float2(self.row + Parked<Config>::kMixedSums, {sums[0], sums[2]});
  } else {
    make_codes<Config>(codes, scores, kind.factors, bias, first_key);
    if constexpr (Config::kRecordCodes) record_unfolded<Config>(scores, kind.factors, bias, state, item, first_key);
  }
  ptx::store_shared_float2(self.row + Parked<Config>::kValueScale, {power_of_two(clamp(reach.of(0) - unit, -126, 127)),
                                                                    power_of_two(clamp(reach.of(1) - unit, -126, 127))});
  return kind.value_exponent != unit || (kind.mixed_values != 0 && right_edge);
}

/// One key tile: S, softmax with the row reference, PV, promotion. Returns whether it counts: with the tile-sum reference a rejected tile
/// is done once more. (The caller's loop does that: a loop in here would make the compiler compute V's descriptors before it issues S.)
template <class Config>
__device__ __forceinline__ bool attend_tile(Storage<Config>& storage, Consumer<Config>& self, RowState<Config>& state,
                                            const Item& item, int tile, int last_visited, int unit) {
  const std::uint32_t slot = self.stage.slot;
  const int first_key = tile * kKeyTile;
  constexpr bool may_redo = Config::kReference == RowReference::tilesum;

  float scores[Config::kScores];
  TileKind<Config> kind = masked_scores<Config>(scores, storage, self, item, first_key, unit);
  float bias[2] = {kCodeShift - state.reference[0], kCodeShift - state.reference[1]};
  if (kind.careful) {
    raise_reference<Config>(state, scores, kind.factors, &storage.row_scale[ptx::thread_index() - 128]);
    bias[0] = kCodeShift - state.reference[0];
    bias[1] = kCodeShift - state.reference[1];
    if (__any_sync(kFullWarp, off_grid(state.reference[0]) | off_grid(state.reference[1]))) {
      round_scores<Config>(scores, kind.factors, bias, state);
    }
  }

  const std::uint32_t value = ptx::descriptor_low(storage.value[slot], ValueOperand<Config>::kLayout);
  std::uint32_t codes[kCodeWords];
  bool scaled_values = tile_codes<Config>(codes, storage, self, slot, scores, kind, bias, state, value, item, first_key, unit);
  Partial partial;
  issue_output<Config>(partial, codes, value);
  Ring<Config::kStages> next = self.stage;
  next.advance();
  const bool ready = ptx::barrier_passed(&storage.tile_ready[next.slot], next.parity);  // asked early: the answer takes long
  ptx::wait_products<may_redo && kTwoProducts<Config> ? 1 : 0>();
  ptx::fence_registers(partial.last);
  float sum[2] = {partial.last[kChannels / 2], partial.last[kChannels / 2 + 2]};
  if (!kind.usual && kind.mixed_values != 0) {
    const float2 sums = ptx::load_shared_float2(self.row + Parked<Config>::kMixedSums);
    sum[0] = sums.x;
    sum[1] = sums.y;
  }
  if constexpr (may_redo) {
    bool mine = fmaxf(sum[0], sum[1]) >= kRejectedSum;
    if (kind.careful) mine = __any_sync(kFullWarp, rejected(&storage.row_scale[ptx::thread_index() - 128], sum[0], sum[1]));
    const bool again = __any_sync(kFullWarp, ptx::named_barrier_any(kFirstConsumerBarrier + self.index, 128, mine));
    ptx::wait_products<0>();
    if (again) {
      become_careful(&storage.row_scale[ptx::thread_index() - 128], sum[0], sum[1]);
      return false;
    }
    if (kind.careful & may_free(first_key, item.last_common - first_key)) {
      scaled_values =
          free_rows<Config>(state, sum[0], sum[1], item, first_key, scaled_values, &storage.value_scale[ptx::thread_index() - 128],
                            &storage.row_scale[ptx::thread_index() - 128]);
    }
  }
  ptx::fence_registers(partial.first);
  __syncwarp();
  if (self.elected()) ptx::barrier_arrive(&storage.tile_free[slot]);
  if constexpr (Config::kLarge) {  // the next queries come while the rows leave
    if (tile == last_visited && self.elected()) ptx::barrier_arrive(&storage.query_free[self.index]);
  }
  self.stage = next;

  if (scaled_values) {
    const float2 scale = ptx::load_shared_float2(self.row + Parked<Config>::kValueScale);
    promote_scaled<Config>(state, partial, {scale.x, scale.y});
  } else {
    promote<Config>(state, partial);
  }
  state.sum[0] += sum[0];
  state.sum[1] += sum[1];
  if (!ready & (tile > last_visited)) ptx::barrier_wait(&storage.tile_ready[next.slot], next.parity);
  return true;
}

/// All key tiles of one work item for this warpgroup's 64 queries, from the highest down.
template <class Config>
__device__ __forceinline__ void attend(const ForwardParams& params, Storage<Config>& storage, Consumer<Config>& self,
                                       const Work& work) {
  const Window window{params.window_left, params.window_right};
  const int first_query = work.first + Config::kRowsPerConsumer * self.group;
  const TileRange all = tile_range(window, work.first, Config::kQueryTile, work.length);
  const TileRange own =  // in front of the document counts as behind it: nothing
      tile_range(window, first_query < 0 ? work.length : first_query, Config::kRowsPerConsumer, work.length);
  std::uint64_t* const query_ready = &storage.query_ready[self.query_barrier()];
  std::uint64_t* const query_free = &storage.query_free[self.query_barrier()];

  if (own.last < own.first) {  // the warpgroup's queries lie outside the document
    if (self.warp == 0) {
      ptx::barrier_wait(query_ready, self.query.parity);
      if (self.elected()) ptx::barrier_arrive_many(query_free, kWarpsPerConsumer);
    }
    for (int tile = all.last; tile >= all.first; --tile) skip_tile<Config>(storage, self);
    leave_together<Config>(self);
    return;
  }

  std::uint8_t* const queries =
      storage.query[self.query.slot] + self.third() * (Config::kRowsPerConsumer * Config::kHeadDim * Config::kScoreBytes);
  const Item item{ptx::descriptor_low(queries, QueryOperand<Config>::kLayout),
                  first_query,
                  work.length,
                  __shfl_sync(kFullWarp, window.first_key(first_query + Config::kRowsPerConsumer - 1), 0),
                  __shfl_sync(kFullWarp, window.last_key(first_query, work.length), 0),
                  window,
                  &params,
                  work.head * params.slots + work.slot_start};

  for (int tile = all.last; tile > own.last; --tile) skip_tile<Config>(storage, self);
  ptx::barrier_wait(query_ready, self.query.parity);
  RowState<Config> state;
  begin_rows<Config>(state, storage, self);
  ptx::barrier_wait(&storage.tile_ready[self.stage.slot], self.stage.parity);
  const int unit = __shfl_sync(kFullWarp, value_unit<Config>(storage.exponents[self.stage.slot]), 0);
  int tile = own.last;
#pragma unroll 1
  while (tile >= own.first) {
    if (attend_tile<Config>(storage, self, state, item, tile, own.first, unit)) --tile;
  }
  if constexpr (!Config::kLarge) {  // otherwise free since the last scores
    if (self.elected()) ptx::barrier_arrive(query_free);
  }
  store_rows<Config>(params, work, state, unit, storage.rows_out[kWarpsPerConsumer * self.index + self.warp],
                     first_query + 16 * self.warp, self.lane);
  if (own.first > all.first) {
    for (int tile = own.first - 1; tile >= all.first; --tile) skip_tile<Config>(storage, self);
    leave_together<Config>(self);
  }
}

template <class Config>
__device__ __forceinline__ void consume(const ForwardParams& params, Storage<Config>& storage, int index, int thread) {
  Consumer<Config> self{index,       index,
                        thread,      __shfl_sync(kFullWarp, thread / 32, 0),
                        thread % 32, ptx::kept(ptx::shared_address(&storage.row_scale[128 * index + thread])),
                        {},          {},
                        {}};
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
    self.group = self.group == Config::kConsumers - 1 ? 0 : self.group + 1;
  }
}

}  // namespace flamia::sm90::forward
