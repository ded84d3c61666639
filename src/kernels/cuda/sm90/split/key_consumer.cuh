// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup of the kernel of dK and dV: 64 keys of the item's tile, whose dK and dV it sums in registers over all steps.
//
// Every product of a step passes through two sets of 32 registers, X and Y; while one is being multiplied the other is worked on:
//
//   X   dV low ........... | dV high ....................... | next S .............. |
//   Y   dS                 | dK low ......... | dK high ............... | next dP .. | dS in place; P, codes in X
//       round dK's payload   promote dV low     dK low  dV high    dK high  (wait)     exp2, codes, dS, key maxima
//
// The loop's back edge lies where no product is in flight.
#pragma once
#include <cstdint>

#include "../backward/rows_out.cuh"
#include "key_tile.cuh"
#include "tickets.cuh"

namespace flamia::sm90::split {

template <class Config>
struct KeySums {
  float key[Config::kHeadDim / 2];    // dK without the softmax scale, rotated
  float value[Config::kHeadDim / 2];  // dV
};

/// Addresses of a stage's operands as descriptor words, of its records and of what the producer says about it.
struct StageOperands {
  std::uint32_t query, gradient, query_transposed, gradient_transposed, records, flags;
};
template <class Config>
__device__ __forceinline__ StageOperands operands_of(KeyStorage<Config>& storage, std::uint32_t slot) {
  constexpr auto rows = RowsOperand<Config>::kLayout;
  constexpr auto transposed = TransposedOperand<Config>::kLayout;
  const std::uint32_t at = slot * static_cast<std::uint32_t>(sizeof(QueryStage<Config>)), words = at >> 4;
  QueryStage<Config>& first = storage.stage[0];
  return {ptx::descriptor_low(first.query, rows) + words,
          ptx::descriptor_low(first.gradient, rows) + words,
          ptx::descriptor_low(first.query_transposed, transposed) + words,
          ptx::descriptor_low(first.gradient_transposed, transposed) + words,
          ptx::shared_address(first.records) + at,
          ptx::shared_address(&first.flags) + at};
}

/// A thread's registers for a step.
template <class Config>
struct StepRegisters {
  float x[kScores] = {};
  float y[kScores] = {};
  std::uint32_t codes[kCodeWords];  // of P
  StepFactors<Config> factors;
  std::uint32_t greatest[2];  // dS of the thread's two keys, in units of the payload: bits of the magnitude
  int references = 0;         // exponents R that dO's fold left in the thread's two keys of dV (int16 each)
};

template <class Config>
struct KeyConsumer {
  const BackwardParams& params;
  KeyStorage<Config>& storage;
  int group;             // of the two warpgroups
  std::uint32_t buffer;  // of K and V
  std::uint32_t quad;    // 16 bytes times the lane's place in its quad
  KeyPair pair;

  __device__ __forceinline__ Window window() const { return {params.window_left, params.window_right}; }
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ const KeyWork& work() const { return storage.keys[buffer].work; }
  /// Descriptor words of the warpgroup's 64 rows of K or V.
  __device__ __forceinline__ std::uint32_t rows_of(const std::uint8_t* first_buffer) const {
    return ptx::descriptor_low(first_buffer + group * Config::kKeysPerConsumer * Config::kHeadDim, RowsOperand<Config>::kLayout) +
           buffer * static_cast<std::uint32_t>(sizeof(KeyBuffer<Config>) >> 4);
  }
  __device__ __forceinline__ std::uint32_t keys() const { return rows_of(storage.keys[0].key); }
  __device__ __forceinline__ std::uint32_t values() const { return rows_of(storage.keys[0].value); }
  /// Index in the tile of the thread's first key; the second is 8 on.
  __device__ __forceinline__ int first_row() const {
    return group * Config::kKeysPerConsumer + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane() / 4;
  }
  static __device__ __forceinline__ bool masked(const StepFactors<Config>& factors) {
    return Config::kRecordCodes || (factors.flags & kMasked) != 0;
  }

  /// P, its codes and dS of a step whose scores are in X and whose dP is in Y.
  __device__ __forceinline__ void finish(StepRegisters<Config>& step, std::uint32_t slot, const StageOperands& operands,
                                         const HalfField& bias, const HalfField& offset) const {
    const std::uint32_t records = operands.records;
    const int of_tile = high_half(step.factors.fold_max);
    float raise[2] = {1.0f, 1.0f};
    step.greatest[0] = step.greatest[1] = 0;
    if (masked(step.factors)) {
      const QueryStage<Config>& stage = storage.stage[slot];
      const int key = work().first_key + first_row();
      const Visible visible = visible_queries(window(), key, stage.query_position, work().length, lane());
      step.references = (stage.flags & kCut) != 0
                            ? cut_references(raise, records, window(), key, stage.query_position, step.references)
                            : pack_halves(of_tile, of_tile);
      make_half<Config, 0, true>(step.x, step.y, step.codes, pair, step.factors, bias, offset, records, quad, raise, visible,
                                 step.greatest);
      make_half<Config, 1, true>(step.x, step.y, step.codes, pair, step.factors, load_half_field(records, kBias, 1, quad),
                                 load_half_field(records, kOffset, 1, quad), records, quad, raise, visible, step.greatest);
      if constexpr (Config::kRecordCodes) {
        record_codes(params, step.x, visible, key, stage.head * params.slots + work().slot_start + stage.query_position, lane());
      }
    } else {
      step.references = pack_halves(of_tile, of_tile);
      make_half<Config, 0, false>(step.x, step.y, step.codes, pair, step.factors, bias, offset, records, quad, raise, Visible{},
                                  step.greatest);
      make_half<Config, 1, false>(step.x, step.y, step.codes, pair, step.factors, load_half_field(records, kBias, 1, quad),
                                  load_half_field(records, kOffset, 1, quad), records, quad, raise, Visible{}, step.greatest);
    }
  }

  /// First step of an item.
  __device__ __forceinline__ void begin(StepRegisters<Config>& step, Ring<Config::kStages> now) const {
    const StageOperands operands = operands_of(storage, now.slot);
    ptx::barrier_wait(&storage.stage_ready[now.slot], now.parity);
    ptx::fence_registers(step.x);
    ptx::fence_registers(step.y);
    issue_scores<Config>(step.x, keys(), operands.query);
    issue_scores<Config>(step.y, values(), operands.gradient);
    step.factors = load_step_factors<Config>(operands.records, operands.flags);
    const HalfField bias = load_half_field(operands.records, kBias, 0, quad),
                    offset = load_half_field(operands.records, kOffset, 0, quad);
    ptx::wait_products<0>();
    ptx::fence_registers(step.x);
    ptx::fence_registers(step.y);
    finish(step, now.slot, operands, bias, offset);
  }

  /// Factors that take dO's fold and P's 2^8 out of dV's products.
  static __device__ __forceinline__ void value_scale(float (&scale)[2], int references) {
    scale[0] = power_of_two(clamp(low_half(references) - kCodeShift, -126, 127));
    scale[1] = power_of_two(clamp(high_half(references) - kCodeShift, -126, 127));
  }
  /// Factors that take the payload's exponents out of dK's products.
  static __device__ __forceinline__ void key_scale(float (&scale)[2], int exponents, int fold_max) {
    scale[0] = power_of_two(low_half(exponents));
    scale[1] = power_of_two(high_half(exponents));
    lift_key_scale(scale, fold_max);
  }

  /// The rest of a step and, if there is one, the beginning of the next.
  template <bool kMore>
  __device__ __forceinline__ void step(KeySums<Config>& sums, StepRegisters<Config>& step, Ring<Config::kStages> now) const {
    auto &x = step.x, &y = step.y;
    const StageOperands operands = operands_of(storage, now.slot);
    float scale[2], key_scales[2];
    std::uint32_t payload[kCodeWords];
    issue_gradient<Config>(x, step.codes, operands.gradient_transposed, 0);
    const int exponents = step_exponents(step.greatest);
    value_scale(scale, step.references);
    key_scale(key_scales, exponents, step.factors.fold_max);
    round_step_payload<Config>(payload, y, exponents, step.factors, operands.records, quad);
    ptx::fence_registers(y);
    issue_gradient<Config>(y, payload, operands.query_transposed, 0);
    ptx::wait_products<1>();
    ptx::fence_registers(x);
    promote<0>(sums.value, x, scale);
    if constexpr (Config::kHalves == 2) {
      ptx::fence_registers(x);
      issue_gradient<Config>(x, step.codes, operands.gradient_transposed, 1);
      ptx::wait_products<1>();
      ptx::fence_registers(y);
      promote<0>(sums.key, y, key_scales);
      ptx::fence_registers(y);
      issue_gradient<Config>(y, payload, operands.query_transposed, 1);
      ptx::wait_products<1>();
      ptx::fence_registers(x);
      promote<1>(sums.value, x, scale);
    }
    ptx::hold_operand(step.codes);

    const Ring<Config::kStages> after = now.next();
    const StageOperands next = operands_of(storage, after.slot);
    if constexpr (kMore) {
      ptx::barrier_wait(&storage.stage_ready[after.slot], after.parity);
      ptx::fence_registers(x);
      issue_scores<Config>(x, keys(), next.query);
      step.factors = load_step_factors<Config>(next.records, next.flags);
      ptx::wait_products<1>();
    } else {
      ptx::wait_products<0>();
    }
    ptx::fence_registers(y);
    promote<Config::kHalves - 1>(sums.key, y, key_scales);
    ptx::hold_operand(payload);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(&storage.stage_free[now.slot]);
    if constexpr (kMore) {
      ptx::fence_registers(y);
      issue_scores<Config>(y, values(), next.gradient);
      const HalfField bias = load_half_field(next.records, kBias, 0, quad),
                      offset = load_half_field(next.records, kOffset, 0, quad);
      ptx::wait_products<0>();
      ptx::fence_registers(x);
      ptx::fence_registers(y);
      finish(step, after.slot, next, bias, offset);
    }
  }

  /// dK and dV leave; K and V may be overwritten.
  __device__ __forceinline__ void write(KeySums<Config>& sums, GradientFormat format, bool rotated) const {
    const int key = work().first_key + first_row();
    const bool valid[2] = {key < work().length, key + 8 < work().length};
    const std::int64_t stride = static_cast<std::int64_t>(params.key_heads) * Config::kHeadDim;
    const std::int64_t at = (static_cast<std::int64_t>(work().token_start) + key) * stride +
                            static_cast<std::int64_t>(work().key_head) * Config::kHeadDim;
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(&storage.keys_free[buffer]);
    const float factor[2] = {params.softmax_scale, params.softmax_scale};
    write_turned_back<Config::kHeadDim>(params.d_key, format, at, 8 * stride, sums.key, factor, rotated, valid, lane());
    write_rows<Config::kHeadDim>(params.d_value, format, at, 8 * stride, sums.value, valid, lane());
  }
};

/// All items of the block. Both warpgroups run the same code: two copies of it would not fit the instruction cache.
template <class Config>
__device__ __forceinline__ void consume_keys(const BackwardParams& params, KeyStorage<Config>& storage, GradientFormat format,
                                             bool rotated, int thread, int group) {
  const int warp = __shfl_sync(kFullWarp, thread / 32, 0), lane = thread % 32;
  KeyConsumer<Config> consumer{params, storage, group, 0, static_cast<std::uint32_t>(lane % 4 * 16), {}};
  KeySums<Config> sums;
  StepRegisters<Config> step;
  Ring<Config::kStages> now;
  for (Ring<Config::kKeyBuffers> buffer;; buffer = buffer.next()) {
    ptx::barrier_wait(&storage.keys_ready[buffer.slot], buffer.parity);
    int left = __shfl_sync(kFullWarp, storage.keys[buffer.slot].work.steps, 0);
    if (left < 0) return;
    consumer.buffer = buffer.slot;
    consumer.pair =
        load_key_pair(ptx::shared_address(storage.keys[0].records + group * Config::kKeysPerConsumer + row_of(warp, lane, 0)) +
                      buffer.slot * static_cast<std::uint32_t>(sizeof(KeyBuffer<Config>)));
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 2; ++i) sums.key[i] = sums.value[i] = 0.0f;
    consumer.begin(step, now);
#pragma unroll 1
    for (; left > 1; --left, now = now.next()) consumer.template step<true>(sums, step, now);
    consumer.template step<false>(sums, step, now);
    now = now.next();
    consumer.write(sums, format, rotated);
  }
}

}  // namespace flamia::sm90::split
