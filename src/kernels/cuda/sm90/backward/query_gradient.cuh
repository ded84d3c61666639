// SPDX-License-Identifier: Apache-2.0
// The dQ warpgroup: per step it reads dS (FP16), finds each row's maximum over the tile's 128 keys, rounds the payload with the row's own
// exponent, multiplies by K and adds the result to the partial sums in global memory.
//
// A row of dS lies in the four lanes of a quad, so its maximum costs two shuffles: this is why dS changes hands before it is rounded. The
// payload takes the place of the dS it was made from, for the product to read.
#pragma once
#include <cstdint>

#include "../../ptx/barrier.cuh"
#include "../../ptx/half.cuh"
#include "../../ptx/matrix.cuh"
#include "../../ptx/reduce.cuh"
#include "../../ptx/registers.cuh"
#include "../../ptx/wgmma_backward.cuh"
#include "gradients.cuh"
#include "loader.cuh"
#include "power.cuh"
#include "storage.hpp"
#include "work.hpp"

namespace flamia::sm90::backward {

inline constexpr int kKeyGroups = kKeyTile / 16;            // of one load: 16 queries x 16 keys
inline constexpr std::uint32_t kQueryWarpgroupBarrier = 1;  // named barrier

template <class Config>
struct TransposedKeyOperand {
  static constexpr ptx::OperandLayout kLayout{16 * Config::kHeadDim, 128};
};

/// dS of a warp's 16 queries and all keys: loads t hold keys 16 t ..., words 0 and 2 row g, 1 and 3 row g + 8.
using Pairs = std::uint32_t[kKeyGroups][4];

/// Greatest magnitudes of a thread's two rows over the tile's 128 keys, as FP16 pair (row g, row g + 8), the same in the quad.
__device__ __forceinline__ std::uint32_t row_maxima(const Pairs& pairs) {
  std::uint32_t row[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint32_t chain[2];  // shorter than one
#pragma unroll
    for (int t = 0; t < kKeyGroups; ++t) {
      const std::uint32_t greater = ptx::max_magnitude_f16x2(pairs[t][half], pairs[t][half + 2]);
      chain[t % 2] = t < 2 ? greater : ptx::max_magnitude_f16x2(chain[t % 2], greater);
    }
    row[half] = ptx::max_magnitude_f16x2(chain[0], chain[1]);
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

/// The payload: codes of dS * 2^-exponent, as K-major A operand with the keys in order pi. Keys 16 t ... take the lines that held dS of keys
/// 16 t ... 16 t + 7. `out` is where the lane stores codes.
__device__ __forceinline__ void round_payload(Pairs& pairs, std::uint32_t out, const int (&exponent)[2]) {
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
      ptx::store_shared(out + t * exchange_offset(0, 16) + half * exchange_offset(8, 0),
                        ptx::pack_e4m3x4_f16(ptx::multiply_f16x2(pairs[t][half], scale[half].near),
                                             ptx::multiply_f16x2(pairs[t][half + 2], scale[half].near)));
    }
  }
}
struct PayloadOperand {
  static constexpr ptx::OperandLayout kLayout{exchange_offset(0, 16), exchange_offset(8, 0)};
};

/// Exponent of a row's partial sums besides its payload's and its record's: of K and the FP16 shift. `query` = the row's position,
/// `row_record` = shared address of its word in field 0.
__device__ __forceinline__ int row_unit(std::uint32_t row_record, const KeyRecord* keys, Window window, int query,
                                        const StepInfo& info, int first_key, int length) {
  const int row_reach = low_half(ptx::load_shared_int(row_record + kReach * kFieldBytes));
  const std::uint32_t tile_reach = keys[info.last_key].reach;
  std::uint32_t reach = tile_reach;
  if ((info.flags & kCut) != 0) reach = keys[last_key_of_tile(window, query, first_key, length)].reach;
  return key_reach(tile_reach) - fp16_shift(value_reach(reach), row_reach, key_reach(reach), key_reach(tile_reach));
}

/// Adds 64 queries x 64 channels, times a power of two per row, to the partial sums. `group` = the warp's 16 slots.
template <class Config>
__device__ __forceinline__ void add_partials(void* partials, std::int64_t group, const float (&x)[kScores], const float (&scale)[2],
                                             int half, int lane) {
  float* const to =
      static_cast<float*>(partials) + group * kGroup * Config::kHeadDim + partial_offset<Config::kPartialBytes>(lane, half, 0);
#pragma unroll
  for (int v = 0; v < kScores; v += 4) {
    ptx::add_global_f32x4(to + v / 4 * 128, x[v] * scale[0], x[v + 1] * scale[0], x[v + 2] * scale[1], x[v + 3] * scale[1]);
  }
}

/// The same as FP16 into the warp's staging buffer, from where the copy engine adds them. `to` = where the lane stores of half 0.
__device__ __forceinline__ void stage_partials(std::uint32_t to, const float (&x)[kScores], const float (&scale)[2], int half,
                                               int lane) {
#pragma unroll
  for (int v = 0; v < kScores; v += 8) {
    std::uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = ptx::pack_f16x2(x[v + 2 * i] * scale[i % 2], x[v + 2 * i + 1] * scale[i % 2]);
    ptx::store_shared_x4(to + 2 * partial_offset<2>(lane, half, v), pair[0], pair[1], pair[2], pair[3]);
  }
}

/// A warp of the dQ warpgroup.
template <class Config>
struct QueryWarp {
  const BackwardParams& params;
  Storage<Config>& storage;
  int warp, lane;

  __device__ __forceinline__ Window window() const { return {params.window_left, params.window_right}; }
  __device__ __forceinline__ Loader<Config> loader() const { return {params, storage, warp, lane}; }

  /// What an item's steps have in common.
  struct Tile {
    int limit;  // greatest exponent that D' of a row may ask for where all rows travel in the tile's unit
    int unit;   // exponent of the partial sums besides the payload's and the row's own, there
  };
  __device__ __forceinline__ Tile tile_of(const Work& work) const {
    const std::uint32_t reach = storage.key_records[min(work.length - work.first_key, kKeyTile) - 1].reach;
    return {value_reach(reach), key_reach(reach) - tile_shift(value_reach(reach))};
  }

  /// dQ of 64 channels; asynchronous.
  __device__ __forceinline__ void issue_product(float (&x)[kScores], StepCounter<Config> now, int half) const {
    constexpr auto layout = TransposedKeyOperand<Config>::kLayout;
    const std::uint32_t keys = ptx::descriptor_low(storage.key_transposed, layout);
    const std::uint32_t payload =
        ptx::descriptor_low(storage.exchange[0], PayloadOperand::kLayout) + (now.exchange() * Config::kExchangeBytes >> 4);
    ptx::fence_registers(x);
    ptx::begin_products();
#pragma unroll
    for (int k = 0; k < kKeyTile / 32; ++k) {
      const std::uint64_t a = ptx::descriptor(payload + (k * exchange_offset(0, 32) >> 4), PayloadOperand::kLayout);
      const std::uint64_t b = ptx::descriptor(keys + ((half * 64 * 16 + k * 32 * Config::kHeadDim) >> 4), layout);
      if (k == 0)
        ptx::product_64x64<false>(x, a, b);
      else
        ptx::product_64x64<true>(x, a, b);
    }
    ptx::commit_products();
  }

  /// One step: 64 queries of one head against the tile's 128 keys. kLast: of the item; `next` is the one after it.
  template <bool kLast>
  __device__ __forceinline__ void step(StepCounter<Config> now, const Work& work, const Tile& tile, const Work& next) const {
    const std::uint32_t exchange = ptx::shared_address(storage.exchange[0]) + now.exchange() * Config::kExchangeBytes;
    const std::uint32_t records = ptx::shared_address(storage.stage[now.stage()].records);
    const std::uint32_t record = records + warp * kRowGroupBytes + pi_column(lane / 4) * 4;
    constexpr int kNextRow = (pi_column(8) - pi_column(0)) * 4;
    ptx::barrier_wait(&storage.stage_ready[now.stage()], now.stage_parity());
    ptx::barrier_wait(&storage.exchange_ready[now.exchange()], now.exchange_parity());
    Pairs pairs;
#pragma unroll
    for (int t = 0; t < kKeyGroups; ++t)
      ptx::load_matrices(pairs[t], exchange + load_line(warp, lane, 0) + t * exchange_offset(0, 16));
    const StepInfo info = storage.info(now);
    const int unit[2] = {ptx::load_shared_int(record + kDqUnit * kFieldBytes),
                         ptx::load_shared_int(record + kDqUnit * kFieldBytes + kNextRow)};
    const bool common = (info.flags & kCut) == 0 && step_reach(records) <= tile.limit;
    // All four warps are done with the step before and so are the consumers: its stage is free for the copies of a later step.
    const StepCounter<Config> later{now.count - 1 + Config::kStages};
    if (now.count > 0) loader().copy_step(later);

    const std::uint32_t maxima = row_maxima(pairs);
    const int exponent[2] = {max(payload_exponent(__float_as_uint(ptx::low_f16(maxima))), kLeastPayloadExponent),
                             max(payload_exponent(__float_as_uint(ptx::high_f16(maxima))), kLeastPayloadExponent)};
    round_payload(pairs, exchange + code_place(warp, lane), exponent);
    if (now.count > 0) loader().plan_ahead(later);
    int tile_unit[2] = {tile.unit, tile.unit};
    if (!common) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        tile_unit[half] = row_unit(record + half * kNextRow, storage.key_records, window(),
                                   info.query + 16 * warp + lane / 4 + 8 * half, info, work.first_key, work.length);
    }
    float scale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      scale[half] = power_of_two(clamp(unit[half] + tile_unit[half] + exponent[half], -126, 126));
    ptx::fence_async_reads();
    ptx::named_barrier_sync(kQueryWarpgroupBarrier, 128);  // the tensor core reads what all four warps have written
    // dS of an item's last step was the last to be made of K and V; and all four warps have read the key records.
    if constexpr (kLast) loader().copy_keys(next);

    const std::int32_t group = info.row / kGroup + warp;
    const bool owned = info.query + 16 * warp < work.length;  // later slots belong to another document
    const std::uint32_t staging = ptx::shared_address(storage.staging) + warp * Config::kStagingBytes;
#pragma unroll
    for (int half = 0; half < Config::kHalves; ++half) {
      float x[kScores];
      issue_product(x, now, half);
      if constexpr (Config::kPartials == PartialFormat::f16) {
        if (half == 0) ptx::wait_bulk_read();  // by the lane that sent the step before
        __syncwarp();
      }
      ptx::wait_products<0>();
      ptx::fence_registers(x);
      if (half == Config::kHalves - 1 && lane == 0) ptx::barrier_arrive(&storage.exchange_free[now.exchange()]);
      if constexpr (Config::kPartials == PartialFormat::f16)
        stage_partials(staging, x, scale, half, lane);
      else if (owned)
        add_partials<Config>(params.dq_partials, group, x, scale, half, lane);
    }
    if constexpr (Config::kPartials == PartialFormat::f16) {
      ptx::fence_async_reads();
      __syncwarp();
      if (owned && ptx::elect_lane()) {
        ptx::add_bulk_f16(static_cast<std::uint8_t*>(params.dq_partials) + static_cast<std::int64_t>(group) * Config::kStagingBytes,
                          staging, Config::kStagingBytes);
      }
    }
  }
};

/// All items of the block.
template <class Config>
__device__ __forceinline__ void make_query_gradients(const BackwardParams& params, Storage<Config>& storage, int thread) {
  const QueryWarp<Config> self{params, storage, __shfl_sync(kFullWarp, thread / 32, 0), thread % 32};
  StepCounter<Config> now;
  self.loader().start(kQueryWarpgroupBarrier);
  self.loader().copy_keys(storage.work[0]);
  for (int item = 0;; ++item) {
    ptx::barrier_wait(&storage.stage_ready[now.stage()], now.stage_parity());
    const Work& work = storage.work[item % Config::kWorkSlots];
    const int steps = work.steps;
    if (steps < 0) break;
    self.loader().copy_transposed_keys(work);
    ptx::barrier_wait(&storage.keys_ready, item & 1);
    ptx::barrier_wait(&storage.transposed_keys_ready, item & 1);
    const typename QueryWarp<Config>::Tile tile = self.tile_of(work);
    const Work& next = storage.work[(item + 1) % Config::kWorkSlots];
    const std::uint32_t last = now.count + steps - 1;
#pragma unroll 1
    for (; now.count != last; now = now.next()) self.template step<false>(now, work, tile, next);
    self.template step<true>(now, work, tile, next);
    now = now.next();
    ptx::named_barrier_sync(kQueryWarpgroupBarrier, 128);  // every warp has read Kt
  }
  if constexpr (Config::kPartials == PartialFormat::f16) ptx::wait_bulk_read();
  self.loader().finish();
}

}  // namespace flamia::sm90::backward
