// SPDX-License-Identifier: Apache-2.0
// The dQ warpgroup: per step it reads dS (FP16) as its A operand, finds each row's maximum over the tile's 128 keys, rounds the payload with
// the row's own exponent, multiplies by K and adds the result to the partial sums in global memory.
//
// A row of dS lies in the four lanes of a quad, so its maximum costs two shuffles: this is why dS changes hands before it is rounded.
#pragma once
#include <cstdint>

#include "../../ptx/barrier.cuh"
#include "../../ptx/half.cuh"
#include "../../ptx/matrix.cuh"
#include "../../ptx/reduce.cuh"
#include "../../ptx/wgmma_m64n64.cuh"
#include "loader.cuh"
#include "power.cuh"
#include "storage.hpp"
#include "work.hpp"

namespace flamia::sm90::backward {

inline constexpr int kKeyGroups = kKeyTile / 16;          // of one load: 16 queries x 16 keys
inline constexpr int kPayloadWords = 2 * kKeyGroups;      // A operand of dQ: 64 queries x 128 keys
inline constexpr std::uint32_t kQueryWarpgroupBarrier = 1;  // named barrier

template <class Config>
struct TransposedKeyOperand {
  static constexpr ptx::OperandLayout kLayout{16 * Config::kHeadDim, 128};
};

/// Where a warp stands: its step, and the two rows (positions) of a thread.
struct QueryRows {
  int step_query;      // position of the step's first query
  int row_word;        // byte offset of row g's word in a field of the warp's record group; row g + 8 is 8 bytes on
  int warp, lane;
};

/// Greatest magnitudes of a thread's two rows over the tile's 128 keys, as FP16 pair (row g, row g + 8), the same in the quad.
__device__ __forceinline__ std::uint32_t row_maxima(const std::uint32_t (&pairs)[kKeyGroups][4]) {
  std::uint32_t row[2] = {pairs[0][0], pairs[0][1]};
#pragma unroll
  for (int t = 0; t < kKeyGroups; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (t > 0) row[half] = ptx::max_magnitude_f16x2(row[half], pairs[t][half]);
      row[half] = ptx::max_magnitude_f16x2(row[half], pairs[t][half + 2]);
    }
  }
  std::uint32_t both = ptx::max_magnitude_f16x2(__byte_perm(row[0], row[1], 0x5410), __byte_perm(row[0], row[1], 0x7632));
  both = ptx::max_magnitude_f16x2(both, __shfl_xor_sync(kFullWarp, both, 1));
  return ptx::max_magnitude_f16x2(both, __shfl_xor_sync(kFullWarp, both, 2));
}

/// Rows whose greatest element is below 448 * 2^-30, at the very end of FP16, keep this exponent.
inline constexpr int kLeastPayloadExponent = -30;

/// 2^-exponent as an FP16 pair of equal halves, in two factors where one does not fit: exponents lie in -30 ... 8.
struct HalfScale {
  std::uint32_t near, far;  // far is 1 for exponents from -15 on
};
__device__ __forceinline__ HalfScale half_scale(int exponent) {
  const int first = max(exponent, -15);
  const std::uint32_t near = static_cast<std::uint32_t>(15 - first) << 10, far = static_cast<std::uint32_t>(15 + first - exponent) << 10;
  return {near * 0x10001u, far * 0x10001u};
}

/// The payload: codes of dS * 2^-exponent, row g in the even words, row g + 8 in the odd ones.
__device__ __forceinline__ void round_payload(std::uint32_t (&codes)[kPayloadWords], std::uint32_t (&pairs)[kKeyGroups][4], const int (&exponent)[2]) {
  const HalfScale scale[2] = {half_scale(exponent[0]), half_scale(exponent[1])};
  if (__any_sync(kFullWarp, min(exponent[0], exponent[1]) < -15)) {
#pragma unroll
    for (int t = 0; t < kKeyGroups; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[t][i] = ptx::multiply_f16x2(pairs[t][i], scale[i % 2].far);
    }
  }
#pragma unroll
  for (int t = 0; t < kKeyGroups; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      codes[2 * t + half] = ptx::pack_e4m3x4_f16(ptx::multiply_f16x2(pairs[t][half], scale[half].near),
                                                 ptx::multiply_f16x2(pairs[t][half + 2], scale[half].near));
    }
  }
}

/// Exponent of a row's partial sums besides its payload's: of dO', of K, of the FP16 shift, and z.
__device__ __forceinline__ int row_unit(std::uint32_t record, const QueryRows& rows, int half, const KeyRecord* keys, const Work& work, Window window,
                                        std::uint32_t tile_reach, bool full_reach) {
  const int row_reach = low_half(ptx::load_shared_int(record + rows.row_word + 8 * half + kReach * kFieldBytes));
  const int unit = ptx::load_shared_int(record + rows.row_word + 8 * half + kDqUnit * kFieldBytes);
  std::uint32_t reach = tile_reach;
  if (!full_reach) {
    const int query = rows.step_query + 16 * rows.warp + rows.lane / 4 + 8 * half;
    const int last = min(window.last_key(query, work.length), work.length - 1) - work.first_key;
    reach = keys[clamp(last, 0, kKeyTile - 1)].reach;
  }
  return unit + key_reach(tile_reach) - fp16_shift(value_reach(reach), row_reach, key_reach(reach), key_reach(tile_reach));
}

/// Adds 64 queries x 64 channels, times a power of two per row, to the partial sums.
template <class Config>
__device__ __forceinline__ void add_partials(void* partials, std::int64_t group, const float (&x)[kScores], const float (&scale)[2], int half, int lane) {
  const std::int64_t at = group * kGroup * Config::kHeadDim + partial_offset<Config::kPartialBytes>(lane, half, 0);
  if constexpr (Config::kPartials == PartialFormat::f16) {
    auto* const to = static_cast<std::uint16_t*>(partials) + at;
#pragma unroll
    for (int v = 0; v < kScores; v += 8) {
      std::uint32_t pair[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pair[i] = ptx::pack_f16x2(x[v + 2 * i] * scale[i % 2], x[v + 2 * i + 1] * scale[i % 2]);
      ptx::add_global_f16x8(to + v / 8 * 256, pair[0], pair[1], pair[2], pair[3]);
    }
  } else {
    auto* const to = static_cast<float*>(partials) + at;
#pragma unroll
    for (int v = 0; v < kScores; v += 4) {
      ptx::add_global_f32x4(to + v / 4 * 128, x[v] * scale[0], x[v + 1] * scale[0], x[v + 2] * scale[1], x[v + 3] * scale[1]);
    }
  }
}

/// Deterministic mode: waits until every earlier key tile has added to the step's queries; afterwards passes the turn on.
template <class Config>
__device__ __forceinline__ void await_turn(std::int32_t* turn, int mine) {
  if constexpr (Config::kDeterministic) {
    if (threadIdx.x % 128 == 0) {
      while (ptx::load_acquire(turn) != mine) {
      }
    }
    ptx::named_barrier_sync(kQueryWarpgroupBarrier, 128);
  }
}
template <class Config>
__device__ __forceinline__ void pass_turn(std::int32_t* turn, int mine) {
  if constexpr (Config::kDeterministic) {
    ptx::fence_gpu();
    ptx::named_barrier_sync(kQueryWarpgroupBarrier, 128);
    if (threadIdx.x % 128 == 0) ptx::store_release(turn, mine + 1);
  }
}

/// Positions in the rings that the dQ warpgroup walks.
template <class Config>
struct QueryState {
  Ring<Config::kStages> stage;
  Ring<Config::kExchangeSlots> exchange;
  std::uint32_t previous_stage = 0;
  bool first = true;
};

/// One step: 64 queries of one head against the tile's 128 keys.
template <class Config>
__device__ __forceinline__ void query_step(const BackwardParams& params, Storage<Config>& storage, QueryState<Config>& state, const Work& work,
                                           Window window, int head, int block, std::uint32_t tile_reach, int thread) {
  constexpr auto layout = TransposedKeyOperand<Config>::kLayout;
  const int warp = __shfl_sync(kFullWarp, thread / 32, 0), lane = thread % 32;
  const int step_query = block * kQueryStep;
  const QueryRows rows{step_query, pi_column(lane / 4) * 4, warp, lane};
  const std::uint32_t exchange_slot = state.exchange.slot;
  ptx::barrier_wait(&storage.stage_ready[state.stage.slot], state.stage.parity);
  ptx::barrier_wait(&storage.exchange_ready[exchange_slot], state.exchange.parity);

  // dS of this step is written, so the consumers are done with the step before; this warpgroup is when its four warps have said so.
  if (thread == 0 && !state.first) {
    Ring<Config::kExchangeSlots> before = state.exchange;
    before.parity ^= before.slot == 0 ? 1 : 0;
    before.slot = before.slot == 0 ? Config::kExchangeSlots - 1 : before.slot - 1;
    ptx::barrier_wait(&storage.exchange_free[before.slot], before.parity);
    Loader<Config>{params, storage}.copy_step(state.previous_stage);
  }
  __syncwarp();

  std::uint32_t pairs[kKeyGroups][4];
  const std::uint32_t line = ptx::shared_address(storage.exchange[exchange_slot]) + load_line(warp, lane, 0);
#pragma unroll
  for (int t = 0; t < kKeyGroups; ++t) ptx::load_matrices(pairs[t], line + t * exchange_offset(0, 16));
  const std::uint32_t record = ptx::shared_address(storage.stage[state.stage.slot].records) + warp * kRowGroupBytes;
  const bool full_reach = step_shape(window, step_query, work.first_key, work.length).full_reach;
  int unit[2], exponent[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) unit[half] = row_unit(record, rows, half, storage.key_records, work, window, tile_reach, full_reach);
  const std::uint32_t maxima = row_maxima(pairs);
  __syncwarp();
  if (lane == 0) ptx::barrier_arrive(&storage.exchange_free[exchange_slot]);

  exponent[0] = max(payload_exponent(__float_as_uint(ptx::low_f16(maxima))), kLeastPayloadExponent);
  exponent[1] = max(payload_exponent(__float_as_uint(ptx::high_f16(maxima))), kLeastPayloadExponent);
  std::uint32_t codes[kPayloadWords];
  round_payload(codes, pairs, exponent);
  const float scale[2] = {power_of_two(clamp(unit[0] + exponent[0], -126, 126)), power_of_two(clamp(unit[1] + exponent[1], -126, 126))};

  const std::int64_t slot = head * params.slots + work.slot_start + step_query;
  std::int32_t* const turn = Config::kDeterministic ? params.turns + slot / kGroup : nullptr;
  const int mine = Config::kDeterministic ? work.first_key / kKeyTile - first_key_tile(window, step_query) : 0;
  await_turn<Config>(turn, mine);
  const bool owned = step_query + 16 * warp < work.length;  // later slots belong to another document
  const std::uint32_t keys = ptx::descriptor_low(storage.key_transposed, layout);
#pragma unroll
  for (int half = 0; half < Config::kHalves; ++half) {
    float x[kScores];
    ptx::begin_products();
#pragma unroll
    for (int k = 0; k < kKeyTile / 32; ++k) {
      const std::uint64_t operand = ptx::descriptor(keys + ((half * 64 * 16 + k * 32 * Config::kHeadDim) >> 4), layout);
      if (k == 0) ptx::product_64x64<false>(x, codes + 4 * k, operand);
      else ptx::product_64x64<true>(x, codes + 4 * k, operand);
    }
    ptx::commit_products();
    ptx::wait_products<0>();
    ptx::fence_registers(x);
    if (owned) add_partials<Config>(params.dq_partials, slot / kGroup + warp, x, scale, half, lane);
  }
  pass_turn<Config>(turn, mine);
  state.previous_stage = state.stage.slot;
  state.first = false;
  state.stage.advance();
  state.exchange.advance();
}

/// All items of the block.
template <class Config>
__device__ __forceinline__ void make_query_gradients(const BackwardParams& params, Storage<Config>& storage, int thread) {
  const Window window{params.window_left, params.window_right};
  const int group = params.query_heads / params.key_heads;
  if (thread == 0) {
    Loader<Config> loader{params, storage};
    loader.start();
    for (int slot = 0; slot < Config::kStages; ++slot) loader.copy_step(slot);
  }
  __syncwarp();
  QueryState<Config> state;
  std::uint32_t keys_parity = 0;
  for (int item = 0;; ++item) {
    ptx::barrier_wait(&storage.stage_ready[state.stage.slot], state.stage.parity);
    const Work work = storage.work[item % Config::kWorkSlots];
    if (work.steps < 0) break;
    if (thread == 0) Loader<Config>{params, storage}.copy_keys(work);
    __syncwarp();
    ptx::barrier_wait(&storage.keys_ready, keys_parity);
    keys_parity ^= 1;
    const std::uint32_t tile_reach = storage.key_records[min(work.length - work.first_key, kKeyTile) - 1].reach;
    for (int member = 0; member < group; ++member) {
      for (int block = 0; block < work.blocks; ++block) {
        query_step<Config>(params, storage, state, work, window, work.key_head * group + member, work.first_step + block, tile_reach, thread);
      }
    }
    ptx::named_barrier_sync(kQueryWarpgroupBarrier, 128);  // every warp has read Kt and the key records
  }
  if (thread == 0) Loader<Config>{params, storage}.finish();
}

}  // namespace flamia::sm90::backward
