// SPDX-License-Identifier: Apache-2.0
// The loader warpgroup: a thread copies operands, all 128 make what smoothing owes to the scores of a tile, q' . (k_j - k'), in FP32: a
// row of K is read by neighbouring lanes, whose sums are added up.
#pragma once
#include "kernels/cuda/ptx/barrier.cuh"
#include "kernels/cuda/ptx/bulk_copy.cuh"
#include "numerics/format.hpp"
#include "storage.hpp"

namespace flamia::sm90::sage3 {

inline constexpr std::uint32_t kSleep = 1000;  // nanoseconds a waiting thread sleeps at most

template <bool kBfloat>
__device__ __forceinline__ float low_of(std::uint32_t pair) {
  return kBfloat ? __uint_as_float(pair << 16) : __low2float(reinterpret_cast<const __half2&>(pair));
}
template <bool kBfloat>
__device__ __forceinline__ float high_of(std::uint32_t pair) {
  return kBfloat ? __uint_as_float(pair & 0xffff0000u) : __high2float(reinterpret_cast<const __half2&>(pair));
}

/// Lanes of a row, each with eight of its channels; the rows that a warp reads at once.
template <class Config>
inline constexpr int kRowLanes = Config::kHeadDim / 8;
template <class Config>
inline constexpr int kRows = 32 / kRowLanes<Config>;

/// A lane's eight channels of both means.
struct Means {
  float query[8], key[8];
};

/// The corrections of the warp's 32 keys, one a lane. `rows`: the lane's part of the first key's row, null for a warp without keys; `present`: of the warp's keys.
template <class Config, bool kBfloat>
__device__ __forceinline__ float corrections(const Means& means, const std::uint16_t* rows, std::int64_t stride, int present,
                                             int lane) {
  constexpr int kAhead = 8;  // loads in flight
  float mine = 0.f;
#pragma unroll 1
  for (int first = 0; first < present; first += kAhead * kRows<Config>) {
    uint4 piece[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int key = first + i * kRows<Config> + lane / kRowLanes<Config>;
      piece[i] = key < present ? __ldg(reinterpret_cast<const uint4*>(rows + key * stride)) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const std::uint32_t pairs[4] = {piece[i].x, piece[i].y, piece[i].z, piece[i].w};
      float sum = 0.f;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float key = c % 2 == 0 ? low_of<kBfloat>(pairs[c / 2]) : high_of<kBfloat>(pairs[c / 2]);
        sum = __fmaf_rn(means.query[c], __fadd_rn(key, -means.key[c]), sum);
      }
#pragma unroll
      for (int distance = 1; distance < kRowLanes<Config>; distance *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
      // sums of the rows read at once stand in the lanes of each: key k of these goes to lane first + k
      const float of_key = __shfl_sync(0xFFFFFFFFu, sum, lane % kRows<Config> * kRowLanes<Config>);
      if ((lane - first) / kRows<Config> == i && lane >= first) mine = of_key;
    }
  }
  return mine;
}

template <class Config>
__device__ __forceinline__ void load(const Params& p, Storage<Config>& storage, int thread) {
  Ring<Config::kStages> stage;
  std::uint32_t query_parity = 0;
  const int lane = thread % 32, channel = lane % kRowLanes<Config> * 8;
  Work work;
  for (int index = blockIdx.x; take_work(p, index, work); index += gridDim.x) {
    const std::int64_t query = work.head * p.slots + work.slot();
    const std::int64_t key_head = std::int64_t{work.key_head} * p.slots + work.document.slot_start;
    const float* const query_mean = p.query_means + query / kSlotAlign * Config::kHeadDim + channel;
    const float* const key_mean =
        p.key_means + (std::int64_t{work.document_index} * p.key_heads + work.key_head) * Config::kHeadDim + channel;
    Means means;
#pragma unroll
    for (int c = 0; c < 8; ++c) means.query[c] = __ldg(query_mean + c), means.key[c] = __ldg(key_mean + c);
    if (thread == 0) {
      ptx::barrier_wait_asleep(&storage.query_free, query_parity ^ 1, kSleep);
      ptx::barrier_arrive_expect(&storage.query_ready, Config::kQueryBytes);
      ptx::bulk_copy(storage.query, p.queries + query * Config::kHeadDim, Config::kQueryBytes, &storage.query_ready);
    }
    query_parity ^= 1;
    for (int tile = work.tiles - 1; tile >= 0; --tile) {
      const int position = tile * kTile + thread;
      const std::int64_t slot = key_head + position;
      const int first = tile * kTile + thread / 32 * 32, present = min(max(work.document.length - first, 0), 32);
      const std::uint16_t* const rows = static_cast<const std::uint16_t*>(p.key_rows.data) +
                                        (work.document.token_start + std::int64_t{first}) * p.key_rows.token_stride +
                                        work.key_head * p.key_rows.head_stride + channel;
      float correction = p.key_rows.dtype == DType::bf16
                             ? corrections<Config, true>(means, rows, p.key_rows.token_stride, present, lane)
                             : corrections<Config, false>(means, rows, p.key_rows.token_stride, present, lane);
      if (position < work.document.length && (p.key_flags[slot] | p.value_flags[slot]) != 0) correction = numerics::quiet_nan();
      ptx::barrier_wait_asleep(&storage.tile_free[stage.slot], stage.parity ^ 1, kSleep);
      storage.correction[stage.slot][thread] = correction;
      if (thread == 0) {
        const std::int64_t first = (key_head + std::int64_t{tile} * kTile) * Config::kHeadDim;
        ptx::bulk_copy(storage.key[stage.slot], p.keys + first, Config::kKeyBytes, &storage.tile_ready[stage.slot]);
        ptx::bulk_copy(storage.value[stage.slot], p.values + first, Config::kValueBytes, &storage.tile_ready[stage.slot]);
        ptx::barrier_arrive_expect(&storage.tile_ready[stage.slot], Config::kKeyBytes + Config::kValueBytes);
      } else {
        ptx::barrier_arrive(&storage.tile_ready[stage.slot]);
      }
      stage.advance();
    }
  }
}

}  // namespace flamia::sm90::sage3
