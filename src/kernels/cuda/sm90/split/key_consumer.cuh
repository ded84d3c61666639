// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup of the kernel of dK and dV: 64 keys of the item's tile, whose dK and dV it sums in registers over all steps.
//
// Every product of a step passes through two sets of 32 registers, X and Y; while one is being multiplied the other is worked on:
//
//   X   dV low ........ | dV high ......... | next S ............ | then P in place
//   Y   dS              | dK low ..................... | dK high ......... | next dP ......... | dS
//       key maxima        round dK's payload  promote    promote   exp2 1, 2   exp2 3, 4, codes
//
// The loop's back edge lies where no product is in flight. The compiler sinks arithmetic below a wait for products, although it is meant to fill it,
// but not below a wait on a barrier: where a copy is first needed is chosen with that in mind.
#pragma once
#include <cstdint>

#include "../backward/gradients.cuh"
#include "../backward/rotation.cuh"
#include "../backward/rows_out.cuh"
#include "key_config.hpp"
#include "tickets.cuh"

namespace flamia::sm90::split {

template <class Config>
struct KeySums {
  float key[Config::kHeadDim / 2];    // dK without the softmax scale, rotated
  float value[Config::kHeadDim / 2];  // dV
};

/// Addresses of a stage's operands as descriptor words, and of its records.
struct StageOperands {
  std::uint32_t query, gradient, query_transposed, gradient_transposed, records;
};
template <class Config>
__device__ __forceinline__ StageOperands operands_of(KeyStorage<Config>& storage, std::uint32_t slot) {
  constexpr auto rows = RowsOperand<Config>::kLayout;
  constexpr auto transposed = TransposedOperand<Config>::kLayout;
  const std::uint32_t at = slot * static_cast<std::uint32_t>(sizeof(Stage<Config>)), words = at >> 4;
  Stage<Config>& first = storage.stage[0];
  return {ptx::descriptor_low(first.query, rows) + words, ptx::descriptor_low(first.gradient, rows) + words,
          ptx::descriptor_low(first.query_transposed, transposed) + words,
          ptx::descriptor_low(first.gradient_transposed, transposed) + words, ptx::shared_address(first.records) + at};
}

template <class Config, int kGroup_>
struct KeyConsumer {
  const BackwardParams& params;
  KeyStorage<Config>& storage;
  std::uint32_t buffer;  // of K and V
  Place place;

  __device__ __forceinline__ Window window() const { return {params.window_left, params.window_right}; }
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ const Work& work() const { return storage.keys[buffer].work; }
  /// Descriptor words of the warpgroup's 64 rows of K or V.
  __device__ __forceinline__ std::uint32_t rows_of(const std::uint8_t* first_buffer) const {
    return ptx::descriptor_low(first_buffer + kGroup_ * Config::kKeysPerConsumer * Config::kHeadDim, RowsOperand<Config>::kLayout) +
           buffer * static_cast<std::uint32_t>(sizeof(KeyBuffer<Config>) >> 4);
  }
  __device__ __forceinline__ std::uint32_t keys() const { return rows_of(storage.keys[0].key); }
  __device__ __forceinline__ std::uint32_t values() const { return rows_of(storage.keys[0].value); }
  /// Index in the tile of the thread's first key; the second is 8 on.
  __device__ __forceinline__ int first_row() const {
    return kGroup_ * Config::kKeysPerConsumer + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane() / 4;
  }
  __device__ __forceinline__ std::int32_t& references() const { return storage.references[threadIdx.x]; }
  __device__ __forceinline__ bool masked(std::uint32_t slot) const {
    return Config::kRecordCodes || (storage.stage[slot].info.flags & kMasked) != 0;
  }

  /// Codes of the first or second 32 queries of a step whose P is in X. Two parts, so that each follows its exponentials: the branch on the mask keeps
  /// the compiler from moving either elsewhere.
  template <int kHalf>
  __device__ __forceinline__ void finish_codes(const float (&x)[kScores], std::uint32_t (&codes)[kCodeWords], std::uint32_t slot,
                                               std::uint32_t records) const {
    float raise[2] = {1.0f, 1.0f};
    if (masked(slot)) {
      const StepInfo info = storage.stage[slot].info;
      const int key = work().first_key + first_row();
      if constexpr (kHalf == 0) {
        storage.visible[threadIdx.x] = visible_queries(window(), key, info.query, work().length, lane());
        references() = (info.flags & kCut) != 0 ? cut_references(raise, records, window(), key, info.query, references())
                                                : uncut_references(records);
      } else {
        find_raise(raise, records);
        if constexpr (Config::kRecordCodes) {
          record_codes<Config>(params, x, storage.visible[threadIdx.x], key,
                               info.head * params.slots + work().slot_start + info.query, lane());
        }
      }
      make_codes<Config, true, 2 * kHalf, 2 * kHalf + 2>(codes, x, records, place, raise, storage.visible[threadIdx.x]);
    } else {
      if (kHalf == 0) references() = uncut_references(records);
      make_codes<Config, false, 2 * kHalf, 2 * kHalf + 2>(codes, x, records, place, raise, Visible{});
    }
  }
  /// The factors that cut_references found, from the references that it left.
  __device__ __forceinline__ void find_raise(float (&raise)[2], std::uint32_t records) const {
    const int of_tile = high_half(uncut_references(records));
    raise[0] = power_of_two(clamp(of_tile - low_half(references()), 0, 127));
    raise[1] = power_of_two(clamp(of_tile - high_half(references()), 0, 127));
  }

  /// dS of a step whose P is in X and dP in Y.
  __device__ __forceinline__ void finish_gradient(const float (&x)[kScores], float (&y)[kScores], std::uint32_t slot,
                                                  std::uint32_t records) const {
    if (masked(slot))
      make_gradient_of_scores<Config, true>(x, y, records, place, storage.visible[threadIdx.x]);
    else
      make_gradient_of_scores<Config, false>(x, y, records, place, Visible{});
  }

  /// First step of an item: S and dP without anything to hide behind.
  __device__ __forceinline__ void begin(float (&x)[kScores], float (&y)[kScores], std::uint32_t (&codes)[kCodeWords],
                                        std::uint32_t slot) const {
    const StageOperands operands = operands_of(storage, slot);
    ptx::fence_registers(x);
    ptx::fence_registers(y);
    issue_scores<Config>(x, keys(), operands.query);
    issue_scores<Config>(y, values(), operands.gradient);
    ptx::wait_products<1>();
    ptx::fence_registers(x);
    exponentiate<Config, 0, 2>(x, operands.records, place);
    finish_codes<0>(x, codes, slot, operands.records);
    exponentiate<Config, 2, 4>(x, operands.records, place);
    finish_codes<1>(x, codes, slot, operands.records);
    ptx::wait_products<0>();
    ptx::fence_registers(y);
    finish_gradient(x, y, slot, operands.records);
  }

  /// Factors that take dO's fold and P's 2^8 out of dV's products.
  __device__ __forceinline__ void value_scale(float (&scale)[2]) const {
    const int packed = references();
    scale[0] = power_of_two(clamp(low_half(packed) - kCodeShift, -126, 127));
    scale[1] = power_of_two(clamp(high_half(packed) - kCodeShift, -126, 127));
  }
  /// Factors that take the payload's exponents out of dK's products.
  static __device__ __forceinline__ void key_scale(float (&scale)[2], int exponents) {
    scale[0] = power_of_two(low_half(exponents));
    scale[1] = power_of_two(high_half(exponents));
  }

  /// The rest of a step and, if there is one, the beginning of the next.
  template <bool kMore>
  __device__ __forceinline__ void step(KeySums<Config>& sums, float (&x)[kScores], float (&y)[kScores],
                                       std::uint32_t (&codes)[kCodeWords], Ring<Config::kStages> now) const {
    const StageOperands operands = operands_of(storage, now.slot);
    float scale[2];
    std::uint32_t payload[kCodeWords];
    issue_gradient<Config>(x, codes, operands.gradient_transposed, 0);
    const int exponents = key_exponents<Config>(y, operands.records, place);
    value_scale(scale);
    ptx::barrier_wait(&storage.transposed_ready[now.slot], now.parity);
    ptx::wait_products<0>();
    ptx::fence_registers(x);
    promote<0>(sums.value, x, scale);
    if constexpr (Config::kHalves == 2) {
      ptx::fence_registers(x);
      issue_gradient<Config>(x, codes, operands.gradient_transposed, 1);
    }
    round_key_payload<Config>(payload, y, exponents, operands.records, place);
    ptx::fence_registers(y);
    issue_gradient<Config>(y, payload, operands.query_transposed, 0);
    if constexpr (Config::kHalves == 2) {
      value_scale(scale);
      ptx::wait_products<1>();
      ptx::fence_registers(x);
      promote<1>(sums.value, x, scale);
    }
    ptx::hold_operand(codes);

    const Ring<Config::kStages> after = now.next();
    const StageOperands next = operands_of(storage, after.slot);
    if constexpr (kMore) {
      ptx::barrier_wait(&storage.queries_ready[after.slot], after.parity);
      ptx::fence_registers(x);
      issue_scores<Config>(x, keys(), next.query);
      ptx::wait_products<1>();
    } else {
      ptx::wait_products<0>();
    }
    key_scale(scale, exponents);
    ptx::fence_registers(y);
    promote<0>(sums.key, y, scale);
    if constexpr (Config::kHalves == 2) {
      ptx::fence_registers(y);
      issue_gradient<Config>(y, payload, operands.query_transposed, 1);
    }
    if constexpr (kMore) {
      if constexpr (Config::kHalves == 2)
        ptx::wait_products<1>();
      else
        ptx::wait_products<0>();
      ptx::fence_registers(x);
      exponentiate<Config, 0, 2>(x, next.records, place);
      finish_codes<0>(x, codes, after.slot, next.records);
      ptx::barrier_wait(&storage.gradients_ready[after.slot], after.parity);
    }
    if constexpr (Config::kHalves == 2) {
      key_scale(scale, exponents);
      ptx::wait_products<0>();
      ptx::fence_registers(y);
      promote<1>(sums.key, y, scale);
    }
    ptx::hold_operand(payload);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(&storage.stage_free[now.slot]);
    if constexpr (kMore) {
      ptx::fence_registers(y);
      issue_scores<Config>(y, values(), next.gradient);
      exponentiate<Config, 2, 4>(x, next.records, place);
      finish_codes<1>(x, codes, after.slot, next.records);
      ptx::wait_products<0>();
      ptx::fence_registers(y);
      finish_gradient(x, y, after.slot, next.records);
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
    if (rotated) rotate_back<Config::kHeadDim>(sums.key, lane());
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 2; ++i) sums.key[i] *= params.softmax_scale;
    write_rows<Config::kHeadDim>(params.d_key, format, at, 8 * stride, sums.key, valid, lane());
    write_rows<Config::kHeadDim>(params.d_value, format, at, 8 * stride, sums.value, valid, lane());
  }
};

/// All items of the block. kGroup_ is a template argument so that operand addresses are constants.
template <class Config, int kGroup_>
__device__ __forceinline__ void consume_keys(const BackwardParams& params, KeyStorage<Config>& storage, GradientFormat format,
                                             bool rotated, int thread) {
  const int warp = __shfl_sync(kFullWarp, thread / 32, 0), lane = thread % 32;
  KeyConsumer<Config, kGroup_> consumer{params, storage, 0, {}};
  consumer.place.quad = lane % 4 * 16;
  KeySums<Config> sums;
  float x[kScores] = {}, y[kScores] = {};
  Ring<Config::kStages> now;
  for (Ring<Config::kKeyBuffers> buffer;; buffer = buffer.next()) {
    ptx::barrier_wait(&storage.keys_ready[buffer.slot], buffer.parity);
    int left = __shfl_sync(kFullWarp, storage.keys[buffer.slot].work.steps, 0);
    if (left < 0) return;
    consumer.buffer = buffer.slot;
    consumer.place.key_records = ptx::shared_address(storage.keys[0].records + kGroup_ * Config::kKeysPerConsumer +
                                                     row_of(warp, lane, 0)) +
                                 buffer.slot * static_cast<std::uint32_t>(sizeof(KeyBuffer<Config>));
    ptx::barrier_wait(&storage.queries_ready[now.slot], now.parity);
    ptx::barrier_wait(&storage.gradients_ready[now.slot], now.parity);
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 2; ++i) sums.key[i] = sums.value[i] = 0.0f;
    std::uint32_t codes[kCodeWords];
    consumer.begin(x, y, codes, now.slot);
#pragma unroll 1
    for (; left > 1; --left, now = now.next()) consumer.template step<true>(sums, x, y, codes, now);
    consumer.template step<false>(sums, x, y, codes, now);
    now = now.next();
    consumer.write(sums, format, rotated);
  }
}

}  // namespace flamia::sm90::split
