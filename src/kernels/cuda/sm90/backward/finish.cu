// SPDX-License-Identifier: Apache-2.0
// The finish kernel: partial sums of dQ, in fragment order, become rows: times 2^-z, rotated back, times the softmax scale. A warp makes 16
// positions of one head at a time, with all its channels in registers.
#include "../../ptx/half.cuh"
#include "../backward_ds16/records.hpp"
#include "instances.hpp"
#include "numerics/exponent.hpp"
#include "rotation.cuh"
#include "rows_out.cuh"

namespace flamia::sm90::backward {
namespace {

constexpr int kThreads = 256;
constexpr int kGroupsPerTile = kKeyTile / kGroup;

template <int kHeadDim>
__device__ void load_partials(float (&x)[kHeadDim / 2], const BackwardParams& params, std::int64_t group, PartialFormat format,
                              int lane) {
  const std::int64_t first = group * kGroup * kHeadDim;
#pragma unroll
  for (int h = 0; h < kHeadDim / 64; ++h) {
    if (format == PartialFormat::f16) {
      const auto* const from = static_cast<const __half*>(params.dq_partials) + first + partial_offset<2>(lane, h, 0);
#pragma unroll
      for (int v = 0; v < kScores; v += 8) {
        const uint4 words = *reinterpret_cast<const uint4*>(from + v / 8 * 256);
        const std::uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[h * kScores + v + 2 * i] = ptx::low_f16(pairs[i]);
          x[h * kScores + v + 2 * i + 1] = ptx::high_f16(pairs[i]);
        }
      }
    } else {
      const auto* const from = static_cast<const float*>(params.dq_partials) + first + partial_offset<4>(lane, h, 0);
#pragma unroll
      for (int v = 0; v < kScores; v += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + v / 4 * 128);
        x[h * kScores + v] = four.x;
        x[h * kScores + v + 1] = four.y;
        x[h * kScores + v + 2] = four.z;
        x[h * kScores + v + 3] = four.w;
      }
    }
  }
}

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ BackwardParams params, PartialFormat partials,
                                                          GradientFormat format, bool rotated, int greatest_unit) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t jobs = static_cast<std::int64_t>(*params.item_count) * params.query_heads;
  for (std::int64_t job = blockIdx.x; job < jobs; job += gridDim.x) {
    static_assert(kThreads / 32 == kGroupsPerTile);
    const int head = static_cast<int>(job % params.query_heads);
    const WorkItem item = params.items[job / params.query_heads];
    const Document document = params.documents[item.document];
    const int position = item.first + kGroup * warp;
    if (position >= document.length) continue;
    const std::int64_t slot = head * params.slots + document.slot_start + position;
    float x[kHeadDim / 2];
    load_partials<kHeadDim>(x, params, slot / kGroup, partials, lane);
    const int row = lane / 4;
    const bool valid[2] = {position + row < document.length, position + row + 8 < document.length};
    if (partials == PartialFormat::f16) {
      const auto unit = [&](std::int64_t at) { return clamp(params.dq_exponent[at], -greatest_unit, greatest_unit); };
      const int exponent[2] = {valid[0] ? -unit(slot + row) : 0, valid[1] ? -unit(slot + row + 8) : 0};
      float factor[2][2];  // two factors, so that none is subnormal
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factor[half][0] = power_of_two(clamp(exponent[half] >> 1, -126, 127));
        factor[half][1] = power_of_two(clamp(exponent[half] - (exponent[half] >> 1), -126, 127));
      }
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) x[i] = x[i] * factor[i / 2 % 2][0] * factor[i / 2 % 2][1];
    }
    if (rotated) rotate_back<kHeadDim>(x, lane);
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) x[i] *= params.softmax_scale;
    const std::int64_t stride = static_cast<std::int64_t>(params.query_heads) * kHeadDim;
    const std::int64_t at =
        (static_cast<std::int64_t>(document.token_start) + position + row) * stride + static_cast<std::int64_t>(head) * kHeadDim;
    write_rows<kHeadDim>(params.d_query, format, at, 8 * stride, x, valid, lane);
  }
}

}  // namespace

cudaError_t launch_finish(const BackwardParams& params, const BackwardConfig& config, int multiprocessors, cudaStream_t stream) {
  constexpr int blocks_per_multiprocessor = 8;
  const int blocks = multiprocessors * blocks_per_multiprocessor;
  const int greatest_unit = config.ds == DsFormat::bf16 ? ds16::kGreatestUnit : 1 << 20;  // the other pass divides its own out
  const auto kernel = config.head_dim == 128 ? finish_kernel<128> : finish_kernel<64>;
  kernel<<<blocks, kThreads, 0, stream>>>(params, config.partials, config.gradients, config.rotated, greatest_unit);
  return cudaGetLastError();
}

}  // namespace flamia::sm90::backward
