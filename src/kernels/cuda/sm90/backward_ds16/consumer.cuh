// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup: 64 keys of the item's tile, whose dK and dV it sums in registers over all steps, and half of the channels of dQ.
//
// A step is one burst of products through two sets of 32 registers, X and Y, and the arithmetic that makes the next step's operands:
//
//   X    dV high ............ | next S .............. | P in place
//   Y    dV low | dQ of the step before | next dP ............... | dS
//   dK   += dS^T Q, in place, beside them
//   meanwhile    promote low, high    dQ leaves       exp2, codes   dS leaves
//
// The warpgroups take turns with their bursts, from dV's products to dQ's end: the other one's run beside exp2 and dS. The loop's back edge lies
// where no product is in flight.
#pragma once
#include <cstdint>

#include "../../ptx/registers.cuh"
#include "../backward/key_gradients.cuh"
#include "../split/tickets.cuh"
#include "key_scores.cuh"
#include "key_values.cuh"
#include "step_parts.cuh"

namespace flamia::sm90::ds16 {

using split::Ring;

/// A thread's registers for a step.
template <class Config>
struct StepRegisters {
  float x[kScores] = {};
  float y[kScores] = {};
  float narrow[16] = {};             // dQ of 32 channels
  std::uint32_t codes[kCodeWords];   // of P
  std::uint32_t ds[kGradientWords];  // dS

  /// What dQ passes through.
  __device__ __forceinline__ auto& dq() {
    if constexpr (Config::kQueryColumns == 64)
      return y;
    else
      return narrow;
  }
};

/// Where the block stands in its rings. `exchange` of a step is its early slot.
template <class Config>
struct Position {
  Ring<Config::kRing> early, before;  // of the step and of the one before it
  std::uint32_t count = 0;            // steps begun

  __device__ __forceinline__ std::uint32_t late_slot() const { return count % Config::kLateStages; }
  __device__ __forceinline__ std::uint32_t late_parity() const { return count / Config::kLateStages & 1; }
  __device__ __forceinline__ Position next() const { return {early.next(), early, count + 1}; }
};

/// What a step finds out about the next one while it has time.
struct NextStep {
  bool plain;   // neither it nor the one after it has masks
  bool copied;  // its late operands are known to be there
};

template <class Config>
struct Consumer {
  using Record = typename Config::Record;
  const BackwardParams& params;
  Storage<Config>& storage;
  std::uint32_t number;  // of the thread

  __device__ __forceinline__ Window window() const { return {params.window_left, params.window_right}; }
  // What follows from the thread's number is computed anew wherever it is needed: kept, it would be spilled, and reading a spilled register takes
  // hundreds of cycles here.
  __device__ __forceinline__ std::uint32_t thread() const { return ptx::kept(number); }
  __device__ __forceinline__ int lane() const { return static_cast<int>(thread() % 32); }
  /// Which of the two warpgroups this is: a uniform register, by a vote.
  __device__ __forceinline__ std::uint32_t group() const { return __any_sync(kFullWarp, thread() >= 128) ? 1u : 0u; }
  /// Index in the tile of the thread's first key; the second is 8 on.
  __device__ __forceinline__ int first_row() const {
    const std::uint32_t t = thread();
    return static_cast<int>(t / 32 * 16 + t % 32 / 4);
  }
  __device__ __forceinline__ Place place() const { return {thread()}; }
  __device__ __forceinline__ std::int32_t& references() const { return storage.references[threadIdx.x]; }

  /// Descriptor word of an operand in the block's storage. By way of the storage's own it is one addition.
  __device__ __forceinline__ std::uint32_t word(const std::uint8_t* operand, std::uint32_t stride) const {
    const auto offset = static_cast<std::uint32_t>(operand - reinterpret_cast<const std::uint8_t*>(&storage));
    return (ptx::shared_address(&storage) >> 4) + (offset >> 4 | stride >> 4 << 16);
  }
  /// The warpgroup's rows of K or V; `bytes`: of an element.
  __device__ __forceinline__ std::uint32_t rows_of(const std::uint8_t* operand, std::uint32_t group, int bytes = 1) const {
    return word(operand, RowsOperand<Config>::kLayout.k_stride) + group * (64 * Config::kHeadDim * bytes >> 4);
  }
  __device__ __forceinline__ std::uint32_t early_word(const std::uint8_t* operand, std::uint32_t slot) const {
    return word(operand, RowsOperand<Config>::kLayout.k_stride) + slot * (sizeof(EarlyStage<Config>) >> 4);
  }
  __device__ __forceinline__ std::uint32_t query16_word(std::uint32_t slot) const {
    return word(storage.late[0].query16, Rows16Operand<Config>::kLayout.mn_stride) + slot * (sizeof(LateStage<Config>) >> 4);
  }
  __device__ __forceinline__ std::uint32_t gradient_word(std::uint32_t slot) const {
    return word(storage.late[0].gradient_transposed, TransposedOperand<Config>::kLayout.k_stride) +
           slot * (sizeof(LateStage<Config>) >> 4);
  }
  __device__ __forceinline__ std::uint32_t records_of(std::uint32_t slot) const {
    return ptx::shared_address(storage.records[0]) + slot * Record::kStepBytes;
  }

  __device__ __forceinline__ void issue_scores_of(float (&x)[kScores], std::uint32_t slot, std::uint32_t group) const {
    issue_logits<Config>(x, rows_of(storage.key, group, kScoreBytes<Config::kScaleGroup>),
                         early_word(storage.early[0].query, slot));
  }
  __device__ __forceinline__ void issue_dp_of(float (&y)[kScores], std::uint32_t slot, std::uint32_t group) const {
    issue_scores<Config>(y, rows_of(storage.value, group), early_word(storage.early[0].gradient, slot));
  }
  __device__ __forceinline__ void issue_dq_of(float (&x)[Config::kQueryColumns / 2], std::uint32_t slot,
                                              std::uint32_t group) const {
    const std::uint32_t ds = word(storage.exchange[0], ExchangeOperand::kLayout.mn_stride) + slot * (Config::kExchangeBytes >> 4);
    const std::uint32_t key16 =
        word(storage.key16, Rows16Operand<Config>::kLayout.mn_stride) + group * (Config::kHeadDim == 128 ? 1024 >> 4 : 64 >> 4);
    issue_query_gradient<Config>(x, ds, key16);
  }

  /// P and its codes of a step whose scores are in X.
  template <bool kPlain, bool kLevel = false>
  __device__ __forceinline__ void finish_probabilities(StepRegisters<Config>& step, const StepFields& bias, const KeyPair& slope,
                                                       const BlockFactors& blocks, std::uint32_t slot, const Work& work) const {
    const std::uint32_t records = records_of(slot);
    float raise[2] = {1.0f, 1.0f};
    Visible visible{};
    if constexpr (!kPlain) {
      const StepInfo info = storage.info[slot];
      const int key = work.first_key + first_row(), of_tile = ptx::load_shared_int(records + Record::kReference);
      visible = visible_queries(window(), key, info.query, work.length, lane());
      references() = pack_halves(of_tile, of_tile);
      if ((info.flags & kCut) != 0) {
        const int in_tile = info.query % kKeyTile;
        references() = cut_references(raise, storage.tile_references[slot], of_tile, window(), key, info.query - in_tile);
      }
    }
    const float factor = Config::kOneFactor ? numerics::mul(params.softmax_scale, kLog2E) : 0.0f;
    float4 rho[2], fold[2];  // a group ahead
    const auto load = [&](int u) {
      if constexpr (Record::kPerToken) {
        rho[u % 2] = Config::kOneFactor ? four_of(factor) : query_field<Record>(records, Record::kRho, u, place());
        fold[u % 2] = query_field<Record>(records, Record::kFold, u, place());
      } else {
        rho[u % 2] = four_of(blocks.rho[u / 2]);
        fold[u % 2] = four_of(blocks.fold[u / 2]);
      }
    };
    load(0);
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      if (u < 3) load(u + 1);
      make_probabilities<!kPlain, Config::kFolded, kLevel || Config::kOneFactor>(step.x, step.codes, u, slope, rho[u % 2],
                                                                                 fold[u % 2], bias.of[u], visible, raise);
    }
    if constexpr (Config::kRecordCodes) {
      const StepInfo info = storage.info[slot];
      record_codes(params, step.x, visible, work.first_key + first_row(), info.row, lane());
    }
  }

  /// Shared address at which the lane stores dS of a step.
  __device__ __forceinline__ std::uint32_t exchange_of(std::uint32_t slot) const {
    return ptx::shared_address(storage.exchange[0]) + slot * Config::kExchangeBytes + exchange_place(thread());
  }

  /// dS of a step whose P is in X and dP in Y; it leaves for the exchange.
  __device__ __forceinline__ void finish_gradients(StepRegisters<Config>& step, const StepFields& offset, const KeyPair& value,
                                                   const Gains& gains, std::uint32_t to, std::uint32_t slot) const {
    const std::uint32_t records = records_of(slot);
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      float4 fold = four_of(1.0f);
      if constexpr (Record::kPerToken && !Config::kFolded) fold = query_field<Record>(records, Record::kFold, u, place());
      make_gradient(step.x, step.y, step.ds, u, value, gains.of[u / 2], fold, offset.of[u]);
      if constexpr (Config::kQueryGradients)
        ptx::store_matrices(to ^ (32 * u), step.ds[4 * u], step.ds[4 * u + 1], step.ds[4 * u + 2], step.ds[4 * u + 3]);
    }
  }

  /// What a thread must know to add dQ of a step to the partial sums: words of SumInfo, of which more is made where it is needed.
  struct SumRows {
    int group, rows;
    float unit[2];
  };
  __device__ __forceinline__ SumRows load_sum_rows(std::uint32_t count) const {
    const SumInfo& sums = storage.sums[count % Config::kSumSlots];
    const std::uint32_t t = thread();
    const float2 words = ptx::load_shared_float2(ptx::shared_address(&sums.group));
    SumRows rows{__float_as_int(words.x), __float_as_int(words.y), {1.0f, 1.0f}};
    if constexpr (Config::kPartials == PartialFormat::f16) {
      const std::uint32_t at = ptx::shared_address(sums.unit + (t / 32 % 4 * 16 + t % 32 / 4));
      rows.unit[0] = ptx::load_shared_float(at);
      rows.unit[1] = ptx::load_shared_float(at + 8 * sizeof(float));
    }
    return rows;
  }
  /// Adds dQ of a step to the partial sums.
  __device__ __forceinline__ void add_dq(const Partials<Config>& partials, const SumRows& rows) const {
    const std::uint32_t t = thread();
    const int warp = static_cast<int>(t / 32 % 4);
    if (rows.rows <= 16 * warp) return;  // slots of another document
    const int group = (rows.group < 0 ? ~rows.group : rows.group) + warp;
    auto* const to = static_cast<std::uint8_t*>(params.dq_partials) +
                     static_cast<std::int64_t>(group) * (kGroup * Config::kHeadDim * Partials<Config>::kBytes) +
                     (t / 128 * (kGroup * Config::kQueryColumns * Partials<Config>::kBytes) + t % 32 * 16);
    if (rows.group < 0)  // nothing has been added before
      partials.store(to);
    else
      partials.add(to);
  }

  __device__ __forceinline__ void arrive(std::uint64_t* barrier) const {
    if (ptx::elect_lane()) ptx::barrier_arrive(barrier);
  }

  /// S and dP of an item's first step: X and Y belong to the tensor core until begin(). No branch of a loop may lie in between, and dK must have been
  /// read, or the compiler serialises the products.
  __device__ __forceinline__ void issue_first(StepRegisters<Config>& step, const Position<Config>& now) const {
    const std::uint32_t slot = now.early.slot;
    ptx::barrier_wait(&storage.early_ready[slot], now.early.parity);
    ptx::fence_registers(step.x);
    ptx::fence_registers(step.y);
    issue_scores_of(step.x, slot, group());
    issue_dp_of(step.y, slot, group());
  }
  /// P and dS of an item's first step.
  __device__ __forceinline__ void begin(StepRegisters<Config>& step, const Position<Config>& now, const Work& work) const {
    const std::uint32_t slot = now.early.slot;
    const StepFields bias = load_step<Record>(records_of(slot), Record::kBias, place());
    const KeyPairs keys = load_keys(ptx::shared_address(storage.key_factors), place());
    if constexpr (Config::kLevelLoop) {
      const bool steep = __any_sync(kFullWarp, keys.slope.first != 1.0f || keys.slope.second != 1.0f);
      const std::uint32_t t = thread();
      if (t % 32 == 0) storage.steep[t / 128][t / 32 % 4] = steep ? 1 : 0;
    }
    ptx::wait_products<1>();
    ptx::fence_registers(step.x);
    finish_probabilities<false>(step, bias, keys.slope, load_blocks<Record>(records_of(slot)), slot, work);
    const StepFields offset = load_step<Record>(records_of(slot), Record::kOffset, place());
    ptx::wait_products<0>();
    ptx::fence_registers(step.y);
    if constexpr (Config::kQueryGradients && Config::kRing == 2)
      ptx::barrier_wait(&storage.exchange_ready[now.before.slot], now.before.parity);
    finish_gradients(step, offset, keys.value, load_gains<Record>(records_of(slot)), exchange_of(slot), slot);
    __syncwarp();
    arrive(&storage.early_free[slot]);
  }

  /// Registers in front of products that begin anew. Per token the compiler else moves what is left of P back to where it was; per block it spills.
  __device__ __forceinline__ void forget(float (&x)[kScores]) const {
    if constexpr (Config::kLevelLoop)
      ptx::fresh_registers(x);
    else
      ptx::fence_registers(x);
  }

  /// Whether neither this step nor the next has masks, nor, where that matters and is not known yet, the warpgroup's keys
  /// slopes.
  template <bool kLevel>
  __device__ __forceinline__ bool plain(std::uint32_t slot) const {
    const bool unmasked = !Config::kRecordCodes && (storage.info[slot].flags & (kMasked | kNextMasked)) == 0;
    if constexpr (Config::kLevelLoop && !kLevel) {
      const int4 steep = ptx::load_shared_int4(ptx::shared_address(storage.steep[group()]));
      return unmasked && (steep.x | steep.y | steep.z | steep.w) == 0;
    }
    return unmasked;
  }

  /// The rest of a step and, if the item has one, the beginning of the next. kPlain: neither has masks; kLevel: all slopes of
  /// the warpgroup's keys are 1. `copied` as the step before has found it.
  template <bool kMore, bool kPlain, bool kLevel = false>
  __device__ __forceinline__ NextStep step(KeyGradients<Config>& sums, StepRegisters<Config>& step, const Position<Config>& now,
                                           const Work& work, bool copied) const {
    auto &x = step.x, &y = step.y;
    const std::uint32_t late = now.late_slot(), own = group();
    if (!copied) ptx::barrier_wait(&storage.late_ready[late], now.late_parity());
    ptx::named_barrier_sync(1 + own, 128 * Config::kConsumers);
    forget(y);
    ptx::fence_registers(sums.key);
    issue_gradient<Config>(y, step.codes, gradient_word(late), 0);
    if constexpr (Config::kHalves == 2) {
      forget(x);
      issue_gradient<Config>(x, step.codes, gradient_word(late), 1);
    }
    issue_key_gradient<Config>(sums.key, step.ds, query16_word(late));
    ptx::fence_async_reads();  // dS that the thread has stored, before its warp says so
    const Position<Config> after = now.next();
    // The barrier is asked before the answer is needed: it takes a while.
    const bool exchanged = ptx::barrier_passed(&storage.exchange_ready[now.before.slot], now.before.parity);
    const SumInfo& info = storage.sums[now.count % Config::kSumSlots];
    const int of_tile = ptx::load_shared_int(ptx::shared_address(info.group_words + 3));
    float scale[2];
    scale[0] = scale[1] = power_of_two(max(of_tile - kCodeShift, -126));
    if (!kPlain && info.masked != 0) {
      const int packed = references();
      scale[0] = power_of_two(clamp(low_half(packed) - kCodeShift, -126, 127));
      scale[1] = power_of_two(clamp(high_half(packed) - kCodeShift, -126, 127));
    }
    if (!exchanged) ptx::barrier_wait(&storage.exchange_ready[now.before.slot], now.before.parity);
    ptx::wait_products<Config::kHalves>();
    ptx::fence_registers(y);
    promote<0>(sums.value, y, scale);
    ptx::fence_registers(step.dq());
    issue_dq_of(step.dq(), now.before.slot, own);
    if constexpr (Config::kHalves == 2) {
      ptx::wait_products<2>();
      ptx::fence_registers(x);
    }
    ptx::hold_operand(step.codes);
    const SumRows rows = load_sum_rows(now.count - 1);
    if constexpr (Config::kHalves == 2) promote<1>(sums.value, x, scale);
    if constexpr (kMore) {
      ptx::barrier_wait(&storage.early_ready[after.early.slot], after.early.parity);
      ptx::fence_registers(x);
      issue_scores_of(x, after.early.slot, own);
    }
    ptx::wait_products<kMore ? 1 : 0>();
    ptx::fence_registers(step.dq());
    ptx::fence_registers(sums.key);
    ptx::hold_operand(step.ds);
    __syncwarp();
    arrive(&storage.exchange_ready[now.early.slot]);
    const bool first = now.count == 0;
    // dQ is there and S is next in line: the other warpgroup may begin its products.
    ptx::named_barrier_arrive(2 - own, 128 * Config::kConsumers);
    Partials<Config> partials;
    partials.take(step.dq(), rows.unit);
    if (!partials.kHalf && !first) add_dq(partials, rows);  // in FP32 they are Y's registers, in FP16 half as many
    // Loads take long behind the operands of products: they are asked for before the wait in front of their use.
    StepFields bias;
    KeyPairs keys;
    BlockFactors blocks;
    NextStep next{false, false};
    if constexpr (kMore) {
      ptx::fence_registers(y);
      issue_dp_of(y, after.early.slot, own);
      keys = load_keys(ptx::shared_address(storage.key_factors), place());
      blocks = load_blocks<Record>(records_of(after.early.slot));
      bias = load_step<Record>(records_of(after.early.slot), Record::kBias, place());
    }
    if (partials.kHalf && !first) add_dq(partials, rows);
    if constexpr (kMore) {
      ptx::wait_products<1>();
      ptx::fence_registers(x);
      // The step after one with masks has none as a rule.
      if (kPlain || (Config::kStraightLoop && (storage.info[after.early.slot].flags & kMasked) == 0))
        finish_probabilities<true, kLevel>(step, bias, keys.slope, blocks, after.early.slot, work);
      else
        finish_probabilities<false>(step, bias, keys.slope, blocks, after.early.slot, work);
      const StepFields offset = load_step<Record>(records_of(after.early.slot), Record::kOffset, place());
      const Gains gains = load_gains<Record>(records_of(after.early.slot));
      const std::uint32_t to = exchange_of(after.early.slot);
      next.plain = plain<kLevel>(after.early.slot);
      if constexpr (Config::kAsksAhead)
        next.copied = ptx::barrier_passed(&storage.late_ready[after.late_slot()], after.late_parity());
      ptx::wait_products<0>();
      ptx::fence_registers(y);
      if constexpr (Config::kRing == 2) ptx::barrier_wait(&storage.exchange_ready[now.early.slot], now.early.parity);
      finish_gradients(step, offset, keys.value, gains, to, after.early.slot);
      __syncwarp();
      arrive(&storage.early_free[after.early.slot]);
    }
    __syncwarp();
    arrive(&storage.late_free[late]);
    next.plain = __any_sync(kFullWarp, next.plain);
    return next;
  }

  /// K in BF16, from an item's second step on (`begun` = number of the first): dQ is a step late, so that of the item before is in use until the first
  /// has passed.
  __device__ __forceinline__ void provide_key_values(const Work& work, std::uint32_t begun) const {
    const float common = Config::Record::kPerToken ? storage.sums[begun % Config::kSumSlots].group_words[0] : 1.0f;
    const KeyCodes<Config> keys{params, storage, work.key_head * params.slots + work.slot_start + work.first_key, common};
    make_key_values(storage, keys, thread(), group());
  }
  /// dQ of the block's last step.
  __device__ __forceinline__ void end(StepRegisters<Config>& step, const Position<Config>& after) const {
    ptx::barrier_wait(&storage.exchange_ready[after.before.slot], after.before.parity);
    ptx::fence_registers(step.dq());
    issue_dq_of(step.dq(), after.before.slot, group());
    ptx::wait_products<0>();
    ptx::fence_registers(step.dq());
    const SumRows rows = load_sum_rows(after.count - 1);
    Partials<Config> partials;
    partials.take(step.dq(), rows.unit);
    add_dq(partials, rows);
  }
};

/// All items of the block. Both warpgroups run the same instructions: twice the code did not fit the instruction cache.
/// Nothing is waited for between items but the copies of K and V, which come while dK leaves; S and dP of the next item's first step are made while
/// dV leaves, and dQ of the last step is left to that one.
template <template <class> class Maker, class Config>
__device__ __forceinline__ void consume(const BackwardParams& params, Storage<Config>& storage, GradientFormat format, bool rotated,
                                        int group) {
  // The number by a shuffle, which the compiler does not repeat as it would reading the special register.
  const Maker<Config> consumer{params, storage, __shfl_sync(kFullWarp, threadIdx.x, static_cast<int>(threadIdx.x) % 32)};
  KeyGradients<Config> sums{};
  StepRegisters<Config> step;
  Position<Config> now{{}, {Config::kRing - 1, 1}, 0};
  if (group == 1) ptx::named_barrier_arrive(1, 128 * Config::kConsumers);  // the first turn is the other's
  ptx::barrier_wait(&storage.keys_ready, 0);
  int steps = __shfl_sync(kFullWarp, storage.work[0].steps, 0);
  if (steps < 0) return;
  Work before{};  // whose dV has not left: none yet
  for (std::uint32_t item = 0;; ++item) {
    const Work& work = storage.work[item % Config::kWorkSlots];
    if constexpr (Config::kKeysFromMemory) make_key_scores(storage, consumer.thread(), consumer.group());
    consumer.issue_first(step, now);
    write_value_gradient(consumer, sums, before, format);
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 2; ++i) sums.key[i] = sums.value[i] = 0.0f;
    consumer.begin(step, now, work);
    const std::uint32_t begun = now.count, last = begun + steps - 1;
    NextStep next{false, false};
#pragma unroll 1
    for (;;) {
      if (now.count == begun + 1) consumer.provide_key_values(work, begun);
      if (now.count == last) break;
      if (!next.plain) {
        next = consumer.template step<true, false>(sums, step, now, work, next.copied);
        now = now.next();
        continue;
      }
      // Free of rare code and of jumps to it and back, which take long to be fetched.
#pragma unroll 1
      do {
        next = consumer.template step<true, true, Config::kLevelLoop>(sums, step, now, work, next.copied);
        now = now.next();
      } while (Config::kStraightLoop && next.plain && now.count != last);
    }
    __syncwarp();
    if (steps > 1) consumer.arrive(&storage.keys_free);
    consumer.template step<false, false>(sums, step, now, work, next.copied);
    if (steps == 1) {  // made of K, which may go then
      consumer.provide_key_values(work, begun);
      __syncwarp();
      consumer.arrive(&storage.keys_free);
    }
    now = now.next();
    write_key_gradient(consumer, sums, work, format, rotated);
    ptx::barrier_wait(&storage.keys_ready, (item & 1) ^ 1);
    steps = __shfl_sync(kFullWarp, storage.work[(item + 1) % Config::kWorkSlots].steps, 0);
    before = work;
    if (steps < 0) break;
  }
  write_value_gradient(consumer, sums, before, format);
  consumer.end(step, now);
}

}  // namespace flamia::sm90::ds16
