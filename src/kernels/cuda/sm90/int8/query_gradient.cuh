// SPDX-License-Identifier: Apache-2.0
// The INT8 kernel of dQ. An item is a block of 128 queries of a head, 64 a consumer warpgroup; a step is a tile of 128 keys, from the highest down:
//
//   products          S, dP of block 0 | S, dP of block 1 | dS K of block 0 | ... of block 1 | S, dP of the next step's block 0 | block 1
//   meanwhile                          | dS, codes of 0    | dS, codes of 1  | dQ += 0       | dQ += 1 ...
//
// S and dS K in INT8, dP = dO Vt in BF16, P = exp2(t - lse), dS = P (dP - D). A block of dS is 128 queries x 64 keys: both warpgroups meet for its
// greatest magnitude, which keeps them in step; so each hides its own products behind the other block of the tile.
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
  static constexpr int kMeeting = 1;  // named barrier of both warpgroups
  static_assert(64 * kConsumers == kQueryBlock);

  struct Fixed {
    alignas(128) std::uint8_t query[kQueryBlock * kHeadDim];
    alignas(128) std::uint16_t gradient[kQueryBlock * kHeadDim];
    float lse[kQueryBlock], d[kQueryBlock];
    float factor;  // softmax scale * log2 e * scale of the queries
  };
  struct Stage {
    alignas(128) std::uint8_t key[kKeyTile * kHeadDim];
    alignas(128) std::uint16_t value[kKeyTile * kHeadDim];
    alignas(128) std::uint8_t key_transposed[kKeyTile * kHeadDim];
    float scales[2];  // of the keys' two blocks
  };
  using Tail = NoTail;
  struct Own {
    std::uint32_t greatest[2][2][kConsumers * kWarps];  // of a warp's dS, by block of keys; a step has that of its stage
  };

  static __device__ __forceinline__ int heads(const BackwardParams& params) { return params.query_heads; }
  static __device__ __forceinline__ int key_head(const BackwardParams& params, int head) {
    return head / (params.query_heads / params.key_heads);
  }
  /// The list is ordered for tiles of keys; the tile of queries as far from the document's end has that cost.
  static __device__ __forceinline__ Work work(const BackwardParams& params, const Document& document, int first, int head) {
    const Window window{params.window_left, params.window_right};
    const int mirrored = (document.length - 1) / kQueryBlock * kQueryBlock - first;
    const TileRange range = forward::tile_range(window, mirrored, kQueryBlock, document.length);
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
    ptx::bulk_copy(fixed.d, params.row_d + row, sizeof(fixed.d), ready);
  }
  static __device__ __forceinline__ float2 step_scales(const BackwardParams& params, const Work& work, int step) {
    const int first = (work.first_step - step) * kKeyTile;
    const std::int64_t at = (key_head(params, work.head) * params.slots + work.slot_start + first) / kScaleSlots;
    return make_float2(params.key.scales[at],
                       first + kKeyBlock < work.length ? params.key.scales[at + kKeyBlock / kScaleSlots] : 0.0f);
  }
  static __device__ __forceinline__ void copy_step(const BackwardParams& params, const Work& work, int step, const float2& scales,
                                                   Stage& stage, std::uint64_t* ready) {
    const std::int64_t row =
        key_head(params, work.head) * params.slots + work.slot_start + static_cast<std::int64_t>(work.first_step - step) * kKeyTile;
    stage.scales[0] = scales.x;
    stage.scales[1] = scales.y;
    ptx::barrier_arrive_expect(ready, sizeof(stage.key) + sizeof(stage.value) + sizeof(stage.key_transposed));
    ptx::bulk_copy(stage.key, params.key.rows + row * kHeadDim, sizeof(stage.key), ready);
    ptx::bulk_copy(stage.value, params.value_rows16 + row * kHeadDim, sizeof(stage.value), ready);
    ptx::bulk_copy(stage.key_transposed, params.key.transposed + row * kHeadDim, sizeof(stage.key_transposed), ready);
  }
  static __device__ __forceinline__ void compute(const BackwardParams& params, Storage<QueryGradient>& storage,
                                                 Consumer<QueryGradient>& self, const Work& work);
};

/// What a row of a step needs; a thread works on two.
struct GradientRows {
  float lse[2], d[2];
  float factor;  // softmax scale * log2 e * scale of the queries
};

/// S and dP of 64 queries and 64 keys on their way: registers i as in step.cuh, of 32.
struct HalfTile {
  int score[kScores / 2];
  float gradient[kScores / 2];
};

template <int kHeadDim>
__device__ __forceinline__ void issue_half(HalfTile& half, const typename QueryGradient<kHeadDim>::Fixed& fixed,
                                           const typename QueryGradient<kHeadDim>::Stage& stage, int group, int block) {
  issue_scores<kHeadDim, false>(half.score, fixed.query + 64 * kHeadDim * group, stage.key + kKeyBlock * kHeadDim * block);
  issue_values<kHeadDim>(half.gradient, fixed.gradient + 64 * kHeadDim * group, stage.value + kKeyBlock * kHeadDim * block);
}

/// dS in the place of dP; pairs that a row does not see are 0.
__device__ __forceinline__ void gradient_of_scores(HalfTile& half, const GradientRows& rows, float key_scale) {
  const float factor = __fmul_rn(rows.factor, key_scale);
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i)
    half.gradient[i] =
        __fmul_rn(probability(half.score[i], factor, rows.lse[i / 2 % 2]), __fadd_rn(half.gradient[i], -rows.d[i / 2 % 2]));
}
__device__ __forceinline__ void mask_keys(float (&ds)[kScores / 2], Window window, int query, int length, int first_key, int lane) {
  const int origin = first_key + 2 * (lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = query + 8 * half;
    const int last = row < length ? window.last_key(row, length) - origin : -1000, first = window.first_key(row) - origin;
#pragma unroll
    for (int i = 2 * half; i < kScores / 2; i += 4) {
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
  const GradientRows rows{{fixed.lse[row], fixed.lse[row + 8]}, {fixed.d[row], fixed.d[row + 8]}, fixed.factor};
  float sum[kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) sum[i] = 0.0f;

  // codes of one block's dS; both warpgroups meet for its greatest magnitude
  const auto codes_of = [&](HalfTile& half, std::uint32_t(&codes)[kCodeWords / 2], int first_key, int block, float key_scale) {
    gradient_of_scores(half, rows, key_scale);
    const bool masked = first_key + kKeyBlock - 1 > window.last_key(first_query, work.length) ||
                        first_key < window.first_key(first_query + 63) || first_query + 63 >= work.length;
    if (__any_sync(kFullWarp, masked)) mask_keys(half.gradient, window, work.first + row, work.length, first_key, self.lane);
    std::uint32_t(&greatest)[kConsumers * kWarps] = storage.own.greatest[self.stage.slot][block];
    const std::uint32_t of_warp = __reduce_max_sync(kFullWarp, greatest_magnitude(half.gradient, 0, kScores / 2));
    if (self.lane == 0) greatest[kWarps * self.index + self.warp] = of_warp;
    ptx::named_barrier_sync(kMeeting, 128 * kConsumers);
    std::uint32_t of_block = 0;
#pragma unroll
    for (int warp = 0; warp < kConsumers * kWarps; ++warp) of_block = max(of_block, greatest[warp]);
    const BlockScale scale(of_block);
#pragma unroll
    for (int w = 0; w < kCodeWords / 2; ++w) codes[w] = code_word(half.gradient, w, scale.inverse);
    return __fmul_rn(scale.scale, key_scale);
  };

  // At the loop's back edge S and dP of block 0 are there and nothing is in flight.
  HalfTile first;
  ptx::barrier_wait(&storage.stage_ready[self.stage.slot], self.stage.parity);
  issue_half<kHeadDim>(first, fixed, storage.stage[self.stage.slot], self.index, 0);
  ptx::wait_products<0>();
  ptx::fence_registers(first.score);
  ptx::fence_registers(first.gradient);
#pragma unroll 1
  for (int step = 0; step < work.steps; ++step) {
    const Stage& stage = storage.stage[self.stage.slot];
    const int first_key = (work.first_step - step) * kKeyTile;
    HalfTile second;
    std::uint32_t codes0[kCodeWords / 2], codes1[kCodeWords / 2];
    int part0[kHeadDim / 2], part1[kHeadDim / 2];
    issue_half<kHeadDim>(second, fixed, stage, self.index, 1);
    const float scale0 = codes_of(first, codes0, first_key, 0, stage.scales[0]);
    issue_codes<kHeadDim, kKeyBlock>(part0, codes0, stage.key_transposed, 0);
    ptx::wait_products<1>();
    ptx::fence_registers(second.score);
    ptx::fence_registers(second.gradient);
    const float scale1 = codes_of(second, codes1, first_key + kKeyBlock, 1, stage.scales[1]);
    issue_codes<kHeadDim, kKeyBlock>(part1, codes1, stage.key_transposed + kKeyBlock * kHeadDim, 0);
    ptx::wait_products<1>();
    ptx::fence_registers(part0);
    add_scaled(sum, part0, scale0);
    // The next step's block 0, behind this step's last product; after the last step, once more what lies there: a branch around products in
    // flight would make the compiler wait for each.
    std::uint64_t* const free = &storage.stage_free[self.stage.slot];
    const bool last = step + 1 == work.steps;
    const std::uint32_t here = self.stage.slot;
    self.stage.advance();
    const bool ready = last || ptx::barrier_passed(&storage.stage_ready[self.stage.slot], self.stage.parity);
    if (__any_sync(kFullWarp, !ready)) {
      ptx::wait_products<0>();
      ptx::barrier_wait(&storage.stage_ready[self.stage.slot], self.stage.parity);
    }
    HalfTile next;
    issue_half<kHeadDim>(next, fixed, storage.stage[last ? here : self.stage.slot], self.index, 0);
    ptx::wait_products<1>();
    ptx::fence_registers(part1);
    add_scaled(sum, part1, scale1);
    ptx::wait_products<0>();
    ptx::fence_registers(next.score);
    ptx::fence_registers(next.gradient);
    hand_back(free, self.lane);
    first = next;
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
