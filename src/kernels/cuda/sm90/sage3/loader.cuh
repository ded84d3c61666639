// SPDX-License-Identifier: Apache-2.0
// The loader warpgroup: a thread copies operands, all 128 make what smoothing owes to the scores of a tile, q' . (k_j - k'), by products of
// 16-bit numbers: K as it is, q' as a sum of three.
#pragma once
#include "kernels/cuda/ptx/barrier.cuh"
#include "kernels/cuda/ptx/bulk_copy.cuh"
#include "kernels/cuda/ptx/convert.cuh"
#include "kernels/cuda/ptx/half.cuh"
#include "kernels/cuda/ptx/mma_f16.cuh"
#include "numerics/format.hpp"
#include "storage.hpp"

namespace flamia::sm90::sage3 {

inline constexpr std::uint32_t kSleep = 1000;  // nanoseconds a waiting thread sleeps at most

/// A lane's part of q' as the B operand: channels 32 i + 8 c ... + 7 of chunk i (c = lane % 4), in the order in which K's rows are read; column 0 is
/// q' in 16 bits, columns 1 and 2 what is left, the others 0. FP16 has no range to spare: there the remainders are 2^11 and 2^22 times as
/// large.
template <class Config>
struct QueryParts {
  static constexpr int kChunks = Config::kHeadDim / 32;
  std::uint32_t word[kChunks][4];
  float owed;  // q' . k'
};
inline constexpr float kRemainder = 2048.f;

template <bool kBfloat>
__device__ __forceinline__ std::uint32_t pair_of(float low, float high) {
  return kBfloat ? ptx::pack_bf16x2(low, high) : ptx::pack_f16x2(low, high);
}
template <bool kBfloat>
__device__ __forceinline__ float low_of(std::uint32_t pair) {
  return kBfloat ? __uint_as_float(pair << 16) : ptx::low_f16(pair);
}
template <bool kBfloat>
__device__ __forceinline__ float high_of(std::uint32_t pair) {
  return kBfloat ? __uint_as_float(pair & 0xffff0000u) : ptx::high_f16(pair);
}

/// Of both means, FP32 rows.
template <class Config, bool kBfloat>
__device__ __forceinline__ void split_query(QueryParts<Config>& parts, const float* query, const float* key, int lane) {
  constexpr float up = kBfloat ? 1.f : kRemainder;
  const int column = lane / 4, first = lane % 4 * 8;
  float owed = 0.f;
#pragma unroll
  for (int i = 0; i < QueryParts<Config>::kChunks; ++i)
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int channel = 32 * i + first + 2 * w;
      float2 rest = __ldg(reinterpret_cast<const float2*>(query + channel));
      const float2 mean = __ldg(reinterpret_cast<const float2*>(key + channel));
      owed = __fmaf_rn(rest.x, mean.x, __fmaf_rn(rest.y, mean.y, owed));
      std::uint32_t word = pair_of<kBfloat>(rest.x, rest.y);
#pragma unroll
      for (int next = 1; next <= 2; ++next) {
        rest = {__fmul_rn(__fadd_rn(rest.x, -low_of<kBfloat>(word)), up),
                __fmul_rn(__fadd_rn(rest.y, -high_of<kBfloat>(word)), up)};
        if (column >= next) word = pair_of<kBfloat>(rest.x, rest.y);
      }
      parts.word[i][w] = column < 3 ? word : 0u;
    }
  owed += __shfl_xor_sync(0xFFFFFFFFu, owed, 1);
  parts.owed = owed + __shfl_xor_sync(0xFFFFFFFFu, owed, 2);
}

/// A lane's part of the rows of K that belong to keys lane / 4 and 8 on.
template <class Config>
struct KeyPieces {
  uint4 chunk[2][QueryParts<Config>::kChunks];
};

/// Of 16 keys; `rows`: the lane's part of the first one's row; `present` of them are there.
template <class Config>
__device__ __forceinline__ void load_pieces(KeyPieces<Config>& pieces, const std::uint16_t* rows, std::int64_t stride, int present,
                                            int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = lane / 4 + 8 * half;
#pragma unroll
    for (int i = 0; i < QueryParts<Config>::kChunks; ++i)
      pieces.chunk[half][i] =
          key < present ? __ldg(reinterpret_cast<const uint4*>(rows + key * stride + 32 * i)) : uint4{0, 0, 0, 0};
  }
}

/// All loads are under way where the first is waited for: left alone, the compiler asks for a few at a time.
template <class Config>
__device__ __forceinline__ void hold(KeyPieces<Config>& pieces) {
#pragma unroll
  for (auto& row : pieces.chunk)
#pragma unroll
    for (uint4& piece : row) ptx::hold(piece);
}

/// The corrections of the two keys, in each lane of their quad.
template <class Config, bool kBfloat>
__device__ __forceinline__ float2 corrections(const QueryParts<Config>& parts, const KeyPieces<Config>& pieces, int lane) {
  constexpr float down = kBfloat ? 1.f : 1.f / kRemainder;
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < QueryParts<Config>::kChunks; ++i) {
    const uint4 &first = pieces.chunk[0][i], &second = pieces.chunk[1][i];
    const std::uint32_t a[2][4] = {{first.x, second.x, first.y, second.y}, {first.z, second.z, first.w, second.w}};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if constexpr (kBfloat)
        ptx::warp_product_bf16(sums, a[k], parts.word[i][2 * k], parts.word[i][2 * k + 1]);
      else
        ptx::warp_product_f16(sums, a[k], parts.word[i][2 * k], parts.word[i][2 * k + 1]);
    }
  }
  // column 0 and 1 lie in the quad's first lane, column 2 in its second
  const int quad = lane & ~3;
  float2 result;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float third = __shfl_sync(0xFFFFFFFFu, sums[2 * half], quad + 1);
    const float all = __fmaf_rn(__fmaf_rn(third, down, sums[2 * half + 1]), down, sums[2 * half]);
    (half == 0 ? result.x : result.y) = __shfl_sync(0xFFFFFFFFu, all, quad) - parts.owed;
  }
  return result;
}

template <class Config>
__device__ __forceinline__ void load(const Params& p, Storage<Config>& storage, int thread) {
  Ring<Config::kStages> stage;
  std::uint32_t query_parity = 0;
  const int lane = thread % 32;
  const bool bfloat = p.key_rows.dtype == DType::bf16;
  // The key that the lane writes for: 16 by 16, then 8 by 8.
  const int own = thread / 32 * 32 + lane % 4 / 2 * 16 + lane % 2 * 8 + lane / 4;
  Work work;
  for (int index = blockIdx.x; take_work(p, index, work); index += gridDim.x) {
    const std::int64_t query = work.head * p.slots + work.slot();
    const std::int64_t key_head = std::int64_t{work.key_head} * p.slots + work.document.slot_start;
    const float* const query_mean = p.query_means + query / kSlotAlign * Config::kHeadDim;
    const float* const key_mean =
        p.key_means + (std::int64_t{work.document_index} * p.key_heads + work.key_head) * Config::kHeadDim;
    QueryParts<Config> parts;
    if (bfloat)
      split_query<Config, true>(parts, query_mean, key_mean, lane);
    else
      split_query<Config, false>(parts, query_mean, key_mean, lane);
    if (thread == 0) {
      ptx::barrier_wait_asleep(&storage.query_free, query_parity ^ 1, kSleep);
      ptx::barrier_arrive_expect(&storage.query_ready, Config::kQueryBytes);
      ptx::bulk_copy(storage.query, p.queries + query * Config::kHeadDim, Config::kQueryBytes, &storage.query_ready);
    }
    query_parity ^= 1;
    for (int tile = work.tiles - 1; tile >= 0; --tile) {
      const int position = tile * kTile + own;
      const std::int64_t slot = key_head + position;
      const int first = tile * kTile + thread / 32 * 32, present = work.document.length - first;
      const std::uint16_t* const rows = static_cast<const std::uint16_t*>(p.key_rows.data) +
                                        (work.document.token_start + std::int64_t{first}) * p.key_rows.token_stride +
                                        work.key_head * p.key_rows.head_stride + lane % 4 * 8;
      float correction = 0.f;
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        KeyPieces<Config> pieces;
        load_pieces<Config>(pieces, rows + 16 * i * p.key_rows.token_stride, p.key_rows.token_stride, present - 16 * i, lane);
        hold<Config>(pieces);
        const float2 two =
            bfloat ? corrections<Config, true>(parts, pieces, lane) : corrections<Config, false>(parts, pieces, lane);
        if (lane % 4 / 2 == i) correction = lane % 2 == 0 ? two.x : two.y;
      }
      if (position < work.document.length && (p.key_flags[slot] | p.value_flags[slot]) != 0) correction = numerics::quiet_nan();
      ptx::barrier_wait_asleep(&storage.tile_free[stage.slot], stage.parity ^ 1, kSleep);
      storage.correction[stage.slot][own] = correction;
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
