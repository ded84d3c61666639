// SPDX-License-Identifier: Apache-2.0
// The INT8 forward kernel. An item is 192 queries of a head, 64 a consumer warpgroup; a step is a tile of 128 keys, from the highest down:
//
//   S = Q Kt (INT8) | mask, maximum, m | P = exp2(S f - m), codes of P / (greatest P of the row / 127) | P V (INT8) | A += ...
//
// with f = softmax scale * log2 e * scale of the queries' block * scale of the keys' block. l sums codes times their scale.
#pragma once
#include <limits>

#include "../forward/epilogue.cuh"
#include "numerics/softmax.hpp"
#include "step.cuh"

namespace flamia::sm90::int8 {

template <int kHeadDim_>
struct Forward {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowsOut = 16;  // forward/epilogue.cuh
  static constexpr int kConsumers = 3;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = 160, kCopyRegisters = 32;
  static constexpr int kFixedBuffers = 2, kStages = 4;
  static_assert(64 * kConsumers == kForwardTile);

  struct Fixed {
    alignas(128) std::uint8_t query[kForwardTile * kHeadDim];
    float factor[kConsumers];  // of its 64 queries: softmax scale * log2 e * scale of their block
  };
  struct Stage {
    alignas(128) std::uint8_t key[kKeyTile * kHeadDim];
    alignas(128) std::uint8_t value[kKeyTile * kHeadDim];
    alignas(8) float scales[2];  // of the keys, of the values
  };
  using Tail = NoTail;
  struct Own {
    alignas(128) std::uint8_t rows_out[kConsumers * kWarps][kRowsOut * 128];
  };

  static __device__ __forceinline__ int heads(const ForwardParams& params) { return params.query_heads; }
  static __device__ __forceinline__ int key_head(const ForwardParams& params, int head) {
    return head / (params.query_heads / params.key_heads);
  }
  static __device__ __forceinline__ Work work(const ForwardParams& params, const Document& document, int first, int head) {
    const Window window{params.window_left, params.window_right};
    const int aligned = forward::aligned_first(first, document.length, 64, kConsumers);
    const TileRange range = forward::tile_range(window, aligned, kForwardTile, document.length);
    return {document.slot_start, document.token_start, document.length, aligned, head, range.last, range.last - range.first + 1, 0};
  }
  static __device__ __forceinline__ void copy_fixed(const ForwardParams& params, const Work& work, Fixed& fixed,
                                                    std::uint64_t* ready) {
    const int absent = max(0, -work.first);  // rows in front of the document: whole groups of 64
    const std::int64_t row = work.head * params.slots + work.slot_start + work.first;
#pragma unroll
    for (int group = 0; group < kConsumers; ++group) {
      const int first = work.first + 64 * group;
      const bool inside = first >= 0 && first < work.length;
      fixed.factor[group] =
          inside ? __fmul_rn(__fmul_rn(params.softmax_scale, kLog2E), params.query.scales[(row + 64 * group) / kScaleSlots]) : 0.0f;
    }
    const std::uint32_t bytes = (kForwardTile - absent) * kHeadDim;
    ptx::barrier_arrive_expect(ready, bytes);
    ptx::bulk_copy(fixed.query + absent * kHeadDim, params.query.rows + (row + absent) * kHeadDim, bytes, ready);
  }
  static __device__ __forceinline__ std::int64_t row_of(const ForwardParams& params, const Work& work, int step) {
    return key_head(params, work.head) * params.slots + work.slot_start +
           static_cast<std::int64_t>(work.first_step - step) * kKeyTile;
  }
  static __device__ __forceinline__ float2 step_scales(const ForwardParams& params, const Work& work, int step) {
    const std::int64_t at = row_of(params, work, step) / kScaleSlots;
    return make_float2(params.key.scales[at], params.value.scales[at]);
  }
  static __device__ __forceinline__ void copy_step(const ForwardParams& params, const Work& work, int step, const float2& scales,
                                                   Stage& stage, std::uint64_t* ready) {
    const std::int64_t row = row_of(params, work, step);
    *reinterpret_cast<float2*>(stage.scales) = scales;
    ptx::barrier_arrive_expect(ready, sizeof(stage.key) + sizeof(stage.value));
    ptx::bulk_copy(stage.key, params.key.rows + row * kHeadDim, sizeof(stage.key), ready);
    ptx::bulk_copy(stage.value, params.value.transposed + row * kHeadDim, sizeof(stage.value), ready);
  }
  static __device__ __forceinline__ void compute(const ForwardParams& params, Storage<Forward>& storage, Consumer<Forward>& self,
                                                 const Work& work);
};

/// What a row carries from step to step; a thread works on two.
template <int kHeadDim>
struct Rows {
  float output[kHeadDim / 2];  // A
  float sum[2];                // the thread's share of l
  float reference[2];          // m
};

inline constexpr float kNoReference = -1.0e30f;  // before a row's first visible key; finite, so that no infinity meets another

inline constexpr int kUnseen = std::numeric_limits<int>::min();  // no sum of codes

/// Keys that a row does not see become kUnseen. Register i of 64: key first_key + 8 (i / 4) + 2 c + i % 2.
__device__ __forceinline__ void mask_scores(int (&s)[kScores], Window window, int query, int length, int first_key, int lane) {
  const int origin = first_key + 2 * (lane % 4);
  int last[2], first[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    last[half] = window.last_key(query + 8 * half, length) - origin;
    first[half] = window.first_key(query + 8 * half) - origin;
  }
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int key = 8 * (i / 4) + i % 2, half = i / 2 % 2;
    if (key > last[half] || key < first[half]) s[i] = kUnseen;
  }
}

/// Greatest of a row's sums, kUnseen if it sees no key of the tile; all threads of a quad.
__device__ __forceinline__ int greatest_score(const int (&s)[kScores], int half) {
  int greatest = kUnseen;
#pragma unroll
  for (int i = 2 * half; i < kScores; i += 4) greatest = __vimax3_s32(greatest, s[i], s[i + 1]);
  greatest = max(greatest, __shfl_xor_sync(kFullWarp, greatest, 1));
  return max(greatest, __shfl_xor_sync(kFullWarp, greatest, 2));
}

template <int kHeadDim>
__device__ __forceinline__ void attend_tile(Rows<kHeadDim>& rows, const std::uint8_t* query, float row_factor,
                                            const typename Forward<kHeadDim>::Stage& stage, Window window, int first_query, int row,
                                            int length, int first_key, int lane) {
  int product[kScores];
  issue_scores<kHeadDim>(product, query, stage.key);
  const float2 scales = *reinterpret_cast<const float2*>(stage.scales);
  float factor = above_zero(__fmul_rn(row_factor, scales.x));
  const bool right = first_key + kKeyTile - 1 > window.last_key(first_query, length);
  const bool left = first_key < window.first_key(first_query + 63);
  const bool masked = __any_sync(kFullWarp, right || left);
  ptx::wait_products<0>();
  ptx::fence_registers(product);
  if (masked) mask_scores(product, window, first_query + row, length, first_key, lane);
  const int greatest_product[2] = {greatest_score(product, 0), greatest_score(product, 1)};
  float s[kScores];
#pragma unroll
  for (int i = 0; i < kScores; ++i) s[i] = __int2float_rn(product[i]);
  if (masked) {
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      if (s[i] == static_cast<float>(kUnseen)) s[i] = kMinusInfinity;
  }

  float bias[2], correction[2], inverse[2], scale[2];
  bool beyond = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float greatest =
        greatest_product[half] == kUnseen ? kMinusInfinity : __fmul_rn(__int2float_rn(greatest_product[half]), factor);
    const float before = rows.reference[half];
    float after = before;
    if (greatest_product[half] != kUnseen)
      after = before == kNoReference ? numerics::phase32_first(greatest) : numerics::phase32_next(before, greatest);
    correction[half] = ptx::exp2_approximate(__fadd_rn(before, -after));
    const float probability = ptx::exp2_approximate(__fadd_rn(greatest, -after));  // the row's greatest of the tile
    scale[half] = __fmul_rn(probability, 1.0f / kGreatestCode);
    inverse[half] = __fdividef(kGreatestCode, probability);
    rows.reference[half] = after;
    bias[half] = -after;
    beyond |= fabsf(after) >= kGridEnd && after != kNoReference;
  }
  if (__any_sync(kFullWarp, beyond)) {  // t first: the sum with m has no bits for its fraction
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = __fadd_rn(__fmul_rn(s[i], factor), bias[i / 2 % 2]);
    factor = 1.0f;
    bias[0] = bias[1] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kScores; ++i) s[i] = ptx::exp2_approximate(__fmaf_rn(s[i], factor, bias[i / 2 % 2]));

  std::uint32_t codes[kCodeWords];
  int sums[2] = {0, 0};
#pragma unroll
  for (int w = 0; w < kCodeWords; ++w) {
    codes[w] = code_word(s, w, inverse);
    sums[w % 2] = __dp4a(static_cast<int>(codes[w]), 0x01010101, sums[w % 2]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
    rows.sum[half] = __fmaf_rn(rows.sum[half], correction[half], __fmul_rn(scale[half], static_cast<float>(sums[half])));

  int part[kHeadDim / 2];
  issue_codes<kHeadDim, kKeyTile>(part, codes, stage.value, 0);
  if (__any_sync(kFullWarp, (correction[0] != 1.0f) | (correction[1] != 1.0f))) {  // m has moved
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) rows.output[i] = __fmul_rn(rows.output[i], correction[i / 2 % 2]);
  }
  const float factors[2] = {scale[0] * scales.y, scale[1] * scales.y};
  ptx::wait_products<0>();
  ptx::fence_registers(part);
  add_scaled(rows.output, part, factors);
}

/// O = A / l, LSE with what smoothing took away, m and l.
template <int kHeadDim>
__device__ __forceinline__ void store_rows(const ForwardParams& params, const Work& work, Rows<kHeadDim>& rows, std::uint8_t* stage,
                                           int first_row, int lane) {
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float& sum = rows.sum[half];
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    inverse[half] = __frcp_rn(sum);
  }
  const int half = lane % 4, row = first_row + lane / 4 + 8 * half;
  if (half < 2 && row < work.length) {
    const float reference = half == 0 ? rows.reference[0] : rows.reference[1];
    const float sum = half == 0 ? rows.sum[0] : rows.sum[1];
    const std::int64_t slot = work.head * params.slots + work.slot_start + row;
    float lse = numerics::natural_lse(reference, log2f(sum));
    if (params.key_mean_score != nullptr) lse = __fmaf_rn(params.softmax_scale, params.key_mean_score[slot], lse);
    params.lse[work.head * params.tokens + work.token_start + row] = lse;
    if (params.row_reference != nullptr) params.row_reference[slot] = reference;
    if (params.row_sum != nullptr) params.row_sum[slot] = sum;
  }
  sm90::ForwardParams to;  // what the common code reads
  to.output = params.output;
  to.query_heads = params.query_heads;
  const forward::Work at{work.slot_start, work.token_start, work.length, work.first, work.head, 0, {}};
#pragma unroll
  for (int channel = 0; channel < kHeadDim; channel += 64)
    forward::store_channels<Forward<kHeadDim>>(to, at, rows.output + channel / 2, inverse, stage, channel, first_row, lane);
}

template <int kHeadDim>
__device__ __forceinline__ void Forward<kHeadDim>::compute(const ForwardParams& params, Storage<Forward>& storage,
                                                           Consumer<Forward>& self, const Work& work) {
  const Window window{params.window_left, params.window_right};
  const Fixed& fixed = storage.fixed[self.fixed.slot];
  const int group = self.index, first_query = work.first + 64 * group;
  // in front of the document counts as behind it: nothing
  const TileRange own = forward::tile_range(window, first_query < 0 ? work.length : first_query, 64, work.length);
  const float row_factor = fixed.factor[group];
  Rows<kHeadDim> rows;
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) rows.output[i] = 0.0f;
  rows.sum[0] = rows.sum[1] = 0.0f;
  rows.reference[0] = rows.reference[1] = kNoReference;
#pragma unroll 1
  for (int step = 0; step < work.steps; ++step) {
    ptx::barrier_wait(&storage.stage_ready[self.stage.slot], self.stage.parity);
    const int tile = work.first_step - step;
    if (tile <= own.last && tile >= own.first)
      attend_tile<kHeadDim>(rows, fixed.query + group * (64 * kHeadDim), row_factor, storage.stage[self.stage.slot], window,
                            first_query, self.first_row(), work.length, tile * kKeyTile, self.lane);
    hand_back(&storage.stage_free[self.stage.slot], self.lane);
    self.stage.advance();
  }
  hand_back(&storage.fixed_free[self.fixed.slot], self.lane);
  if (own.last >= own.first)
    store_rows<kHeadDim>(params, work, rows, storage.own.rows_out[self.index * kWarps + self.warp], first_query + 16 * self.warp,
                         self.lane);
}

}  // namespace flamia::sm90::int8
