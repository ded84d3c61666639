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
#include "../../ptx/wgmma_backward.cuh"
#include "loader.cuh"
#include "power.cuh"
#include "storage.hpp"
#include "work.hpp"

namespace flamia::sm90::backward {

inline constexpr int kKeyGroups = kKeyTile / 16;            // of one load: 16 queries x 16 keys
inline constexpr int kPayloadWords = 2 * kKeyGroups;        // A operand of dQ: 64 queries x 128 keys
inline constexpr std::uint32_t kQueryWarpgroupBarrier = 1;  // named barrier

template <class Config>
struct TransposedKeyOperand {
  static constexpr ptx::OperandLayout kLayout{16 * Config::kHeadDim, 128};
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

/// FP16 holds no greater factor than 2^15.
inline constexpr int kLeastFactor = -15;

/// 2^-exponent as an FP16 pair of equal halves, in two factors where one does not fit: exponents lie in -30 ... 8.
struct HalfScale {
  std::uint32_t near, far;  // far is 1 for exponents from -15 on
};
__device__ __forceinline__ HalfScale half_scale(int exponent) {
  const int first = max(exponent, kLeastFactor);
  const std::uint32_t near = static_cast<std::uint32_t>(15 - first) << 10, far = static_cast<std::uint32_t>(15 + first - exponent)
                                                                                 << 10;
  return {near * 0x10001u, far * 0x10001u};
}

/// The payload: codes of dS * 2^-exponent, row g in the even words, row g + 8 in the odd ones.
__device__ __forceinline__ void round_payload(std::uint32_t (&codes)[kPayloadWords], std::uint32_t (&pairs)[kKeyGroups][4],
                                              const int (&exponent)[2]) {
  const HalfScale scale[2] = {half_scale(exponent[0]), half_scale(exponent[1])};
  // Rows that need no second factor multiply by 1: the branch is the warp's, the numbers are the row's.
  if (__any_sync(kFullWarp, min(exponent[0], exponent[1]) < kLeastFactor)) {
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

/// Exponent of a row's partial sums besides its payload's: of dO', of K, of the FP16 shift, and z. `query` = the row's position,
/// `row_record` = shared address of its word in field 0.
__device__ __forceinline__ int row_unit(std::uint32_t row_record, const KeyRecord* keys, Window window, int query,
                                        const StepInfo& info, int first_key, int length) {
  const int row_reach = low_half(ptx::load_shared_int(row_record + kReach * kFieldBytes));
  const int unit = ptx::load_shared_int(row_record + kDqUnit * kFieldBytes);
  const std::uint32_t tile_reach = keys[info.last_key].reach;
  std::uint32_t reach = tile_reach;
  if ((info.flags & kCut) != 0) reach = keys[last_key_of_tile(window, query, first_key, length)].reach;
  return unit + key_reach(tile_reach) - fp16_shift(value_reach(reach), row_reach, key_reach(reach), key_reach(tile_reach));
}

inline constexpr int kPartChannels = 32;  // of one product
inline constexpr int kPartRegisters = 16;

/// Adds 64 queries x 32 channels, times a power of two per row, to the partial sums. `group` = the warp's 16 slots.
template <class Config>
__device__ __forceinline__ void add_partials(void* partials, std::int64_t group, const float (&x)[kPartRegisters],
                                             const float (&scale)[2], int part, int lane) {
  const std::int64_t at =
      group * kGroup * Config::kHeadDim + partial_offset<Config::kPartialBytes>(lane, part / 2, part % 2 * kPartRegisters);
  if constexpr (Config::kPartials == PartialFormat::f16) {
    auto* const to = static_cast<std::uint16_t*>(partials) + at;
#pragma unroll
    for (int v = 0; v < kPartRegisters; v += 8) {
      std::uint32_t pair[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pair[i] = ptx::pack_f16x2(x[v + 2 * i] * scale[i % 2], x[v + 2 * i + 1] * scale[i % 2]);
      ptx::add_global_f16x8(to + v / 8 * 256, pair[0], pair[1], pair[2], pair[3]);
    }
  } else {
    auto* const to = static_cast<float*>(partials) + at;
#pragma unroll
    for (int v = 0; v < kPartRegisters; v += 4) {
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

/// One step: 64 queries of one head against the tile's 128 keys. Returns whether it was the item's last.
template <class Config>
__device__ __forceinline__ bool query_step(const BackwardParams& params, Storage<Config>& storage, StepCounter<Config> now,
                                           const Work& work, Window window, int thread) {
  constexpr auto layout = TransposedKeyOperand<Config>::kLayout;
  const int warp = __shfl_sync(kFullWarp, thread / 32, 0), lane = thread % 32;
  const std::uint32_t exchange_slot = now.exchange();
  ptx::barrier_wait(&storage.stage_ready[now.stage()], now.stage_parity());
  const StepInfo info = storage.stage[now.stage()].info;
  ptx::barrier_wait(&storage.exchange_ready[exchange_slot], now.exchange_parity());

  // dS of this step is written, so the consumers are done with the step before; this warpgroup is when its four warps have said so. The warps
  // take the copies in turn; what they wait for here also hands the cursor on.
  if (lane == 0 && static_cast<int>(now.count % 4) == warp && now.count > 0) {
    const StepCounter<Config> before = now.before();
    ptx::barrier_wait(&storage.exchange_free[before.exchange()], before.exchange_parity());
    Loader<Config>{params, storage}.copy_step(before.stage());
  }
  __syncwarp();

  std::uint32_t pairs[kKeyGroups][4];
  const std::uint32_t line = ptx::shared_address(storage.exchange[exchange_slot]) + load_line(warp, lane, 0);
#pragma unroll
  for (int t = 0; t < kKeyGroups; ++t) ptx::load_matrices(pairs[t], line + t * exchange_offset(0, 16));
  const std::uint32_t record =
      ptx::shared_address(storage.stage[now.stage()].records) + warp * kRowGroupBytes + pi_column(lane / 4) * 4;
  int unit[2], exponent[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t row_record = record + half * (pi_column(8) - pi_column(0)) * 4;
    unit[half] = row_unit(row_record, storage.key_records, window, info.query + 16 * warp + lane / 4 + 8 * half, info,
                          work.first_key, work.length);
  }
  const std::uint32_t maxima = row_maxima(pairs);
  __syncwarp();
  if (lane == 0) ptx::barrier_arrive(&storage.exchange_free[exchange_slot]);

  exponent[0] = max(payload_exponent(__float_as_uint(ptx::low_f16(maxima))), kLeastPayloadExponent);
  exponent[1] = max(payload_exponent(__float_as_uint(ptx::high_f16(maxima))), kLeastPayloadExponent);
  std::uint32_t codes[kPayloadWords];
  round_payload(codes, pairs, exponent);
  const float scale[2] = {power_of_two(clamp(unit[0] + exponent[0], -126, 126)),
                          power_of_two(clamp(unit[1] + exponent[1], -126, 126))};

  const std::int64_t slot = info.head * params.slots + work.slot_start + info.query;
  std::int32_t* const turn = Config::kDeterministic ? params.turns + slot / kGroup : nullptr;
  const int mine = Config::kDeterministic ? work.first_key / kKeyTile - first_key_tile(window, info.query) : 0;
  await_turn<Config>(turn, mine);
  const bool owned = info.query + 16 * warp < work.length;  // later slots belong to another document
  const std::uint32_t keys = ptx::descriptor_low(storage.key_transposed, layout);
#pragma unroll
  for (int part = 0; part < Config::kHeadDim / kPartChannels; ++part) {
    float x[kPartRegisters];
    ptx::begin_products();
#pragma unroll
    for (int k = 0; k < kKeyTile / 32; ++k) {
      const std::uint64_t operand = ptx::descriptor(keys + ((part * kPartChannels * 16 + k * 32 * Config::kHeadDim) >> 4), layout);
      if (k == 0)
        ptx::product_64x32<false>(x, codes, operand);
      else
        ptx::product_64x32<true>(x, codes + 4 * k, operand);
    }
    ptx::commit_products();
    ptx::wait_products<0>();
    ptx::fence_registers(x);
    if (owned) add_partials<Config>(params.dq_partials, slot / kGroup + warp, x, scale, part, lane);
  }
  pass_turn<Config>(turn, mine);
  return (info.flags & kLastStep) != 0;
}

/// All items of the block.
template <class Config>
__device__ __forceinline__ void make_query_gradients(const BackwardParams& params, Storage<Config>& storage, int thread) {
  const Window window{params.window_left, params.window_right};
  if (thread == 0) {
    Loader<Config> loader{params, storage};
    loader.start();
    for (int slot = 0; slot < Config::kStages; ++slot) loader.copy_step(slot);
  }
  __syncwarp();
  StepCounter<Config> now;
  std::uint32_t keys_parity = 0;
  for (int item = 0;; ++item) {
    ptx::barrier_wait(&storage.stage_ready[now.stage()], now.stage_parity());
    const Work& work = storage.work[item % Config::kWorkSlots];
    if (work.steps < 0) break;
    if (thread == 0) Loader<Config>{params, storage}.copy_keys(work);
    __syncwarp();
    ptx::barrier_wait(&storage.keys_ready, keys_parity);
    keys_parity ^= 1;
    for (bool last = false; !last; now = now.next()) last = query_step<Config>(params, storage, now, work, window, thread);
    ptx::named_barrier_sync(kQueryWarpgroupBarrier, 128);  // every warp has read Kt and the key records
  }
  if (thread == 0) Loader<Config>{params, storage}.finish();
}

}  // namespace flamia::sm90::backward
