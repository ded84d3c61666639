// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup: 64 queries of every item. Per key tile: S, mask, row reference (phase32), P in two levels, PV.
//
// PV of a tile and S of the next are issued together; the other warpgroup's arithmetic runs beside them. O is kept in units of the tile's first
// level, so that PV is added in place: the registers of a partial result would not be there.
#pragma once
#include <cuda_bf16.h>

#include "kernels/cuda/ptx/barrier.cuh"
#include "kernels/cuda/ptx/matrix.cuh"
#include "kernels/cuda/ptx/registers.cuh"
#include "kernels/cuda/ptx/wgmma_f16.cuh"
#include "kernels/cuda/ptx/wgmma_f16_registers.cuh"
#include "numerics/softmax.hpp"
#include "rounding.cuh"
#include "storage.hpp"

namespace flamia::sm90::sage3 {

/// What a row carries from tile to tile; a thread works on two rows.
template <class Config>
struct RowState {
  float output[Config::kOutputs];  // in units of `level`
  float level[2];                  // 2^kOperandShift times the first level of the row's last tile
  float sum[2];
  float reference[2];
  bool not_a_number[2];
};

/// d += S = Q K^T for 64 queries and 128 keys; asynchronous.
template <class Config>
__device__ __forceinline__ void issue_scores(float (&scores)[Config::kScores], const std::uint8_t* query, const std::uint8_t* key) {
  constexpr ptx::OperandLayout layout{128, 16 * Config::kHeadDim};
  constexpr std::uint32_t step = 2 * 128 >> 4;
  const std::uint32_t q = ptx::descriptor_low(query, layout), k = ptx::descriptor_low(key, layout);
#pragma unroll
  for (int i = 0; i < Config::kHeadDim / 16; ++i)
    ptx::product_f16_64x128<true>(scores, ptx::descriptor(q + i * step, layout), ptx::descriptor(k + i * step, layout));
  ptx::commit_products();
}

/// O += P V of a tile; asynchronous.
template <class Config>
__device__ __forceinline__ void issue_output(float (&output)[Config::kOutputs], const std::uint32_t (&words)[4 * kBlocks],
                                             const std::uint8_t* value) {
  constexpr ptx::OperandLayout layout{16 * Config::kHeadDim, 128};
  constexpr std::uint32_t step = 2 * 16 * Config::kHeadDim >> 4;
  const std::uint32_t v = ptx::descriptor_low(value, layout);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const std::uint64_t values = ptx::descriptor(v + b * step, layout);
    if constexpr (Config::kHeadDim == 128)
      ptx::product_f16_64x128<true>(output, words + 4 * b, values);
    else
      ptx::product_f16_64x64<true>(output, words + 4 * b, values);
  }
  ptx::commit_products();
}

/// The scores begin as what smoothing owes to them.
template <class Config>
__device__ __forceinline__ void begin_scores(float (&scores)[Config::kScores], const float* correction, int lane) {
#pragma unroll
  for (int j = 0; j < kTile / 8; ++j) {
    const float2 owed = *reinterpret_cast<const float2*>(correction + 8 * j + 2 * (lane % 4));
    scores[4 * j] = scores[4 * j + 2] = owed.x;
    scores[4 * j + 1] = scores[4 * j + 3] = owed.y;
  }
}

/// -infinity for keys that a row does not see. limit: the last key of the tile that each of the rows sees.
template <class Config>
__device__ __forceinline__ void mask_scores(float (&scores)[Config::kScores], const int (&limit)[2], int lane) {
#pragma unroll
  for (int i = 0; i < Config::kScores; ++i)
    if (8 * (i / 4) + i % 2 + 2 * (lane % 4) > limit[i / 2 % 2]) scores[i] = kMinusInfinity;
}

/// Rows that see NaN: it is remembered, and counts as a key that is not seen.
template <class Config>
__device__ __forceinline__ void remember_nan(RowState<Config>& state, float (&scores)[Config::kScores], Maxima& maxima, int lane) {
  const bool nan[2] = {maxima.row[0] != maxima.row[0], maxima.row[1] != maxima.row[1]};
  if (!__any_sync(kFullWarp, nan[0] | nan[1])) return;
  ptx::mark();
#pragma unroll
  for (int half = 0; half < 2; ++half) state.not_a_number[half] |= nan[half];
#pragma unroll
  for (int i = 0; i < Config::kScores; ++i) scores[i] = scores[i] != scores[i] ? kMinusInfinity : scores[i];
  maxima = find_maxima(scores, lane);
}

/// Moves the rows' references by the tile's maxima; returns what O and l are multiplied by.
template <class Config>
__device__ __forceinline__ float2 move_references(RowState<Config>& state, const Maxima& maxima, float rho, bool first) {
  float correction[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // + 0 turns -0 into +0; nothing but NaN counts as 0
    const float x = maxima.row[half] == kMinusInfinity ? 0.f : __fmul_rn(maxima.row[half], rho), old = state.reference[half];
    state.reference[half] = __fadd_rn(first ? numerics::phase32_first(x) : numerics::phase32_next(old, x), 0.f);
    correction[half] = first ? 0.f : ptx::exp2_approximate(__fadd_rn(old, -state.reference[half]));
  }
  return {correction[0], correction[1]};
}

/// How scores become t - m. Rows beyond the grid of references round t first, as it was for the maximum: their scores become t - m here.
template <class Config>
__device__ __forceinline__ Exponent exponent_of(const RowState<Config>& state, float (&scores)[Config::kScores], Maxima& maxima,
                                                float rho) {
  Exponent exponent{{rho, rho}, {state.reference[0], state.reference[1]}};
  const bool beyond[2] = {fabsf(state.reference[0]) >= numerics::kGridLimit, fabsf(state.reference[1]) >= numerics::kGridLimit};
  if (!__any_sync(kFullWarp, beyond[0] | beyond[1])) return exponent;
  ptx::mark();
  const auto move = [&](float& score, int half) {
    if (beyond[half]) score = __fadd_rn(__fmul_rn(score, rho), -state.reference[half]);
  };
#pragma unroll
  for (int i = 0; i < Config::kScores; ++i) move(scores[i], i / 2 % 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    move(maxima.block[0][half], half);
    move(maxima.block[1][half], half);
    move(maxima.row[half], half);
    if (beyond[half]) exponent.scale[half] = 1.f, exponent.reference[half] = 0.f;
  }
  return exponent;
}

/// From a tile's scores to the operand of P V, to which O and l are made to fit.
template <class Config>
__device__ __forceinline__ void make_probabilities(RowState<Config>& state, std::uint32_t (&words)[4 * kBlocks],
                                                   float (&scores)[Config::kScores], float constant_level, float rho, bool first,
                                                   int lane) {
  Maxima maxima = find_maxima(scores, lane);
  remember_nan<Config>(state, scores, maxima, lane);
  const float2 moved = move_references<Config>(state, maxima, rho, first);
  const Exponent exponent = exponent_of<Config>(state, scores, maxima, rho);
  const float correction[2] = {moved.x, moved.y};
  float level[2], inverse[2], factor[2], sums[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    level[half] = constant_level;
    factor[half] = correction[half];
    if (constant_level == 0.f)
      level[half] = row_level(ptx::exp2_approximate(__fmaf_rn(maxima.row[half], exponent.scale[half], -exponent.reference[half])));
    inverse[half] = ptx::reciprocal_approximate(level[half]);
    if (constant_level == 0.f) factor[half] *= state.level[half] * (inverse[half] * (1.f / (1 << kOperandShift)));
  }
  round_rows(words, sums, scores, maxima, exponent, level, inverse, lane);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    state.level[half] = level[half] * (1 << kOperandShift);
    state.sum[half] = __fmaf_rn(sums[2 * half], state.level[half], state.sum[half] * correction[half]);
  }
  if (!__any_sync(kFullWarp, factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
  for (int i = 0; i < Config::kOutputs; ++i) state.output[i] *= factor[i / 2 % 2];
}

template <class Config>
__device__ __forceinline__ void store_rows(const Params& p, const Work& work, const RowState<Config>& state, int first_row,
                                           int lane) {
  float inverse_sum[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool not_a_number = __any_sync(0xFu << (lane & ~3), state.not_a_number[half]);
    const float sum = not_a_number ? numerics::quiet_nan() : state.sum[half];
    inverse_sum[half] = __frcp_rn(sum) * state.level[half];
    const int row = first_row + lane / 4 + 8 * half;
    if (lane % 4 != 0 || row >= work.document.length) continue;
    const std::int64_t slot = work.head * p.slots + work.document.slot_start + row;
    p.lse[work.head * p.tokens + work.document.token_start + row] =
        numerics::natural_lse(state.reference[half], log2f(sum)) + p.mean_scores[slot];
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + lane / 4 + 8 * half;
    if (row >= work.document.length) continue;
    const std::int64_t token = std::int64_t{work.document.token_start} + row;
    auto* const out =
        static_cast<__nv_bfloat16*>(p.output) + (token * p.query_heads + work.head) * Config::kHeadDim + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < Config::kHeadDim / 8; ++j)
      *reinterpret_cast<__nv_bfloat162*>(out + 8 * j) = __floats2bfloat162_rn(
          state.output[4 * j + 2 * half] * inverse_sum[half], state.output[4 * j + 2 * half + 1] * inverse_sum[half]);
  }
}

template <class Config>
__device__ __forceinline__ void consume(const Params& p, Storage<Config>& storage, int group, int thread) {
  const int warp = __shfl_sync(kFullWarp, thread / 32, 0), lane = thread % 32;
  Ring<Config::kStages> stage;
  std::uint32_t query_parity = 0;
  Work work;
  for (int index = blockIdx.x; take_work(p, index, work); index += gridDim.x) {
    const int first_row = work.first + 64 * group + 16 * warp;  // of the warp
    const int row[2] = {first_row + lane / 4, first_row + lane / 4 + 8};
    const bool present = work.first + 64 * group < work.document.length;  // some query of the warpgroup is
    const float rho = __fmul_rn(p.softmax_scale, 1.4426950408889634f);
    RowState<Config> state{};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state.level[half] = 1.f;
      state.not_a_number[half] =
          row[half] < work.document.length && p.query_flags[work.head * p.slots + work.document.slot_start + row[half]] != 0;
    }
    ptx::barrier_wait(&storage.query_ready, query_parity);
    const auto hand_back = [&] {
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(&storage.tile_free[stage.slot]);
      stage.advance();
    };
    if (present) {
      const std::uint8_t* const query = storage.query + group * 64 * Config::kHeadDim * 2;
      float scores[Config::kScores];
      std::uint32_t words[4 * kBlocks];
      ptx::barrier_wait(&storage.tile_ready[stage.slot], stage.parity);
      begin_scores<Config>(scores, storage.correction[stage.slot], lane);
      ptx::fence_registers(scores);
      ptx::begin_products();
      issue_scores<Config>(scores, query, storage.key[stage.slot]);
      ptx::wait_products<0>();
      ptx::fence_registers(scores);
      for (int tile = work.tiles - 1;;
           --tile) {  // no product is in flight where the loop closes: the compiler would serialise them
        const bool first = tile == work.tiles - 1;
        const int first_key = tile * kTile;
        if (first_key + kTile > work.document.length || (p.causal && first)) {
          int limit[2];
#pragma unroll
          for (int half = 0; half < 2; ++half)
            limit[half] = (p.causal ? min(row[half], work.document.length - 1) : work.document.length - 1) - first_key;
          mask_scores<Config>(scores, limit, lane);
        }
        make_probabilities<Config>(state, words, scores, p.first_level, rho, first, lane);
        if (tile == 0) break;
        Ring<Config::kStages> next = stage;
        next.advance();
        ptx::barrier_wait(&storage.tile_ready[next.slot], next.parity);
        begin_scores<Config>(scores, storage.correction[next.slot], lane);
        ptx::fence_registers(scores);
        ptx::fence_registers(state.output);
        ptx::begin_products();
        issue_output<Config>(state.output, words, storage.value[stage.slot]);
        issue_scores<Config>(scores, query, storage.key[next.slot]);
        ptx::wait_products<0>();
        ptx::fence_registers(scores);
        ptx::fence_registers(state.output);
        hand_back();
      }
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(&storage.query_free);  // no more scores
      ptx::fence_registers(state.output);
      ptx::begin_products();
      issue_output<Config>(state.output, words, storage.value[stage.slot]);
      ptx::wait_products<0>();
      ptx::fence_registers(state.output);
      hand_back();
      store_rows<Config>(p, work, state, first_row, lane);
    } else {
      for (int tile = work.tiles; tile > 0; --tile) {
        ptx::barrier_wait(&storage.tile_ready[stage.slot], stage.parity);
        hand_back();
      }
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(&storage.query_free);
    }
    query_parity ^= 1;
  }
}

}  // namespace flamia::sm90::sage3
