// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup: 64 keys of the item's tile, whose dK and dV it sums in registers over all steps.
//
// Every product of a step passes through two sets of 32 registers, X and Y, so that one product runs while the other's result is worked on:
//
//   X   dV low | dV high | next S, then P in place .......................... |
//   Y   dS ............................ | dK low | dK high | next dP | dS     |
//   meanwhile   key maxima |           | round dK's payload (Y's last use)
//               promote dV low | promote dV high | exp2 1, 2 | promote, exp2 3 | promote, exp2 4 | dS leaves
//
// The loop's back edge lies where no product is in flight.
#pragma once
#include <cstdint>

#include "../../ptx/registers.cuh"
#include "gradients.cuh"
#include "key_gradients.cuh"
#include "scores.cuh"
#include "storage.hpp"

namespace flamia::sm90::backward {

/// Descriptor word of an operand in the block's storage. `base` = that of the storage itself: found once, it leaves one addition an operand.
template <class Config>
__device__ __forceinline__ std::uint32_t storage_word(std::uint32_t base, const Storage<Config>& storage, const void* operand,
                                                      ptx::OperandLayout layout) {
  const auto offset =
      static_cast<std::uint32_t>(static_cast<const std::uint8_t*>(operand) - reinterpret_cast<const std::uint8_t*>(&storage));
  return base + (offset >> 4 | layout.k_stride >> 4 << 16);
}

/// Addresses of a stage's operands as descriptor words.
template <class Config>
struct StageOperands {
  std::uint32_t query, gradient, query_transposed, gradient_transposed, records;
};
template <class Config>
__device__ __forceinline__ StageOperands<Config> operands_of(std::uint32_t base, Storage<Config>& storage, std::uint32_t slot) {
  constexpr auto rows = RowsOperand<Config>::kLayout;
  constexpr auto transposed = TransposedOperand<Config>::kLayout;
  const std::uint32_t at = slot * static_cast<std::uint32_t>(sizeof(Stage<Config>)), words = base + (at >> 4);
  Stage<Config>& first = storage.stage[0];
  return {storage_word(words, storage, first.query(), rows), storage_word(words, storage, first.gradient(), rows),
          storage_word(words, storage, first.query_transposed(), transposed),
          storage_word(words, storage, first.gradient_transposed(), transposed), ptx::shared_address(first.records) + at};
}

template <class Config>
struct Consumer {
  const BackwardParams& params;
  Storage<Config>& storage;
  Place place;
  std::uint32_t base, keys, values;  // descriptor words: of the storage, the warpgroup's K and V rows

  __device__ __forceinline__ Window window() const { return {params.window_left, params.window_right}; }
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % 32; }
  /// Index in the tile of the thread's first key; the second is 8 on.
  __device__ __forceinline__ int first_row() const {
    return static_cast<int>(place.key_records() - ptx::shared_address(storage.key_records)) / static_cast<int>(sizeof(KeyRecord));
  }
  __device__ __forceinline__ std::int32_t& references() const { return storage.references[threadIdx.x]; }

  __device__ __forceinline__ bool masked(StepCounter<Config> now) const {
    return Config::kRecordCodes || (storage.info(now).flags & kMasked) != 0;
  }
  /// Codes of a step whose P is in X.
  template <bool kPlain>
  __device__ __forceinline__ void finish_codes(const float (&x)[kScores], std::uint32_t (&codes)[kCodeWords],
                                               StepCounter<Config> now, std::uint32_t records, const Work& work) const {
    float raise[2] = {1.0f, 1.0f};
    if (!kPlain && masked(now)) {
      const StepInfo info = storage.info(now);
      const int key = work.first_key + first_row();
      const Visible visible = visible_queries(window(), key, info.query, work.length, lane());
      storage.visible[threadIdx.x] = visible;
      if constexpr (Config::kRecordCodes)
        record_codes(params, x, visible, key, info.head * params.slots + work.slot_start + info.query, lane());
      references() = (info.flags & kCut) != 0 ? cut_references(raise, records, window(), key, info.query, references())
                                              : uncut_references(records);
      make_codes<Config, true>(codes, x, records, place, raise, visible);
    } else {
      make_codes<Config, false>(codes, x, records, place, raise, Visible{});
    }
  }

  /// dS of a step whose P is in X and dP in Y, and its way to the dQ warpgroup. `value`, `share` and the first `offset` have been asked for
  /// before dP was there.
  template <bool kPlain>
  __device__ __forceinline__ void finish_gradient(const float (&x)[kScores], float (&y)[kScores], const float (&value)[2],
                                                  float (&share)[2], const float4& offset, StepCounter<Config> now,
                                                  std::uint32_t records, const Work& work, int limit) const {
    const std::uint32_t line = place.exchange + now.exchange() * Config::kExchangeBytes;
    if (kPlain && step_reach(records) <= limit) {
      make_gradient_of_scores<Config, false, true>(x, y, records, place, value, offset, Visible{}, share, line);
    } else {
      if (!kPlain && masked(now))
        make_gradient_of_scores<Config, true, false>(x, y, records, place, value, offset, storage.visible[threadIdx.x], share,
                                                     line);
      else
        make_gradient_of_scores<Config, false, false>(x, y, records, place, value, offset, Visible{}, share, line);
      send_gradient_of_scores<Config>(y, share, line, now, place, storage, work, window());
    }
    __syncwarp();
    if (ptx::elect_lane()) ptx::barrier_arrive(&storage.exchange_ready[now.exchange()]);
  }

  /// The greatest exponent that D' of a row may ask for where all rows of a step travel in the tile's unit.
  __device__ __forceinline__ int reach_limit(const Work& work) const {
    return value_reach(storage.key_records[min(work.length - work.first_key, kKeyTile) - 1].reach);
  }

  /// First step of an item: S and dP without anything to hide behind.
  __device__ __forceinline__ void begin(float (&x)[kScores], float (&y)[kScores], std::uint32_t (&codes)[kCodeWords],
                                        StepCounter<Config> now, const Work& work, int limit) const {
    const StageOperands<Config> operands = operands_of(base, storage, now.stage());
    ptx::fence_registers(x);
    ptx::fence_registers(y);
    issue_scores<Config>(x, keys, operands.query);
    issue_scores<Config>(y, values, operands.gradient);
    ptx::wait_products<1>();
    ptx::fence_registers(x);
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      float slope[2];
      load_slopes<Config>(slope, operands.records, place, u / 2);
      exponentiate<Config>(x, u, slope, query_field(operands.records, kBias, u, place), operands.records, place);
    }
    finish_codes<false>(x, codes, now, operands.records, work);
    float value[2], share[2];
    load_key_field(value, place, kValue);
    load_key_field(share, place, kShare);
    const float4 offset = query_field(operands.records, kOffset, 0, place);
    ptx::barrier_wait(&storage.exchange_free[now.exchange()], now.exchange_parity() ^ 1);
    ptx::wait_products<0>();
    ptx::fence_registers(y);
    finish_gradient<false>(x, y, value, share, offset, now, operands.records, work, limit);
  }

  /// Factors that take dO's fold and P's 2^8 out of dV's products.
  template <bool kPlain>
  __device__ __forceinline__ void value_scale(float (&scale)[2], StepCounter<Config> now, std::uint32_t records) const {
    if (!kPlain && masked(now)) {
      const int packed = references();
      scale[0] = power_of_two(clamp(low_half(packed) - kCodeShift, -126, 127));
      scale[1] = power_of_two(clamp(high_half(packed) - kCodeShift, -126, 127));
    } else {
      scale[0] = scale[1] = power_of_two(max(tile_reference(records) - kCodeShift, -126));
    }
  }

  /// Whether neither this step nor the next has masks.
  __device__ __forceinline__ bool plain(StepCounter<Config> now) const {
    return !Config::kRecordCodes && (storage.info(now).flags & (kMasked | kNextMasked)) == 0;
  }

  /// The rest of a step and, if there is one, the beginning of the next.
  /// Returns whether the next step is plain; this one is treated as such if kPlain.
  template <bool kMore, bool kPlain>
  __device__ __forceinline__ bool step(KeyGradients<Config>& sums, float (&x)[kScores], float (&y)[kScores],
                                       std::uint32_t (&codes)[kCodeWords], StepCounter<Config> now, const Work& work,
                                       int limit) const {
    const StageOperands<Config> operands = operands_of(base, storage, now.stage());
    float scale[2];
    issue_gradient<Config>(x, codes, operands.gradient_transposed, 0);
    value_scale<kPlain>(scale, now, operands.records);
    std::uint32_t greatest[2];
    find_maxima<Config>(greatest, y, operands.records, place);
    ptx::need(greatest[0] & greatest[1]);  // or else the compiler moves the maxima behind the product they run beside
    if constexpr (Config::kHalves == 2) {
      ptx::wait_products<0>();
      ptx::fence_registers(x);
      promote<0>(sums.value, x, scale);
      ptx::fence_registers(x);
      issue_gradient<Config>(x, codes, operands.gradient_transposed, 1);
    }
    float key_scale[2];
    find_key_scale(key_scale, greatest);
    ptx::wait_products<0>();
    ptx::fence_registers(x);
    ptx::hold_operand(codes);
    promote<Config::kHalves - 1>(sums.value, x, scale);

    const StepCounter<Config> after = now.next();
    const StageOperands<Config> next = operands_of(base, storage, after.stage());
    if constexpr (kMore) {
      ptx::barrier_wait(&storage.stage_ready[after.stage()], after.stage_parity());
      ptx::fence_registers(x);
      issue_scores<Config>(x, keys, next.query);
    }
    round_key_payload<Config>(codes, y, key_scale, operands.records, place);
    lift_key_scale(key_scale, ptx::load_shared_int(operands.records + kFoldMax * kFieldBytes));
    float slope[2];
    float4 bias = {};
    if constexpr (kMore) {
      load_slopes<Config>(slope, next.records, place, 0);
      bias = query_field(next.records, kBias, 0, place);
    }
    ptx::fence_registers(y);
    issue_gradient<Config>(y, codes, operands.query_transposed, 0);
    if constexpr (kMore) {
      ptx::wait_products<1>();
      ptx::fence_registers(x);
      exponentiate<Config>(x, 0, slope, bias, next.records, place);
      exponentiate<Config>(x, 1, slope, query_field(next.records, kBias, 1, place), next.records, place);
      load_slopes<Config>(slope, next.records, place, 1);
    }
    ptx::wait_products<0>();
    ptx::fence_registers(y);
    promote<0>(sums.key, y, key_scale);
    if constexpr (Config::kHalves == 2) {
      ptx::fence_registers(y);
      issue_gradient<Config>(y, codes, operands.query_transposed, 1);
      if constexpr (kMore) exponentiate<Config>(x, 2, slope, query_field(next.records, kBias, 2, place), next.records, place);
      ptx::wait_products<0>();
      ptx::fence_registers(y);
      promote<1>(sums.key, y, key_scale);
    }
    ptx::hold_operand(codes);
    bool next_plain = false;
    if constexpr (kMore) {
      bias = query_field(next.records, kBias, 3, place);
      ptx::fence_registers(y);
      issue_scores<Config>(y, values, next.gradient);
      if constexpr (Config::kHalves == 1) {
        exponentiate<Config>(x, 2, slope, query_field(next.records, kBias, 2, place), next.records, place);
      }
      exponentiate<Config>(x, 3, slope, bias, next.records, place);
      finish_codes<kPlain>(x, codes, after, next.records, work);
      next_plain = plain(after);
      float value[2], share[2];
      load_key_field(value, place, kValue);
      load_key_field(share, place, kShare);
      const float4 offset = query_field(next.records, kOffset, 0, place);
      ptx::barrier_wait(&storage.exchange_free[after.exchange()], after.exchange_parity() ^ 1);
      ptx::wait_products<0>();
      ptx::fence_registers(y);
      finish_gradient<kPlain>(x, y, value, share, offset, after, next.records, work, limit);
    }
    return __any_sync(kFullWarp, next_plain);
  }

  /// dK and dV leave.
  __device__ __forceinline__ void write(KeyGradients<Config>& sums, const Work& work, GradientFormat format, bool rotated) const {
    write_key_gradient(*this, sums, work, format, rotated);
    write_value_gradient(*this, sums, work, format);
  }
};

/// All items of the block. Both warpgroups run the same instructions: twice the code did not fit the instruction cache.
template <class Config>
__device__ __forceinline__ void consume(const BackwardParams& params, Storage<Config>& storage, GradientFormat format, bool rotated,
                                        int group, int thread) {
  const int warp = __shfl_sync(kFullWarp, thread / 32, 0), lane = thread % 32;
  const std::uint32_t rows = static_cast<std::uint32_t>(group) * (Config::kKeysPerConsumer * Config::kHeadDim >> 4);
  const std::uint32_t base = ptx::descriptor_low(&storage, {});
  Consumer<Config> consumer{params,
                            storage,
                            {},
                            base,
                            storage_word(base, storage, storage.key, RowsOperand<Config>::kLayout) + rows,
                            storage_word(base, storage, storage.value, RowsOperand<Config>::kLayout) + rows};
  consumer.place.packed =
      64 * ptx::shared_address(storage.key_records + group * Config::kKeysPerConsumer + row_of(warp, lane, 0)) + lane % 4 * 16;
  consumer.place.exchange = ptx::shared_address(storage.exchange[0]) + store_line(group, warp, lane, 0);
  KeyGradients<Config> sums;
  float x[kScores] = {}, y[kScores] = {};
  StepCounter<Config> now;
  for (int item = 0;; ++item) {
    ptx::barrier_wait(&storage.stage_ready[now.stage()], now.stage_parity());
    const Work& work = storage.work[item % Config::kWorkSlots];
    const int steps = work.steps;
    if (steps < 0) return;
    ptx::barrier_wait(&storage.keys_ready, item & 1);
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 2; ++i) sums.key[i] = sums.value[i] = 0.0f;
    std::uint32_t codes[kCodeWords];
    const int limit = consumer.reach_limit(work);
    consumer.begin(x, y, codes, now, work, limit);
    const std::uint32_t last = now.count + steps - 1;
    bool plain = false;
#pragma unroll 1
    for (; now.count != last; now = now.next()) {
      // Steps without anything special have a loop body of their own, free of rare code.
      if (plain)
        plain = consumer.template step<true, true>(sums, x, y, codes, now, work, limit);
      else
        plain = consumer.template step<true, false>(sums, x, y, codes, now, work, limit);
    }
    consumer.template step<false, false>(sums, x, y, codes, now, work, limit);
    now = now.next();
    consumer.write(sums, work, format, rotated);
  }
}

}  // namespace flamia::sm90::backward
