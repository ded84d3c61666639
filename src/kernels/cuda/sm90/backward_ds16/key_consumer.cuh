// SPDX-License-Identifier: Apache-2.0
// The consumer of the kernel that makes dK and dV alone (deterministic mode): the steps of consumer.cuh without dQ, so dS need not leave its thread.
//
//   X    dV low | next S .............. | P in place
//   Y    dV high ... | next dP ............... | dS
//   dK   += dS^T Q, in place, beside them
//   meanwhile  promote low, high    exp2, codes
#pragma once
#include "consumer.cuh"

namespace flamia::sm90::ds16 {

template <class Config>
struct KeyConsumer : Consumer<Config> {
  using Record = typename Config::Record;
  using Consumer<Config>::storage;
  using Consumer<Config>::records_of;

  /// The rest of a step and, if the item has one, the beginning of the next, as Consumer::step().
  template <bool kMore, bool kPlain, bool kLevel = false>
  __device__ __forceinline__ NextStep step(KeyGradients<Config>& sums, StepRegisters<Config>& step, const Position<Config>& now,
                                           const Work& work, bool) const {
    auto &x = step.x, &y = step.y;
    const std::uint32_t late = now.late_slot(), own = this->group();
    ptx::barrier_wait(&storage.late_ready[late], now.late_parity());
    ptx::named_barrier_sync(1 + own, 128 * Config::kConsumers);
    ptx::fence_registers(x);
    ptx::fence_registers(sums.key);
    issue_gradient<Config>(x, step.codes, this->gradient_word(late), 0);
    if constexpr (Config::kHalves == 2) {
      ptx::fence_registers(y);
      issue_gradient<Config>(y, step.codes, this->gradient_word(late), 1);
    }
    issue_key_gradient<Config>(sums.key, step.ds, this->query16_word(late));
    const SumInfo& info = storage.sums[now.count % Config::kSumSlots];
    const int of_tile = ptx::load_shared_int(ptx::shared_address(info.group_words + 3));
    float scale[2];
    scale[0] = scale[1] = power_of_two(max(of_tile - kCodeShift, -126));
    if (!kPlain && info.masked != 0) {
      const int packed = this->references();
      scale[0] = power_of_two(clamp(low_half(packed) - kCodeShift, -126, 127));
      scale[1] = power_of_two(clamp(high_half(packed) - kCodeShift, -126, 127));
    }
    ptx::wait_products<Config::kHalves>();
    ptx::fence_registers(x);
    promote<0>(sums.value, x, scale);
    const std::uint32_t slot = now.next().early.slot;
    if constexpr (kMore) {
      ptx::barrier_wait(&storage.early_ready[slot], now.next().early.parity);
      ptx::fence_registers(x);
      this->issue_scores_of(x, slot, own);
    }
    if constexpr (Config::kHalves == 2) {
      ptx::wait_products<kMore ? 2 : 1>();
      ptx::fence_registers(y);
      promote<1>(sums.value, y, scale);
    }
    StepFields bias;
    KeyPairs keys;
    BlockFactors blocks;
    if constexpr (kMore) {
      ptx::fence_registers(y);
      this->issue_dp_of(y, slot, own);
      keys = load_keys(ptx::shared_address(storage.key_factors), this->place());
      blocks = load_blocks<Record>(records_of(slot));
      bias = load_step<Record>(records_of(slot), Record::kBias, this->place());
      ptx::wait_products<1>();
      ptx::fence_registers(x);
    } else {
      ptx::wait_products<0>();
    }
    ptx::fence_registers(sums.key);
    ptx::hold_operand(step.codes);
    ptx::hold_operand(step.ds);
    ptx::named_barrier_arrive(2 - own, 128 * Config::kConsumers);
    NextStep next{false, false};
    if constexpr (kMore) {
      this->template finish_probabilities<kPlain>(step, bias, keys.slope, blocks, slot, work);
      const StepFields offset = load_step<Record>(records_of(slot), Record::kOffset, this->place());
      const Gains gains = load_gains<Record>(records_of(slot));
      next.plain = this->template plain<true>(slot);
      ptx::need(step.codes[0] | step.codes[1] | step.codes[2] | step.codes[3] | step.codes[4] | step.codes[5] | step.codes[6] |
                step.codes[7]);  // or else the compiler moves the exponentials behind the wait
      ptx::wait_products<0>();
      ptx::fence_registers(y);
      this->finish_gradients(step, offset, keys.value, gains, 0, slot);
      __syncwarp();
      this->arrive(&storage.early_free[slot]);
    }
    __syncwarp();
    this->arrive(&storage.late_free[late]);
    next.plain = __any_sync(kFullWarp, next.plain);
    return next;
  }

  // Only dQ needs these.
  __device__ __forceinline__ void provide_key_values(const Work&, std::uint32_t) const {}
  __device__ __forceinline__ void end(StepRegisters<Config>&, const Position<Config>&) const {}
};

}  // namespace flamia::sm90::ds16
