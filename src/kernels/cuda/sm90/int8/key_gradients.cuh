// SPDX-License-Identifier: Apache-2.0
// The INT8 kernel of dK and dV. An item is a tile of 128 keys of a key head, 64 a consumer warpgroup, which work by themselves; a step is a block of
// 128 queries, of the query heads of the group one after the other. Everything is transposed: rows are keys, columns queries.
//
//   products    S | dP of queries 0-63       | dP of 64-127          | dV, low channels     | dK low, dV high, dK high
//   meanwhile     | P, its rows' greatest, codes | dS of 0-63, P's codes | dS's greatest, codes | dV += ..., dK += ...
//
// P = exp2(t - lse), S = K Qt, dV = P dO, dK = dS Q in INT8, dP = V dOt in BF16, dS = P (dP - D) in P's place. P and dS have a scale a key and 128
// queries: a row lies in four threads. Registers: dK and dV 128, P and dS 64, dP 32; P's codes go through shared memory, dS's lie in registers.
#pragma once
#include "../backward/rows_out.cuh"
#include "step.cuh"

namespace flamia::sm90::int8 {

template <int kHeadDim_>
struct KeyGradients {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = 240, kCopyRegisters = 24;
  static constexpr int kFixedBuffers = 1, kStages = 2;
  static constexpr int kFirstMeeting = 1;  // named barriers of the warpgroups
  static_assert(64 * kConsumers == kKeyTile);

  struct Fixed {
    alignas(128) std::uint8_t key[kKeyTile * kHeadDim];
    alignas(128) std::uint16_t value[kKeyTile * kHeadDim];
    float factor;  // softmax scale * log2 e * scale of the keys
  };
  struct Stage {
    alignas(128) std::uint8_t query[kBlock * kHeadDim];
    alignas(128) std::uint16_t gradient[kBlock * kHeadDim];
    alignas(128) std::uint16_t d[kBlock * 8];
    alignas(16) float lse[kBlock];
    float scales[2];  // of Q, of dO
  };
  struct Tail {
    alignas(128) std::uint8_t query_transposed[kBlock * kHeadDim];
    alignas(128) std::uint8_t gradient_transposed[kBlock * kHeadDim];
  };
  struct Own {
    Ones ones;
    alignas(128) std::uint8_t codes[kConsumers][64 * kBlock];  // of P
  };

  static __device__ __forceinline__ void prepare(Storage<KeyGradients>& storage, int lane) { write_ones(storage.own.ones, lane); }

  static __device__ __forceinline__ int heads(const BackwardParams& params) { return params.key_heads; }
  static __device__ __forceinline__ Work work(const BackwardParams& params, const Document& document, int first, int head) {
    const int length = document.length, last_key = min(first + kKeyTile, length) - 1;
    const int begin = params.window_right < 0 || first <= params.window_right ? 0 : first - params.window_right;
    const int end =
        params.window_left < 0 || last_key >= length - 1 - params.window_left ? length : last_key + params.window_left + 1;
    const int first_block = begin / kBlock, blocks = (end + kBlock - 1) / kBlock - first_block;
    const int group = params.query_heads / params.key_heads;
    return {document.slot_start, document.token_start, length, first, head, first_block, blocks * group, blocks};
  }
  static __device__ __forceinline__ void copy_fixed(const BackwardParams& params, const Work& work, Fixed& fixed,
                                                    std::uint64_t* ready) {
    const std::int64_t row = work.head * params.slots + work.slot_start + work.first;
    fixed.factor = __fmul_rn(__fmul_rn(params.softmax_scale, kLog2E), params.key.scales[row / kScaleSlots]);
    ptx::barrier_arrive_expect(ready, sizeof(fixed.key) + sizeof(fixed.value));
    ptx::bulk_copy(fixed.key, params.key.rows + row * kHeadDim, sizeof(fixed.key), ready);
    ptx::bulk_copy(fixed.value, params.value_rows16 + row * kHeadDim, sizeof(fixed.value), ready);
  }
  /// First query of a step, and its slot counted through all query heads.
  static __device__ __forceinline__ int first_query(const Work& work, int step) {
    return (work.first_step + step % work.unused) * kBlock;
  }
  static __device__ __forceinline__ std::int64_t row_of(const BackwardParams& params, const Work& work, int step) {
    const int head = work.head * (params.query_heads / params.key_heads) + step / work.unused;
    return head * params.slots + work.slot_start + first_query(work, step);
  }
  static __device__ __forceinline__ float2 step_scales(const BackwardParams& params, const Work& work, int step) {
    const std::int64_t at = row_of(params, work, step) / kScaleSlots;
    return make_float2(params.query.scales[at], params.gradient.scales[at]);
  }
  static __device__ __forceinline__ void copy_step(const BackwardParams& params, const Work& work, int step, const float2& scales,
                                                   Stage& stage, std::uint64_t* ready) {
    const std::int64_t row = row_of(params, work, step);
    stage.scales[0] = scales.x;
    stage.scales[1] = scales.y;
    ptx::barrier_arrive_expect(ready, sizeof(stage.query) + sizeof(stage.gradient) + sizeof(stage.lse) + sizeof(stage.d));
    ptx::bulk_copy(stage.query, params.query.rows + row * kHeadDim, sizeof(stage.query), ready);
    ptx::bulk_copy(stage.lse, params.row_lse + row, sizeof(stage.lse), ready);
    ptx::bulk_copy(stage.gradient, params.gradient_rows16 + row * kHeadDim, sizeof(stage.gradient), ready);
    ptx::bulk_copy(stage.d, params.row_d + 8 * row, sizeof(stage.d), ready);
  }
  static __device__ __forceinline__ void copy_tail(const BackwardParams& params, const Work& work, int step, Tail& tail,
                                                   std::uint64_t* ready) {
    const std::int64_t row = row_of(params, work, step);
    ptx::barrier_arrive_expect(ready, sizeof(tail.gradient_transposed) + sizeof(tail.query_transposed));
    ptx::bulk_copy(tail.gradient_transposed, params.gradient.transposed + row * kHeadDim, sizeof(tail.gradient_transposed), ready);
    ptx::bulk_copy(tail.query_transposed, params.query.transposed + row * kHeadDim, sizeof(tail.query_transposed), ready);
  }
  static __device__ __forceinline__ void compute(const BackwardParams& params, Storage<KeyGradients>& storage,
                                                 Consumer<KeyGradients>& self, const Work& work);
};

/// Pairs in which the query does not see the key.
__device__ __forceinline__ void mask_queries(float (&p)[kScores], float unseen, Window window, int key, int length, int first_query,
                                             int lane) {
  const int origin = first_query + 2 * (lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = key + 8 * half;
    const int first = (window.right < 0 ? 0 : row - window.right) - origin;
    const int end = (row >= length                                        ? 0
                     : window.left < 0 || row >= length - 1 - window.left ? length
                                                                          : row + window.left + 1) -
                    origin;
#pragma unroll
    for (int i = 2 * half; i < kScores; i += 4) {
      const int query = 8 * (i / 4);
      if (query < first || query >= end) p[i] = unseen;
      if (query + 1 < first || query + 1 >= end) p[i + 1] = unseen;
    }
  }
}

/// Codes of P of 64 queries, from the kFirst-th register on, into shared memory.
template <int kFirst>
__device__ __forceinline__ void store_codes(const float (&p)[kScores], const float (&inverse)[2], std::uint32_t lane_base) {
#pragma unroll
  for (int w = kFirst / 4; w < kFirst / 4 + kCodeWords / 2; ++w) store_code_word<kBlock>(lane_base, w, code_word(p, w, inverse));
}

/// P of 64 keys and the step's queries, in place of S.
__device__ __forceinline__ void probabilities(float (&p)[kScores], float factor, const float (&lse_of_queries)[kBlock], int lane) {
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j) {
    const float2 lse = *reinterpret_cast<const float2*>(&lse_of_queries[8 * j + 2 * (lane % 4)]);
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; ++i) p[i] = ptx::exp2_approximate(__fmaf_rn(p[i], factor, i % 2 == 0 ? -lse.x : -lse.y));
  }
}

/// dS = P (dP - D) for 64 queries of the step, in P's place.
template <int kFirst>
__device__ __forceinline__ void gradient_in_place(float (&p)[kScores], const float (&gradient)[kScores / 2]) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) p[kFirst + i] = __fmul_rn(p[kFirst + i], gradient[i]);
}

template <int kHeadDim>
__device__ __forceinline__ void KeyGradients<kHeadDim>::compute(const BackwardParams& params, Storage<KeyGradients>& storage,
                                                                Consumer<KeyGradients>& self, const Work& work) {
  const Window window{params.window_left, params.window_right};
  const Fixed& fixed = storage.fixed[self.fixed.slot];
  const Tail& tail = storage.tail;
  const int first_key = work.first + 64 * self.index, key = first_key + self.first_row();
  const std::uint8_t* const keys = fixed.key + 64 * kHeadDim * self.index;
  const std::uint16_t* const values = fixed.value + 64 * kHeadDim * self.index;
  const std::uint8_t* const p_codes = storage.own.codes[self.index];
  const std::uint32_t p_at = ptx::shared_address(p_codes) + static_cast<std::uint32_t>(16 * kBlock * self.warp + 4 * self.lane);
  const std::uint16_t* const ones = &storage.own.ones.element[0][0][0];
  const float key_factor = fixed.factor;
  const int meeting = kFirstMeeting + self.index;
  float d_key[kHeadDim / 2], d_value[kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) d_key[i] = d_value[i] = 0.0f;

#pragma unroll 1
  for (int step = 0; step < work.steps; ++step) {
    ptx::barrier_wait(&storage.stage_ready[self.stage.slot], self.stage.parity);
    const Stage& stage = storage.stage[self.stage.slot];
    const int query = first_query(work, step), last_key = first_key + 63;
    const bool masked = __any_sync(kFullWarp, (window.right >= 0 && last_key > query + window.right) ||
                                                  (window.left >= 0 && query + kBlock - 1 - first_key > window.left) ||
                                                  query + kBlock > work.length || last_key >= work.length);
    const float query_scale = stage.scales[0], gradient_scale = stage.scales[1],
                factor = above_zero(__fmul_rn(key_factor, query_scale));

    int product[kScores];
    float p[kScores], first_gradient[kScores / 2];
    issue_scores<kHeadDim>(product, keys, stage.query);
    const bool beyond =
        __any_sync(kFullWarp, fmaxf(fabsf(stage.lse[self.lane]), fabsf(stage.lse[self.lane + 32])) >= kGridEnd ||
                                  fmaxf(fabsf(stage.lse[self.lane + 64]), fabsf(stage.lse[self.lane + 96])) >= kGridEnd);
    ptx::wait_products<0>();
    ptx::fence_registers(product);
    const float left = scores_of(p, product, factor, beyond);
    if (masked) mask_queries(p, kMinusInfinity, window, key, work.length, query, self.lane);
    probabilities(p, left, stage.lse, self.lane);
    issue_gradient<kHeadDim, false>(first_gradient, values, stage.gradient, stage.d, ones);
    const RowScales of_p = scales_of_probabilities(p);
    store_codes<0>(p, of_p.inverse, p_at);
    ptx::wait_products<0>();
    ptx::fence_registers(first_gradient);
    gradient_in_place<0>(p, first_gradient);
    float second_gradient[kScores / 2];
    issue_gradient<kHeadDim, false>(second_gradient, values, stage.gradient + 64 * kHeadDim, stage.d + 64 * 8, ones);
    store_codes<kScores / 2>(p, of_p.inverse, p_at);
    ptx::fence_async_reads();
    ptx::wait_products<0>();
    ptx::fence_registers(second_gradient);
    gradient_in_place<kScores / 2>(p, second_gradient);
    hand_back(&storage.stage_free[self.stage.slot], self.lane);
    self.stage.advance();
    ptx::barrier_wait(&storage.tail_ready, self.tail.parity);
    ptx::named_barrier_sync(meeting, 128);                                          // P's codes are stored
    if (masked) mask_queries(p, 0.0f, window, key, work.length, query, self.lane);  // whatever dP of an unseen pair is
    const RowScales of_ds = scales_of_magnitudes(p);
    std::uint32_t codes[kCodeWords];
#pragma unroll
    for (int w = 0; w < kCodeWords; ++w) codes[w] = code_word(p, w, of_ds.inverse);
    const float value_factors[2] = {__fmul_rn(of_p.scale[0], gradient_scale), __fmul_rn(of_p.scale[1], gradient_scale)};
    const float key_factors[2] = {__fmul_rn(of_ds.scale[0], query_scale), __fmul_rn(of_ds.scale[1], query_scale)};
    // Two products in flight: a third would not fit the registers.
    int of_value[32], of_key[32];
    issue_stored_codes<kHeadDim, kBlock>(of_value, p_codes, tail.gradient_transposed, 0);
    issue_codes<kHeadDim, kBlock>(of_key, codes, tail.query_transposed, 0);
    ptx::wait_products<1>();
    ptx::fence_registers(of_value);
    add_scaled(d_value, of_value, value_factors);
    if constexpr (kHeadDim == 128) {
      issue_stored_codes<kHeadDim, kBlock>(of_value, p_codes, tail.gradient_transposed, 64);
      ptx::wait_products<1>();
      ptx::fence_registers(of_key);
      add_scaled(d_key, of_key, key_factors);
      issue_codes<kHeadDim, kBlock>(of_key, codes, tail.query_transposed, 64);
      ptx::wait_products<1>();
      ptx::fence_registers(of_value);
      add_scaled(d_value, of_value, value_factors, 32);
    }
    ptx::wait_products<0>();
    ptx::fence_registers(of_key);
    add_scaled(d_key, of_key, key_factors, kHeadDim == 128 ? 32 : 0);
    hand_back(&storage.tail_free, self.lane);
    self.tail.advance();
  }
  hand_back(&storage.fixed_free[self.fixed.slot], self.lane);

#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) d_key[i] = __fmul_rn(d_key[i], params.softmax_scale);
  const bool valid[2] = {key < work.length, key + 8 < work.length};
  const std::int64_t stride = static_cast<std::int64_t>(params.key_heads) * kHeadDim;
  const std::int64_t at =
      (static_cast<std::int64_t>(work.token_start) + key) * stride + static_cast<std::int64_t>(work.head) * kHeadDim;
  backward::write_rows<kHeadDim>(params.d_key, params.gradients, at, 8 * stride, d_key, valid, self.lane);
  backward::write_rows<kHeadDim>(params.d_value, params.gradients, at, 8 * stride, d_value, valid, self.lane);
}

}  // namespace flamia::sm90::int8
