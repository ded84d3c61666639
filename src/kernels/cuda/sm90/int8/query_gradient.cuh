// SPDX-License-Identifier: Apache-2.0
// The INT8 kernel of dQ. An item is a block of 128 queries of a head, 64 a consumer warpgroup, which work by themselves; a step is a tile of 128 keys,
// from the highest down:
//
//   products    dP - D      |                                    | dS K  | S of the next step
//   meanwhile   half of P   | the other half, dS, greatest, codes |       | dQ += ...
//
// S and dS K in INT8, dP = dO Vt in BF16, P = exp2(t - lse), dS = P (dP - D). dS has a scale a query and 128 keys: a row lies in four threads.
// Registers: dQ 64, S (P, dS) 64, dP (dS K) 64, codes 16.
#pragma once
#include "../backward/rows_out.cuh"
#include "step.cuh"

namespace flamia::sm90::int8 {

template <int kHeadDim_>
struct QueryGradient {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = 240, kCopyRegisters = 24;
  static constexpr int kFixedBuffers = 1, kStages = 2;
  static_assert(64 * kConsumers == kBlock);

  struct Fixed {
    alignas(128) std::uint8_t query[kBlock * kHeadDim];
    alignas(128) std::uint16_t gradient[kBlock * kHeadDim];
    alignas(128) std::uint16_t d[kBlock * 8];
    float lse[kBlock];
    float factor;  // softmax scale * log2 e * scale of the queries
  };
  struct Stage {
    alignas(128) std::uint8_t key[kKeyTile * kHeadDim];
    alignas(128) std::uint16_t value[kKeyTile * kHeadDim];
    alignas(128) std::uint8_t key_transposed[kKeyTile * kHeadDim];
    float scale;  // of the keys
  };
  using Tail = NoTail;
  struct Own {
    Ones ones;
  };
  static __device__ __forceinline__ void prepare(Storage<QueryGradient>& storage, int lane) { write_ones(storage.own.ones, lane); }

  static __device__ __forceinline__ int heads(const BackwardParams& params) { return params.query_heads; }
  static __device__ __forceinline__ int key_head(const BackwardParams& params, int head) {
    return head / (params.query_heads / params.key_heads);
  }
  /// The list is ordered for tiles of keys; the tile of queries as far from the document's end has that cost.
  static __device__ __forceinline__ Work work(const BackwardParams& params, const Document& document, int first, int head) {
    const Window window{params.window_left, params.window_right};
    const int mirrored = (document.length - 1) / kBlock * kBlock - first;
    const TileRange range = forward::tile_range(window, mirrored, kBlock, document.length);
    return {
        document.slot_start, document.token_start, document.length, mirrored, head, range.last, range.last - range.first + 1, 0};
  }
  static __device__ __forceinline__ void copy_fixed(const BackwardParams& params, const Work& work, Fixed& fixed,
                                                    std::uint64_t* ready) {
    const std::int64_t row = work.head * params.slots + work.slot_start + work.first;
    fixed.factor = __fmul_rn(__fmul_rn(params.softmax_scale, kLog2E), params.query.scales[row / kScaleSlots]);
    ptx::barrier_arrive_expect(ready, sizeof(fixed.query) + sizeof(fixed.gradient) + sizeof(fixed.lse) + sizeof(fixed.d));
    ptx::bulk_copy(fixed.query, params.query.rows + row * kHeadDim, sizeof(fixed.query), ready);
    ptx::bulk_copy(fixed.gradient, params.gradient_rows16 + row * kHeadDim, sizeof(fixed.gradient), ready);
    ptx::bulk_copy(fixed.lse, params.row_lse + row, sizeof(fixed.lse), ready);
    ptx::bulk_copy(fixed.d, params.row_d + 8 * row, sizeof(fixed.d), ready);
  }
  static __device__ __forceinline__ std::int64_t row_of(const BackwardParams& params, const Work& work, int step) {
    return key_head(params, work.head) * params.slots + work.slot_start +
           static_cast<std::int64_t>(work.first_step - step) * kKeyTile;
  }
  static __device__ __forceinline__ float step_scales(const BackwardParams& params, const Work& work, int step) {
    return params.key.scales[row_of(params, work, step) / kScaleSlots];
  }
  static __device__ __forceinline__ void copy_step(const BackwardParams& params, const Work& work, int step, float scale,
                                                   Stage& stage, std::uint64_t* ready) {
    const std::int64_t row = row_of(params, work, step);
    stage.scale = scale;
    ptx::barrier_arrive_expect(ready, sizeof(stage.key) + sizeof(stage.value) + sizeof(stage.key_transposed));
    ptx::bulk_copy(stage.key, params.key.rows + row * kHeadDim, sizeof(stage.key), ready);
    ptx::bulk_copy(stage.value, params.value_rows16 + row * kHeadDim, sizeof(stage.value), ready);
    ptx::bulk_copy(stage.key_transposed, params.key.transposed + row * kHeadDim, sizeof(stage.key_transposed), ready);
  }
  static __device__ __forceinline__ void compute(const BackwardParams& params, Storage<QueryGradient>& storage,
                                                 Consumer<QueryGradient>& self, const Work& work);
};

/// Pairs that a row does not see have no dS.
__device__ __forceinline__ void mask_keys(float (&ds)[kScores], Window window, int query, int length, int first_key, int lane) {
  const int origin = first_key + 2 * (lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = query + 8 * half;
    const int last = row < length ? window.last_key(row, length) - origin : -1000, first = window.first_key(row) - origin;
#pragma unroll
    for (int i = 2 * half; i < kScores; i += 4) {
      const int key = 8 * (i / 4);
      if (key > last || key < first) ds[i] = 0.0f;
      if (key + 1 > last || key + 1 < first) ds[i + 1] = 0.0f;
    }
  }
}

template <int kHeadDim>
__device__ __forceinline__ void QueryGradient<kHeadDim>::compute(const BackwardParams& params, Storage<QueryGradient>& storage,
                                                                 Consumer<QueryGradient>& self, const Work& work) {
  const Window window{params.window_left, params.window_right};
  const Fixed& fixed = storage.fixed[self.fixed.slot];
  const int row = 64 * self.index + self.first_row(), first_query = work.first + 64 * self.index;
  const std::uint8_t* const query = fixed.query + 64 * kHeadDim * self.index;
  const std::uint16_t* const gradient = fixed.gradient + 64 * kHeadDim * self.index;
  const float lse[2] = {fixed.lse[row], fixed.lse[row + 8]};
  const std::uint16_t* const d = fixed.d + 64 * 8 * self.index;
  const bool beyond = __any_sync(kFullWarp, fmaxf(fabsf(lse[0]), fabsf(lse[1])) >= kGridEnd);
  float sum[kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) sum[i] = 0.0f;

  // At the loop's back edge S is there and nothing is in flight.
  int score[kScores];
  ptx::barrier_wait(&storage.stage_ready[self.stage.slot], self.stage.parity);
  issue_scores<kHeadDim>(score, query, storage.stage[self.stage.slot].key);
  ptx::wait_products<0>();
  ptx::fence_registers(score);
#pragma unroll 1
  for (int step = 0; step < work.steps; ++step) {
    const Stage& stage = storage.stage[self.stage.slot];
    const int first_key = (work.first_step - step) * kKeyTile;
    float values[kScores], ds[kScores];
    issue_gradient<kHeadDim, true>(values, gradient, stage.value, d, &storage.own.ones.element[0][0][0]);
    const float key_scale = stage.scale, factor = __fmul_rn(fixed.factor, key_scale);
    // An exponential holds its warp up for eight cycles unless the same piece of code goes on with its result.
    const float left = scores_of(ds, score, factor, beyond);
#pragma unroll
    for (int i = 0; i < kScores; ++i) ds[i] = __fmaf_rn(ds[i], left, -lse[i / 2 % 2]);
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) ds[i] = ptx::exp2_approximate(ds[i]);
    ptx::fence_registers(ds);
    ptx::wait_products<0>();
    ptx::fence_registers(values);
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      ds[i] = __fmul_rn(ds[i], values[i]);
      ds[i + kScores / 2] = __fmul_rn(ptx::exp2_approximate(ds[i + kScores / 2]), values[i + kScores / 2]);
    }
    const bool masked = first_key + kKeyTile - 1 > window.last_key(first_query, work.length) ||
                        first_key < window.first_key(first_query + 63) || first_query + 63 >= work.length;
    if (__any_sync(kFullWarp, masked)) mask_keys(ds, window, work.first + row, work.length, first_key, self.lane);
    const RowScales scales = scales_of_magnitudes(ds);
    std::uint32_t codes[kCodeWords];
#pragma unroll
    for (int w = 0; w < kCodeWords; ++w) codes[w] = code_word(ds, w, scales.inverse);
    const float factors[2] = {__fmul_rn(scales.scale[0], key_scale), __fmul_rn(scales.scale[1], key_scale)};
    int part[kHeadDim / 2];
    issue_codes<kHeadDim, kKeyTile>(part, codes, stage.key_transposed, 0);
    // The next step's S, behind this step's product; after the last step, once more what lies there: a branch around products in flight would
    // make the compiler wait for each.
    std::uint64_t* const free = &storage.stage_free[self.stage.slot];
    const bool last = step + 1 == work.steps;
    const std::uint32_t here = self.stage.slot;
    self.stage.advance();
    const bool ready = last || ptx::barrier_passed(&storage.stage_ready[self.stage.slot], self.stage.parity);
    if (__any_sync(kFullWarp, !ready)) {
      ptx::wait_products<0>();
      ptx::barrier_wait(&storage.stage_ready[self.stage.slot], self.stage.parity);
    }
    issue_scores<kHeadDim>(score, query, storage.stage[last ? here : self.stage.slot].key);
    ptx::wait_products<1>();
    ptx::fence_registers(part);
    if (!last) hand_back(free, self.lane);
    add_scaled(sum, part, factors);
    ptx::wait_products<0>();
    ptx::fence_registers(score);
    if (last) hand_back(free, self.lane);
  }
  hand_back(&storage.fixed_free[self.fixed.slot], self.lane);

#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) sum[i] = __fmul_rn(sum[i], params.softmax_scale);
  const int position = work.first + row;
  const bool valid[2] = {position < work.length, position + 8 < work.length};
  const std::int64_t stride = static_cast<std::int64_t>(params.query_heads) * kHeadDim;
  const std::int64_t at =
      (static_cast<std::int64_t>(work.token_start) + position) * stride + static_cast<std::int64_t>(work.head) * kHeadDim;
  backward::write_rows<kHeadDim>(params.d_query, params.gradients, at, 8 * stride, sum, valid, self.lane);
}

}  // namespace flamia::sm90::int8
