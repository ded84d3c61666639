// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup: 64 queries of every item. Per key tile: S, correction, mask, row reference (phase32), P in two levels, PV.
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

inline constexpr float kMinusInfinity = -__builtin_huge_valf();

/// What a row carries from tile to tile; a thread works on two rows.
template <class Config>
struct RowState {
  float output[Config::kOutputs];
  float sum[2];  // of the thread's own keys
  float reference[2];
  bool not_a_number[2];
};

/// S = Q K^T for 64 queries and 128 keys.
template <class Config>
__device__ __forceinline__ void multiply_scores(float (&scores)[Config::kScores], const std::uint8_t* query,
                                                const std::uint8_t* key) {
  constexpr ptx::OperandLayout layout{128, 16 * Config::kHeadDim};
  constexpr std::uint32_t step = 2 * 128 >> 4;
  const std::uint32_t q = ptx::descriptor_low(query, layout), k = ptx::descriptor_low(key, layout);
  ptx::begin_products();
  ptx::product_f16_64x128<false>(scores, ptx::descriptor(q, layout), ptx::descriptor(k, layout));
#pragma unroll
  for (int i = 1; i < Config::kHeadDim / 16; ++i)
    ptx::product_f16_64x128<true>(scores, ptx::descriptor(q + i * step, layout), ptx::descriptor(k + i * step, layout));
  ptx::commit_products();
  ptx::wait_products<0>();
  ptx::fence_registers(scores);
}

template <bool kAccumulate, class Config>
__device__ __forceinline__ void multiply_block(float (&partial)[Config::kOutputs], const std::uint32_t* words,
                                               std::uint64_t values) {
  if constexpr (Config::kHeadDim == 128)
    ptx::product_f16_64x128<kAccumulate>(partial, words, values);
  else
    ptx::product_f16_64x64<kAccumulate>(partial, words, values);
}

/// P V of a tile.
template <class Config>
__device__ __forceinline__ void multiply_values(float (&partial)[Config::kOutputs], const std::uint32_t (&words)[4 * kBlocks],
                                                const std::uint8_t* value) {
  constexpr ptx::OperandLayout layout{16 * Config::kHeadDim, 128};
  constexpr std::uint32_t step = 2 * 16 * Config::kHeadDim >> 4;
  const std::uint32_t v = ptx::descriptor_low(value, layout);
#pragma unroll
  for (int i = 0; i < Config::kOutputs; ++i) partial[i] = 0.f;
  ptx::begin_products();
  multiply_block<false, Config>(partial, words, ptx::descriptor(v, layout));
#pragma unroll
  for (int b = 1; b < kBlocks; ++b) multiply_block<true, Config>(partial, words + 4 * b, ptx::descriptor(v + b * step, layout));
  ptx::commit_products();
  ptx::wait_products<0>();
  ptx::fence_registers(partial);
}

/// The scores' correction, then -infinity for keys that a row does not see. limit: the last key of the tile that each of the rows sees.
template <class Config>
__device__ __forceinline__ void correct_and_mask(float (&scores)[Config::kScores], const float* correction, const int (&limit)[2],
                                                 bool masked, int lane) {
#pragma unroll
  for (int j = 0; j < kTile / 8; ++j) {
    const float2 owed = *reinterpret_cast<const float2*>(correction + 8 * j + 2 * (lane % 4));
    scores[4 * j] += owed.x;
    scores[4 * j + 1] += owed.y;
    scores[4 * j + 2] += owed.x;
    scores[4 * j + 3] += owed.y;
  }
  if (!masked) return;
#pragma unroll
  for (int i = 0; i < Config::kScores; ++i)
    if (8 * (i / 4) + i % 2 + 2 * (lane % 4) > limit[i / 2 % 2]) scores[i] = kMinusInfinity;
}

/// Moves the rows' references by the tile's scores; O and l follow. NaN is skipped, and remembered.
template <class Config>
__device__ __forceinline__ void move_references(RowState<Config>& state, const float (&scores)[Config::kScores],
                                                const float (&rho)[2], bool first) {
  float correction[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float greatest = kMinusInfinity;
#pragma unroll
    for (int i = 0; i < Config::kScores; i += 4)
      greatest = ptx::max_or_nan(greatest, ptx::max_or_nan(scores[i + 2 * half], scores[i + 2 * half + 1]));
    state.not_a_number[half] |= greatest != greatest || rho[half] != rho[half];
    if (__any_sync(kFullWarp, greatest != greatest)) {
      ptx::mark();
      greatest = kMinusInfinity;
#pragma unroll
      for (int i = 0; i < Config::kScores; i += 4)
        greatest = fmaxf(greatest, fmaxf(scores[i + 2 * half], scores[i + 2 * half + 1]));
    }
    const float all = quad_maximum(greatest);
    // + 0 turns -0 into +0; nothing but NaN counts as 0
    const float x = all == kMinusInfinity || rho[half] != rho[half] ? 0.f : __fmul_rn(all, rho[half]);
    const float old = state.reference[half];
    state.reference[half] = __fadd_rn(first ? numerics::phase32_first(x) : numerics::phase32_next(old, x), 0.f);
    correction[half] = first ? 0.f : ptx::exp2_approximate(__fadd_rn(old, -state.reference[half]));
    state.sum[half] *= correction[half];
  }
  if (!__any_sync(kFullWarp, correction[0] != 1.f || correction[1] != 1.f)) return;
#pragma unroll
  for (int i = 0; i < Config::kOutputs; ++i) state.output[i] *= correction[i / 2 % 2];
}

/// scores <- exp2(t - m); NaN becomes 0, for the row is NaN anyway.
template <class Config>
__device__ __forceinline__ void exponentiate(float (&scores)[Config::kScores], const RowState<Config>& state,
                                             const float (&rho)[2]) {
  const bool beyond = fabsf(state.reference[0]) >= numerics::kGridLimit || fabsf(state.reference[1]) >= numerics::kGridLimit;
  if (__any_sync(kFullWarp, beyond)) {  // there t is rounded first, as it was for the maximum
    ptx::mark();
#pragma unroll
    for (int i = 0; i < Config::kScores; ++i) {
      const int half = i / 2 % 2;
      const float x = fabsf(state.reference[half]) >= numerics::kGridLimit
                          ? __fadd_rn(__fmul_rn(scores[i], rho[half]), -state.reference[half])
                          : __fmaf_rn(scores[i], rho[half], -state.reference[half]);
      scores[i] = fmaxf(ptx::exp2_approximate(x), 0.f);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Config::kScores; ++i)
    scores[i] = ptx::exp2_approximate(__fmaf_rn(scores[i], rho[i / 2 % 2], -state.reference[i / 2 % 2]));
  if (!__any_sync(kFullWarp, state.not_a_number[0] || state.not_a_number[1])) return;
  ptx::mark();
#pragma unroll
  for (int i = 0; i < Config::kScores; ++i) scores[i] = fmaxf(scores[i], 0.f);
}

template <class Config>
__device__ __forceinline__ void store_rows(const Params& p, const Work& work, const RowState<Config>& state, int first_row,
                                           int lane) {
  float inverse_sum[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool not_a_number = __any_sync(0xFu << (lane & ~3), state.not_a_number[half]);
    const float total = quad_sum(state.sum[half]), sum = not_a_number ? numerics::quiet_nan() : total;
    inverse_sum[half] = __frcp_rn(sum);
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
    const float scale = __fmul_rn(p.softmax_scale, 1.4426950408889634f);
    float rho[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool flagged =
          row[half] < work.document.length && p.query_flags[work.head * p.slots + work.document.slot_start + row[half]] != 0;
      rho[half] = flagged ? numerics::quiet_nan() : scale;
    }
    RowState<Config> state{};
    ptx::barrier_wait(&storage.query_ready, query_parity);
    for (int tile = work.tiles - 1; tile >= 0; --tile) {
      ptx::barrier_wait(&storage.tile_ready[stage.slot], stage.parity);
      if (present) {
        float scores[Config::kScores];
        multiply_scores<Config>(scores, storage.query + group * 64 * Config::kHeadDim * 2, storage.key[stage.slot]);
        const int first_key = tile * kTile;
        int limit[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
          limit[half] = (p.causal ? min(row[half], work.document.length - 1) : work.document.length - 1) - first_key;
        const bool masked = first_key + kTile > work.document.length || (p.causal && tile == work.tiles - 1);
        correct_and_mask<Config>(scores, storage.correction[stage.slot], limit, masked, lane);
        move_references<Config>(state, scores, rho, tile == work.tiles - 1);
        exponentiate<Config>(scores, state, rho);
        std::uint32_t words[4 * kBlocks];
        const RoundedRows rounded = round_rows(scores, words, p.first_level);
        float partial[Config::kOutputs];
        multiply_values<Config>(partial, words, storage.value[stage.slot]);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          state.sum[half] = __fmaf_rn(rounded.sum[half], rounded.first_level[half], state.sum[half]);
#pragma unroll
        for (int i = 0; i < Config::kOutputs; ++i)
          state.output[i] = __fmaf_rn(partial[i], rounded.first_level[i / 2 % 2], state.output[i]);
      }
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(&storage.tile_free[stage.slot]);
      stage.advance();
    }
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(&storage.query_free);
    query_parity ^= 1;
    if (present) store_rows<Config>(p, work, state, first_row, lane);
  }
}

}  // namespace flamia::sm90::sage3
