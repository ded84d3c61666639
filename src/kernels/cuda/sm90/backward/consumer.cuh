// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup: 64 keys of the item's tile, whose dK and dV it sums in registers over all steps.
//
// Every product of a step passes through two sets of 32 registers, X and Y, so that one product runs while the other's result is worked on:
//
//   X   dV low | dV high | next S, then P in place .......................... |
//   Y   dS ............................ | dK low | dK high | next dP | dS     |
//   meanwhile   send dS | key maxima | round dK's payload (Y's last use)
//               promote dV low | promote dV high | exp2 1, 2 | promote, exp2 3 | promote, exp2 4
//
// The loop's back edge lies where no product is in flight.
#pragma once
#include <cstdint>

#include "gradients.cuh"
#include "rotation.cuh"
#include "rows_out.cuh"
#include "scores.cuh"
#include "storage.hpp"

namespace flamia::sm90::backward {

template <class Config>
struct KeyGradients {
  float key[Config::kHeadDim / 2];    // dK without the softmax scale, rotated
  float value[Config::kHeadDim / 2];  // dV
};

/// What a consumer carries from step to step besides sums and operands.
template <class Config>
struct ConsumerState {
  Ring<Config::kStages> stage;
  Ring<Config::kExchangeSlots> exchange;
  std::uint32_t keys_parity = 0;
};

/// The step a consumer is at.
struct StepPlace {
  int block = 0;   // step of its query head, from the item's first
  int member = 0;  // query head of the group
  __device__ __forceinline__ void advance(int blocks) {
    if (++block == blocks) {
      block = 0;
      ++member;
    }
  }
};

/// Addresses of a stage's operands as descriptor words.
template <class Config>
struct StageOperands {
  std::uint32_t query, gradient, query_transposed, gradient_transposed, records;
};
template <class Config>
__device__ __forceinline__ StageOperands<Config> operands_of(Storage<Config>& storage, std::uint32_t slot) {
  constexpr auto rows = RowsOperand<Config>::kLayout;
  constexpr auto transposed = TransposedOperand<Config>::kLayout;
  const std::uint32_t at = slot * static_cast<std::uint32_t>(sizeof(Stage<Config>)), words = at >> 4;
  Stage<Config>& first = storage.stage[0];
  return {ptx::descriptor_low(first.query, rows) + words, ptx::descriptor_low(first.gradient, rows) + words,
          ptx::descriptor_low(first.query_transposed, transposed) + words, ptx::descriptor_low(first.gradient_transposed, transposed) + words,
          ptx::shared_address(first.records) + at};
}

template <class Config, int kGroup_>
struct Consumer {
  const BackwardParams& params;
  Storage<Config>& storage;
  Place place;
  Window window;
  int warp;

  __device__ __forceinline__ std::uint32_t keys() const {
    return ptx::descriptor_low(storage.key + kGroup_ * Config::kKeysPerConsumer * Config::kHeadDim, RowsOperand<Config>::kLayout);
  }
  __device__ __forceinline__ std::uint32_t values() const {
    return ptx::descriptor_low(storage.value + kGroup_ * Config::kKeysPerConsumer * Config::kHeadDim, RowsOperand<Config>::kLayout);
  }

  /// P codes and dS of a step whose P is in X and dP in Y. Nothing is in flight.
  __device__ __forceinline__ void finish_scores(float (&x)[kScores], float (&y)[kScores], std::uint32_t (&codes)[kCodeWords], float (&undo)[2],
                                                int& remembered, std::uint32_t records, const Work& work, const StepPlace& at) const {
    const int step_query = (work.first_step + at.block) * kQueryStep;
    const StepShape shape = step_shape(window, step_query, work.first_key, work.length);
    if (shape.masked || Config::kRecordCodes) {
      const VisibleQueries visible = visible_queries(window, place.key, step_query, work.length, place.lane);
      clear_invisible(x, visible);
      if constexpr (Config::kRecordCodes) {
        const int head = work.key_head * (params.query_heads / params.key_heads) + at.member;
        record_codes<Config>(params, x, visible, place, head * params.slots + work.slot_start + step_query);
      }
      const Fold fold = shape.full_reach ? uncut_fold(records)
                                         : cut_fold(records, visible, step_query % kKeyTile != 0, remembered, place.lane);
      make_gradient_of_scores<Config, true>(codes, x, y, records, place, fold);
      clear_invisible(y, visible);
      undo[0] = fold.undo[0];
      undo[1] = fold.undo[1];
    } else {
      const Fold fold = uncut_fold(records);
      make_gradient_of_scores<Config, false>(codes, x, y, records, place, fold);
      undo[0] = fold.undo[0];
      undo[1] = fold.undo[1];
    }
  }

  /// First step of an item: S and dP without anything to hide behind.
  __device__ __forceinline__ void begin(float (&x)[kScores], float (&y)[kScores], std::uint32_t (&codes)[kCodeWords], float (&undo)[2],
                                        int& remembered, const ConsumerState<Config>& state, const Work& work) const {
    const StageOperands<Config> operands = operands_of(storage, state.stage.slot);
    issue_scores<Config>(x, keys(), operands.query);
    issue_scores<Config>(y, values(), operands.gradient);
    const Slopes<Config> slopes = load_slopes<Config>(operands.records, place);
    ptx::wait_products<1>();
    ptx::fence_registers(x);
#pragma unroll
    for (int u = 0; u < 4; ++u) exponentiate<Config>(x, operands.records, slopes, u, place.lane);
    ptx::wait_products<0>();
    ptx::fence_registers(y);
    finish_scores(x, y, codes, undo, remembered, operands.records, work, StepPlace{});
  }

  /// The rest of a step and, if there is one, the beginning of the next.
  template <bool kMore>
  __device__ __forceinline__ void step(KeyGradients<Config>& sums, float (&x)[kScores], float (&y)[kScores], std::uint32_t (&codes)[kCodeWords],
                                       float (&undo)[2], int& remembered, ConsumerState<Config>& state, const Work& work, StepPlace& at,
                                       std::uint32_t tile_reach) const {
    const StageOperands<Config> now = operands_of(storage, state.stage.slot);
    const int step_query = (work.first_step + at.block) * kQueryStep;
    const bool full_reach = step_shape(window, step_query, work.first_key, work.length).full_reach;

    issue_gradient<Config>(x, codes, now.gradient_transposed, 0);
    ptx::barrier_wait(&storage.exchange_free[state.exchange.slot], state.exchange.parity ^ 1);
    send_gradient_of_scores<Config>(y, place.exchange + state.exchange.slot * Config::kExchangeBytes, now.records, place, storage.key_records,
                                    window, step_query, work, tile_reach, full_reach);
    __syncwarp();
    if (place.lane == 0) ptx::barrier_arrive(&storage.exchange_ready[state.exchange.slot]);
    state.exchange.advance();

    int exponent[2];
    if constexpr (Config::kHalves == 2) {
      ptx::wait_products<0>();
      ptx::fence_registers(x);
      promote<0>(sums.value, x, undo);
      ptx::fence_registers(x);
      issue_gradient<Config>(x, codes, now.gradient_transposed, 1);
    }
    key_exponents<Config>(exponent, y, now.records, place.lane);
    ptx::wait_products<0>();
    ptx::fence_registers(x);
    hold_codes(codes);
    promote<Config::kHalves - 1>(sums.value, x, undo);

    Ring<Config::kStages> next_stage = state.stage;
    next_stage.advance();
    const StageOperands<Config> next = operands_of(storage, next_stage.slot);
    if constexpr (kMore) {
      ptx::barrier_wait(&storage.stage_ready[next_stage.slot], next_stage.parity);
      ptx::fence_registers(x);
      issue_scores<Config>(x, keys(), next.query);
    }
    round_key_payload<Config>(codes, y, exponent, now.records, place.lane);
    const float undo_key[2] = {power_of_two(exponent[0]), power_of_two(exponent[1])};
    ptx::fence_registers(y);
    issue_gradient<Config>(y, codes, now.query_transposed, 0);
    Slopes<Config> slopes;
    if constexpr (kMore) {
      slopes = load_slopes<Config>(next.records, place);
      ptx::wait_products<1>();
      ptx::fence_registers(x);
      exponentiate<Config>(x, next.records, slopes, 0, place.lane);
      exponentiate<Config>(x, next.records, slopes, 1, place.lane);
    }
    ptx::wait_products<0>();
    ptx::fence_registers(y);
    promote<0>(sums.key, y, undo_key);
    if constexpr (Config::kHalves == 2) {
      ptx::fence_registers(y);
      issue_gradient<Config>(y, codes, now.query_transposed, 1);
      if constexpr (kMore) exponentiate<Config>(x, next.records, slopes, 2, place.lane);
      ptx::wait_products<0>();
      ptx::fence_registers(y);
      promote<1>(sums.key, y, undo_key);
    }
    hold_codes(codes);
    state.stage = next_stage;
    at.advance(work.blocks);
    if constexpr (kMore) {
      ptx::fence_registers(y);
      issue_scores<Config>(y, values(), next.gradient);
      if constexpr (Config::kHalves == 1) exponentiate<Config>(x, next.records, slopes, 2, place.lane);
      exponentiate<Config>(x, next.records, slopes, 3, place.lane);
      ptx::wait_products<0>();
      ptx::fence_registers(y);
      finish_scores(x, y, codes, undo, remembered, next.records, work, at);
    }
  }

  /// dK and dV leave.
  __device__ __forceinline__ void write(KeyGradients<Config>& sums, const Work& work, GradientFormat format, bool rotated) const {
    if (rotated) rotate_back<Config::kHeadDim>(sums.key, place.lane);
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 2; ++i) sums.key[i] *= params.softmax_scale;
    const bool valid[2] = {place.key[0] < work.length, place.key[1] < work.length};
    const std::int64_t stride = static_cast<std::int64_t>(params.key_heads) * Config::kHeadDim;
    const std::int64_t at = (static_cast<std::int64_t>(work.token_start) + place.key[0]) * stride + static_cast<std::int64_t>(work.key_head) * Config::kHeadDim;
    write_rows<Config::kHeadDim>(params.d_key, format, at, 8 * stride, sums.key, valid, place.lane);
    write_rows<Config::kHeadDim>(params.d_value, format, at, 8 * stride, sums.value, valid, place.lane);
  }
};

/// All items of the block. kGroup_ is a template argument so that operand addresses are constants.
template <class Config, int kGroup_>
__device__ __forceinline__ void consume(const BackwardParams& params, Storage<Config>& storage, GradientFormat format, bool rotated, int thread) {
  const int warp = __shfl_sync(kFullWarp, thread / 32, 0), lane = thread % 32;
  const int row = kGroup_ * Config::kKeysPerConsumer + 16 * warp + lane / 4;
  Consumer<Config, kGroup_> consumer{params, storage, {}, {params.window_left, params.window_right}, warp};
  consumer.place.key_records = ptx::shared_address(storage.key_records + row);
  consumer.place.exchange = ptx::shared_address(storage.exchange[0]) + store_line(kGroup_, warp, lane, 0);
  consumer.place.lane = lane;
  ConsumerState<Config> state;
  KeyGradients<Config> sums;
  for (int item = 0;; ++item) {
    ptx::barrier_wait(&storage.stage_ready[state.stage.slot], state.stage.parity);
    const Work work = storage.work[item % Config::kWorkSlots];
    if (work.steps < 0) return;
    ptx::barrier_wait(&storage.keys_ready, state.keys_parity);
    state.keys_parity ^= 1;
    consumer.place.key[0] = work.first_key + row;
    consumer.place.key[1] = consumer.place.key[0] + 8;
    const std::uint32_t tile_reach = storage.key_records[min(work.length - work.first_key, kKeyTile) - 1].reach;
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 2; ++i) sums.key[i] = sums.value[i] = 0.0f;
    float x[kScores], y[kScores], undo[2];
    std::uint32_t codes[kCodeWords];
    int remembered = 0;
    StepPlace at;
    consumer.begin(x, y, codes, undo, remembered, state, work);
#pragma unroll 1
    for (int left = work.steps - 1; left > 0; --left) {
      consumer.template step<true>(sums, x, y, codes, undo, remembered, state, work, at, tile_reach);
    }
    consumer.template step<false>(sums, x, y, codes, undo, remembered, state, work, at, tile_reach);
    consumer.write(sums, work, format, rotated);
  }
}

}  // namespace flamia::sm90::backward
