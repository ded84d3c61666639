// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup of the dQ kernel: 64 queries of the item, whose dQ it sums in registers over all keys that they see. In a step the
// products of S and dP of 64 keys and of dQ of the 64 before run together:
//
//   X    S ......... | P in place
//   Y    dP .................... | dS -> words
//   sum  += dS K of the step before, from the words
//
// The loop's back edge lies where no product is in flight.
#pragma once
#include <cstdint>

#include "../backward/rows_out.cuh"
#include "../split/tickets.cuh"
#include "query_config.hpp"
#include "step_parts.cuh"

namespace flamia::sm90::ds16 {

/// What stays the same from step to step for the thread's two queries.
struct QueryFactors {
  float bias[2], rho[2], gain[2], offset[2];
};

/// `record` = shared address of the record of the group of 16 queries that the warp owns.
template <class Record>
__device__ __forceinline__ QueryFactors load_query_factors(std::uint32_t record, int row) {
  QueryFactors factors;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t place = record + pi_column(row + 8 * half) * 4;
    factors.bias[half] = ptx::load_shared_float(place + Record::kBias);
    factors.offset[half] = ptx::load_shared_float(place + Record::kOffset);
    factors.rho[half] = ptx::load_shared_float(Record::kPerToken ? place + Record::kRho : record + Record::kBlockRho);
    factors.gain[half] = ptx::load_shared_float(record + Record::kGain);
    if constexpr (Record::kPerToken) {  // of the row, not of the tile
      factors.gain[half] *= ptx::load_shared_float(place + Record::kFold);
      const int reference = ptx::load_shared_int(record + Record::kReference);
      factors.offset[half] *= power_of_two(clamp(kCodeShift - reference, -126, 127));
    }
  }
  return factors;
}

/// A factor of the step's keys as a thread needs it: of the keys 8 j + 2 c and the next, or, where token-blocks share it, of each block.
template <bool kPerToken>
struct StepFactors {
  float of[kPerToken ? kKeyStep / 8 : kKeyStep / kBlock][kPerToken ? 2 : 1];
  /// Of the key of accumulator register i.
  __device__ __forceinline__ float at(int i) const { return kPerToken ? of[i / 4][i % 2] : of[i / 4 / (kBlock / 8)][0]; }
};
/// `records` = shared address of the record of the step's first key.
template <bool kPerToken>
__device__ __forceinline__ void load_step_factors(StepFactors<kPerToken>& slope, StepFactors<kPerToken>& value,
                                                  std::uint32_t records, int lane) {
  constexpr int bytes = static_cast<int>(sizeof(KeyFactors));
  if constexpr (kPerToken) {
#pragma unroll
    for (int j = 0; j < kKeyStep / 8; ++j) {
      const float4 two = ptx::load_shared_float4(records + (8 * j + lane % 4 * 2) * bytes);
      slope.of[j][0] = two.x, value.of[j][0] = two.y;
      slope.of[j][1] = two.z, value.of[j][1] = two.w;
    }
  } else {
#pragma unroll
    for (int b = 0; b < kKeyStep / kBlock; ++b) {
      const float2 one = ptx::load_shared_float2(records + b * kBlock * bytes);
      slope.of[b][0] = one.x, value.of[b][0] = one.y;
    }
  }
}

/// Keys of the step that a query sees: at least `first` and less than `end`, as offsets from the thread's first key.
struct SeenKeys {
  int first[2], end[2];
};
FLAMIA_LAYOUT_FN SeenKeys seen_keys(Window window, int query, int first_key, int length, int lane) {
  const int origin = first_key + 2 * (lane % 4);
  return {{window.first_key(query) - origin, window.first_key(query + 8) - origin},
          {window.last_key(query, length) + 1 - origin, window.last_key(query + 8, length) + 1 - origin}};
}

template <class Config>
struct QueryConsumer {
  using Record = typename Config::Record;
  const BackwardParams& params;
  QueryStorage<Config>& storage;
  int group;             // of the two warpgroups
  std::uint32_t buffer;  // of Q and dO'

  __device__ __forceinline__ Window window() const { return {params.window_left, params.window_right}; }
  static __device__ __forceinline__ int lane() { return ptx::thread_index() % 32; }
  static __device__ __forceinline__ int warp() { return ptx::thread_index() / 32 % 4; }
  __device__ __forceinline__ const QueryWork& work() const { return storage.queries[buffer].work; }
  /// Position of the warpgroup's first query, and of the thread's; the thread's second is 8 on.
  __device__ __forceinline__ int first_query() const { return work().first_query + group * Config::kRowsPerConsumer; }
  __device__ __forceinline__ int first_row() const { return first_query() + 16 * warp() + lane() / 4; }

  /// The warpgroup's rows of Q or dO'; `bytes`: of an element.
  __device__ __forceinline__ std::uint32_t rows_of(const std::uint8_t* first_buffer, int bytes = 1) const {
    return ptx::descriptor_low(first_buffer + group * Config::kRowsPerConsumer * Config::kHeadDim * bytes,
                               RowsOperand<Config>::kLayout) +
           buffer * static_cast<std::uint32_t>(sizeof(QueryBuffer<Config>) >> 4);
  }
  __device__ __forceinline__ std::uint32_t stage_word(const std::uint8_t* operand, std::uint32_t slot) const {
    return ptx::descriptor_low(operand, RowsOperand<Config>::kLayout) +
           slot * static_cast<std::uint32_t>(sizeof(KeyStage<Config>) >> 4);
  }
  __device__ __forceinline__ void issue_scores_of(float (&x)[kScores], std::uint32_t slot) const {
    issue_logits<Config>(x, rows_of(storage.queries[0].query, kScoreBytes<Config::kScaleGroup>),
                         stage_word(storage.stage[0].key, slot));
  }
  __device__ __forceinline__ void issue_dp_of(float (&y)[kScores], std::uint32_t slot) const {
    issue_scores<Config>(y, rows_of(storage.queries[0].gradient), stage_word(storage.stage[0].value, slot));
  }
  __device__ __forceinline__ void issue_dq_of(float (&sum)[Config::kSums], const std::uint32_t (&ds)[kGradientWords],
                                              std::uint32_t slot) const {
    issue_key_gradient<Config>(
        sum, ds,
        ptx::atom_descriptor_low(ptx::shared_address(storage.stage[0].key16), Rows16Operand<Config>::kLayout) +
            slot * static_cast<std::uint32_t>(sizeof(KeyStage<Config>) >> 4));
  }
  __device__ __forceinline__ std::uint32_t factors_of(std::uint32_t slot) const {
    return ptx::shared_address(storage.stage[0].factors) + slot * static_cast<std::uint32_t>(sizeof(KeyStage<Config>));
  }

  /// X = P 2^8 in place; invisible pairs become 0 by selection, after the exponential.
  __device__ __forceinline__ void finish_probabilities(float (&x)[kScores], const StepFactors<Record::kPerToken>& slope,
                                                       const QueryFactors& rows, int step, TileRange free) const {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int half = i / 2 % 2;
      x[i] = ptx::exp2_approximate(__fmaf_rn(x[i], slope.at(i) * rows.rho[half], rows.bias[half]));
    }
    if (step >= free.first && step <= free.last) return;
    const SeenKeys seen = seen_keys(window(), first_row(), step * kKeyStep, work().length, lane());
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int half = i / 2 % 2, key = i / 4 * 8 + i % 2;
      x[i] = key >= seen.first[half] && key < seen.end[half] ? x[i] : 0.0f;
    }
  }
  /// dS of a step whose P is in X and dP in Y. P of masked pairs is 0 and all factors are finite: so is their dS.
  static __device__ __forceinline__ void finish_gradients(const float (&x)[kScores], const float (&y)[kScores],
                                                          std::uint32_t (&ds)[kGradientWords],
                                                          const StepFactors<Record::kPerToken>& value, const QueryFactors& rows) {
#pragma unroll
    for (int word = 0; word < kGradientWords; ++word) {
      const int half = word % 2;
      const auto one = [&](int i) {  // records.hpp says which form; the products are those of make_gradient()
        if constexpr (Record::kPerToken) return x[i] * rows.gain[half] * __fmaf_rn(y[i], value.at(i), -rows.offset[half]);
        return x[i] * __fmaf_rn(y[i], fminf(value.at(i) * rows.gain[half], kGreatestFactor), -rows.offset[half]);
      };
      ds[word] = ptx::pack_bf16x2(one(2 * word), one(2 * word + 1));
    }
  }

  __device__ __forceinline__ void release(std::uint32_t slot) const {
    __syncwarp();
    if (ptx::elect_lane()) ptx::barrier_arrive(&storage.stage_free[slot]);
  }
  /// A step of the item of which this warpgroup sees nothing.
  __device__ __forceinline__ void skip(split::Ring<Config::kStages> now) const {
    ptx::barrier_wait(&storage.stage_ready[now.slot], now.parity);
    release(now.slot);
  }

  /// dS of a step; with kAccumulate dQ of the step before runs beside it, from the words that it overwrites.
  template <bool kAccumulate>
  __device__ __forceinline__ void step(float (&sum)[Config::kSums], std::uint32_t (&ds)[kGradientWords], const QueryFactors& rows,
                                       std::uint32_t before, split::Ring<Config::kStages> now, int step, TileRange free) const {
    float x[kScores], y[kScores];
    ptx::barrier_wait(&storage.stage_ready[now.slot], now.parity);
    // Behind the operands of products these would take long.
    StepFactors<Record::kPerToken> slope, value;
    load_step_factors(slope, value, factors_of(now.slot), lane());
    issue_scores_of(x, now.slot);
    issue_dp_of(y, now.slot);
    if constexpr (kAccumulate) {
      ptx::fence_registers(sum);
      issue_dq_of(sum, ds, before);
    }
    ptx::wait_products<kAccumulate ? 2 : 1>();
    ptx::fence_registers(x);
    finish_probabilities(x, slope, rows, step, free);
    ptx::wait_products<0>();
    ptx::fence_registers(y);
    if constexpr (kAccumulate) {
      ptx::fence_registers(sum);
      ptx::hold_operand(ds);
      release(before);
    }
    finish_gradients(x, y, ds, value, rows);
  }

  /// dQ leaves; Q and dO' may be overwritten.
  __device__ __forceinline__ void write(float (&sum)[Config::kSums], GradientFormat format, bool rotated) const {
    const int query = first_row();
    const bool valid[2] = {query < work().length, query + 8 < work().length};
    const std::int64_t stride = static_cast<std::int64_t>(params.query_heads) * Config::kHeadDim;
    const std::int64_t at = (static_cast<std::int64_t>(work().token_start) + query) * stride +
                            static_cast<std::int64_t>(work().head) * Config::kHeadDim;
    __syncwarp();
    if (ptx::elect_lane()) ptx::barrier_arrive(&storage.queries_free[buffer]);
    const float factor[2] = {params.softmax_scale, params.softmax_scale};
    write_turned_back<Config::kHeadDim>(params.d_query, format, at, 8 * stride, sum, factor, rotated, valid, lane());
  }
};

/// All items of the block. Both warpgroups run the same instructions: twice the code would not fit the instruction cache.
template <class Config>
__device__ __forceinline__ void consume_queries(const BackwardParams& params, QueryStorage<Config>& storage, GradientFormat format,
                                                bool rotated, int group) {
  QueryConsumer<Config> consumer{params, storage, group, 0};
  float sum[Config::kSums];
  std::uint32_t ds[kGradientWords];
  split::Ring<Config::kStages> now;
  for (split::Ring<Config::kQueryBuffers> buffer;; buffer = buffer.next()) {
    ptx::barrier_wait(&storage.queries_ready[buffer.slot], buffer.parity);
    const QueryWork& work = storage.queries[buffer.slot].work;
    const int length = __shfl_sync(kFullWarp, work.length, 0), tile = __shfl_sync(kFullWarp, work.first_query, 0);
    if (length < 0) return;
    consumer.buffer = buffer.slot;
    const TileRange all = steps_of_keys(consumer.window(), tile, Config::kQueryTile, length);
    const TileRange own =
        steps_of_keys(consumer.window(), tile + group * Config::kRowsPerConsumer, Config::kRowsPerConsumer, length);
    const TileRange free = free_steps(consumer.window(), tile + group * Config::kRowsPerConsumer, Config::kRowsPerConsumer, length);
    const QueryFactors rows = load_query_factors<typename Config::Record>(
        ptx::shared_address(storage.queries[buffer.slot].records) +
            (group * (Config::kRowsPerConsumer / kGroup) + consumer.warp()) * Config::Record::kBytes,
        consumer.lane() / 4);
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) sum[i] = 0.0f;
    int step = all.first;
    if (own.last >= own.first) {
      for (; step < own.first; ++step, now = now.next()) consumer.skip(now);
      consumer.template step<false>(sum, ds, rows, 0, now, step, free);
#pragma unroll 1
      for (; step < own.last; ++step) {
        const std::uint32_t before = now.slot;
        now = now.next();
        consumer.template step<true>(sum, ds, rows, before, now, step + 1, free);
      }
      ptx::fence_registers(sum);
      consumer.issue_dq_of(sum, ds, now.slot);
      ptx::wait_products<0>();
      ptx::fence_registers(sum);
      ptx::hold_operand(ds);
      consumer.release(now.slot);
      ++step;
      now = now.next();
    }
    for (; step <= all.last; ++step, now = now.next()) consumer.skip(now);
    consumer.write(sum, format, rotated);
  }
}

}  // namespace flamia::sm90::ds16
