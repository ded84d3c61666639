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
  StageRing<Config> stage;

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
    ptx::barrier_wait(self.stage.at + StageRing<Config>::kReady, self.stage.parity);
    if (self.elected()) ptx::barrier_arrive_many(self.stage.at + StageRing<Config>::kFree, kWarpsPerConsumer);
    __syncwarp();
  }
  self.stage.advance(ptx::shared_address(storage.stages));
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
__device__ __forceinline__ int value_unit(std::uint32_t tile) {
  const int4 header = ptx::load_shared_int4(tile);
  const int word = ptx::load_shared_int(
      tile + offsetof(TileExponents<Config::kScaleEntries>, value));  // per token: written where values are mixed
  const int of_first_key = Config::kTokenBlocks ? header.w + __float2int_rn(__int_as_float(word)) : (word >> 23) - kExponentBias;
  const int first = Config::kTokenBlocks || (header.y & Flags::kMixedValues) != 0 ? of_first_key : header.w;
  return clamp(header.w - first <= 8 ? header.w : first, -40, 40);
}

/// Greatest value exponent that a row may know of a mixed tile, of which `greatest` is the greatest.
template <class Config>
__device__ __forceinline__ int row_reach(const TileExponents<Config::kScaleEntries>& tile, int greatest, const Item& item, int half,
                                         int first_key) {
  const int last = clamp(item.window.last_key(item.position(half), item.length) - first_key, 0, kKeyTile - 1);
  if constexpr (Config::kTokenBlocks) {
    float below = __int_as_float(tile.value[0]);
#pragma unroll
    for (int block = 1; block < kKeyTile / kBlock; ++block)
      below = last >= block * kBlock ? fmaxf(below, __int_as_float(tile.value[block])) : below;
    return greatest + __float2int_rn(below);
  } else {
    return tile.reach[last];
  }
}

/// What a rare tile asks for.
struct Asks {
  static constexpr int kKeyFactors = 1;                // its keys are mixed, or flagged
  static constexpr int kRightEdge = 2, kLeftEdge = 4;  // the mask cuts it
  static constexpr int kCareful = 8;                   // some row of the warp is careful (tilesum)
  static constexpr int kFolds = 16;                    // P by V's exponents, beyond what its bias can do
  static constexpr int kScale = 32;                    // the partial O is not in A's unit
};

/// What is known of a tile before its scores are. *Rare* tiles ask for more than the usual one.
template <class Config>
struct TileKind {
  ScoreFactors<Config> factors;
  float bias[2];
  bool rare;
  int asks;  // of a rare tile; uniform
};

/// Parks the scale of a partial O.
template <class Config>
__device__ __forceinline__ void park_scale(const Consumer<Config>& self, RowPair reach, int unit) {
  ptx::store_shared_float2(self.row + Parked<Config>::kValueScale, {power_of_two(clamp(reach.of(0) - unit, -126, 127)),
                                                                    power_of_two(clamp(reach.of(1) - unit, -126, 127))});
}

/// What a rare tile asks for; the scale of its partial O is parked where it has one and needs no folds.
template <class Config>
__device__ __forceinline__ int asks_of(const Consumer<Config>& self, const Item& item, int first_key, int unit, bool careful) {
  const int4 header = ptx::load_shared_int4(self.stage.at + StageRing<Config>::kExponents);
  const int flags = __shfl_sync(kFullWarp, header.y, 0), value_exponent = __shfl_sync(kFullWarp, header.w, 0);
  const bool right = first_key + kKeyTile - 1 > item.last_common, left = first_key < item.first_common;
  const int folding = Config::kBiasFolds && right ? Flags::kMixedValues | Flags::kClose : Flags::kMixedValues;
  const bool folds = (flags & folding) != 0, scaled = value_exponent != unit || (folds && right);
  if (scaled && !folds) park_scale(self, {value_exponent, value_exponent}, unit);
  return ((flags & Flags::kMixedKeys) != 0 ? Asks::kKeyFactors : 0) | (right ? Asks::kRightEdge : 0) |
         (left ? Asks::kLeftEdge : 0) | (__any_sync(kFullWarp, careful) ? Asks::kCareful : 0) | (folds ? Asks::kFolds : 0) |
         (scaled ? Asks::kScale : 0);
}

/// Scores of one tile, unmasked. Everything that does not need them happens while they are being multiplied: the loads are such that the
/// compiler cannot put them between the products.
template <class Config>
__device__ __forceinline__ TileKind<Config> make_scores(float (&scores)[Config::kScores], const Consumer<Config>& self,
                                                        const RowState<Config>& state, const Item& item, int tile, int unit) {
  const std::uint32_t exponents = self.stage.at + StageRing<Config>::kExponents;
  issue_scores<Config>(scores, item.query, keys_of<Config>(self.stage.at));
  if (tile < 0) ptx::mark();  // no load below moves up between the products
  const int plain_exponent = ptx::load_shared_int(exponents);
  const float2 row = ptx::load_shared_float2(self.row);
  TileKind<Config> kind;
  kind.factors = score_factors<Config>(exponents, row);
  const bool cut = static_cast<unsigned>(tile - item.first_whole) >= static_cast<unsigned>(item.whole);
  const bool careful = Config::kReference == RowReference::tilesum && (is_careful(row.x) | is_careful(row.y));
  kind.rare = __any_sync(kFullWarp, careful | cut | (plain_exponent != unit));
  if (kind.rare)
    kind.asks =
        asks_of<Config>(self, item, tile * kKeyTile, unit, careful);  // a branch, so that the vote does not sink below the wait
  ptx::wait_products<0>();
  ptx::fence_registers(scores);
  kind.bias[0] = kCodeShift - state.reference[0];
  kind.bias[1] = kCodeShift - state.reference[1];
  return kind;
}

/// Codes of a tile, after what a rare one needs before: masks, references of careful rows. Where P is folded the row sums too (otherwise PV's
/// column of ones gives them) and the scale of the partial O; they are parked.
template <class Config>
__device__ __forceinline__ void make_all_codes(std::uint32_t (&codes)[kCodeWords], Storage<Config>& storage,
                                               const Consumer<Config>& self, float (&scores)[Config::kScores],
                                               TileKind<Config>& kind, RowState<Config>& state, const Item& item, int first_key,
                                               int unit) {
  constexpr bool always_careful = Config::kReference == RowReference::phase32;
  const auto asks = [&](int what) { return kind.rare && (kind.asks & what) != 0; };
  if (kind.rare || always_careful) {
    const TileExponents<Config::kScaleEntries>& exponents =
        stage_at(storage, ptx::shared_address(&storage), self.stage.at).exponents;
    if (asks(Asks::kKeyFactors | Asks::kRightEdge | Asks::kLeftEdge)) {
      if (asks(Asks::kKeyFactors)) {
        if constexpr (Config::kTokenBlocks)
          flag_blocks<Config>(scores, kind.factors, exponents);
        else
          apply_key_factors<Config>(scores, exponents, self.lane);
      }
      if (asks(Asks::kRightEdge | Asks::kLeftEdge)) keep_above_zero<Config>(kind.factors);
      if (asks(Asks::kRightEdge)) mask_after<Config>(scores, item, first_key, self.lane);
      if (asks(Asks::kLeftEdge)) mask_before<Config>(scores, item, first_key, self.lane);
    }
    if (always_careful || asks(Asks::kCareful)) {
      raise_reference<Config>(state, scores, kind.factors, &storage.row_scale[ptx::thread_index() - 128]);
      kind.bias[0] = kCodeShift - state.reference[0];
      kind.bias[1] = kCodeShift - state.reference[1];
      if (__any_sync(kFullWarp, off_grid(state.reference[0]) | off_grid(state.reference[1]))) {
        round_scores<Config>(scores, kind.factors, kind.bias, state);
      }
    }
    if (asks(Asks::kFolds)) {
      const int value_exponent = __shfl_sync(kFullWarp, exponents.value_exponent, 0);
      RowPair reach{value_exponent, value_exponent};
      if (asks(Asks::kRightEdge)) {
        reach = {row_reach<Config>(exponents, value_exponent, item, 0, first_key),
                 row_reach<Config>(exponents, value_exponent, item, 1, first_key)};
      }
      float sums[4];
      if constexpr (Config::kTokenBlocks) {
        make_block_folded_codes<Config>(codes, sums, ptx::descriptor_low(storage.ones, OnesOperand<Config>::kLayout), scores,
                                        kind.factors, kind.bias, state, item, first_key, exponents, reach, value_exponent);
      } else {
        const std::uint32_t ones = Config::kBiasFolds ? ptx::descriptor_low(storage.ones, OnesOperand<Config>::kLayout)
                                                      : values_of<Config>(self.stage.at) + (Config::kValueGroupBytes >> 4);
        make_token_folded_codes<Config>(codes, sums, ones, scores, kind.factors, kind.bias, state, item, first_key, exponents,
                                        reach, ptx::thread_index() % 32);
      }
      ptx::store_shared_float2(self.row + Parked<Config>::kMixedSums, {sums[0], sums[2]});
      park_scale(self, reach, unit);
      return;
    }
  }
  make_codes<Config>(codes, scores, kind.factors, kind.bias);
  if constexpr (Config::kRecordCodes) record_unfolded<Config>(scores, kind.factors, kind.bias, state, item, first_key);
}

/// One key tile: S, softmax with the row reference, PV, promotion; then `tile` goes down. With the tile-sum reference a rejected tile is done
/// once more, and `tile` stays. (The caller's loop does that: a loop in here would make the compiler compute V's descriptors before it issues S.)
template <class Config>
__device__ __forceinline__ void attend_tile(Storage<Config>& storage, Consumer<Config>& self, RowState<Config>& state,
                                            const Item& item, int& tile, int last_visited, int unit) {
  const std::uint32_t stage = self.stage.at, first_stage = ptx::shared_address(storage.stages);
  constexpr bool may_redo = Config::kReference == RowReference::tilesum;

  float scores[Config::kScores];
  TileKind<Config> kind = make_scores<Config>(scores, self, state, item, tile, unit);
  std::uint32_t codes[kCodeWords];
  make_all_codes<Config>(codes, storage, self, scores, kind, state, item, tile * kKeyTile, unit);

  Partial partial;
  issue_output<Config>(partial, codes, values_of<Config>(stage));
  self.stage.advance(first_stage);
  const bool ready =
      ptx::barrier_passed(self.stage.at + StageRing<Config>::kReady, self.stage.parity);  // asked early: the answer takes long
  ptx::wait_products<may_redo && kTwoProducts<Config> ? 1 : 0>();
  ptx::fence_registers(partial.last);
  float sum[2] = {partial.last[kChannels / 2], partial.last[kChannels / 2 + 2]};
  bool mine = fmaxf(sum[0], sum[1]) >= kRejectedSum;
  if (kind.rare) {
    if ((kind.asks & Asks::kFolds) != 0) {
      const float2 sums = ptx::load_shared_float2(self.row + Parked<Config>::kMixedSums);
      sum[0] = sums.x;
      sum[1] = sums.y;
    }
    if constexpr (may_redo) mine = __any_sync(kFullWarp, rejected(&storage.row_scale[ptx::thread_index() - 128], sum[0], sum[1]));
  }
  if constexpr (may_redo) {
    const bool again = __any_sync(kFullWarp, ptx::named_barrier_any(kFirstConsumerBarrier + self.index, 128, mine));
    ptx::wait_products<0>();
    if (again) {
      become_careful(&storage.row_scale[ptx::thread_index() - 128], sum[0], sum[1]);
      self.stage.retreat(first_stage);
      return;
    }
  }
  ptx::fence_registers(partial.first);
  __syncwarp();
  const auto hand_back = [&] {
    if (self.elected()) ptx::barrier_arrive(stage + StageRing<Config>::kFree);
    if constexpr (Config::kLarge) {  // the next queries come while the rows leave
      if (tile == last_visited && self.elected()) ptx::barrier_arrive(&storage.query_free[self.index]);
    }
  };
  if (!kind.rare) {
    hand_back();
    promote<Config>(state, partial);
  } else {
    bool scaled = (kind.asks & Asks::kScale) != 0;
    if constexpr (may_redo) {
      const int first_key = tile * kKeyTile;
      if ((kind.asks & Asks::kCareful) != 0 && may_free(first_key, item.last_common - first_key)) {
        scaled = free_rows<Config>(state, sum[0], sum[1], item, first_key, scaled, &storage.value_scale[ptx::thread_index() - 128],
                                   &storage.row_scale[ptx::thread_index() - 128]);
      }
    }
    hand_back();
    if (__any_sync(kFullWarp, scaled)) {
      const float2 scale = ptx::load_shared_float2(self.row + Parked<Config>::kValueScale);
      promote_scaled<Config>(state, partial, {scale.x, scale.y});
    } else {
      promote<Config>(state, partial);
    }
  }
  state.sum[0] += sum[0];
  state.sum[1] += sum[1];
  --tile;
  if (!ready & (tile >= last_visited)) ptx::barrier_wait(self.stage.at + StageRing<Config>::kReady, self.stage.parity);
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
  const int first_common = __shfl_sync(kFullWarp, window.first_key(first_query + Config::kRowsPerConsumer - 1), 0),
            last_common = __shfl_sync(kFullWarp, window.last_key(first_query, work.length), 0);
  const int first_whole = __shfl_sync(kFullWarp, (first_common + kKeyTile - 1) / kKeyTile, 0);
  const Item item{__shfl_sync(kFullWarp, ptx::descriptor_low(queries, QueryOperand<Config>::kLayout), 0),
                  first_query,
                  work.length,
                  first_common,
                  last_common,
                  first_whole,
                  __shfl_sync(kFullWarp, max((last_common + 1) / kKeyTile - first_whole, 0), 0),
                  window,
                  &params,
                  work.head * params.slots + work.slot_start};

  for (int tile = all.last; tile > own.last; --tile) skip_tile<Config>(storage, self);
  ptx::barrier_wait(query_ready, self.query.parity);
  RowState<Config> state;
  begin_rows<Config>(state, storage, self);
  ptx::barrier_wait(self.stage.at + StageRing<Config>::kReady, self.stage.parity);
  const int unit = __shfl_sync(kFullWarp, value_unit<Config>(self.stage.at + StageRing<Config>::kExponents), 0);
  int tile = own.last;
#pragma unroll 1
  while (tile >= own.first) {
    attend_tile<Config>(storage, self, state, item, tile, own.first, unit);
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
  Consumer<Config> self{index,
                        index,
                        thread,
                        __shfl_sync(kFullWarp, thread / 32, 0),
                        thread % 32,
                        ptx::kept(ptx::shared_address(&storage.row_scale[128 * index + thread])),
                        {},
                        {},
                        {ptx::shared_address(storage.stages), 0}};
  while (true) {
    ptx::barrier_wait(&storage.work_ready[self.work.slot], self.work.parity);
    const Work work = uniform(storage.work[self.work.slot]);
    __syncwarp();
    if (self.lane == 0) ptx::barrier_arrive(&storage.work_taken[self.work.slot]);
    self.work.advance();
    if (work.length < 0) return;
    attend<Config>(params, storage, self, work);
    self.query.advance();
    self.group = self.group == Config::kConsumers - 1 ? 0 : self.group + 1;
  }
}

}  // namespace flamia::sm90::forward
