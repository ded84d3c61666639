// SPDX-License-Identifier: Apache-2.0
// Writing the two rows that a thread's fragments hold to a [tokens][heads][head_dim] tensor.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "../../ptx/convert.cuh"
#include "backward.hpp"
#include "fragments.hpp"
#include "power.cuh"  // kFullWarp
#include "rotation.cuh"

namespace flamia::sm90::backward {

/// `row` points at the thread's first row (16 w + g), channel 0; `stride` elements lie between rows that are eight tokens apart. `valid[half]`.
template <int kCount>
__device__ __forceinline__ void write_rows(float* row, std::int64_t stride, const float (&x)[kCount], const bool (&valid)[2],
                                           int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!valid[half]) continue;
    float* const to = row + half * stride + 2 * (lane % 4);
#pragma unroll
    for (int i = 2 * half; i < kCount; i += 4) *reinterpret_cast<float2*>(to + i / 4 * 8) = make_float2(x[i], x[i + 1]);
  }
}

/// Between two lanes of a quad whose numbers differ in the bit `mask`: the one without it gives `second` for the other's `first`.
__device__ __forceinline__ void trade(std::uint32_t& first, std::uint32_t& second, int mask, int lane) {
  const bool upper = (lane & mask) != 0;
  const std::uint32_t got = __shfl_xor_sync(kFullWarp, upper ? first : second, mask);
  (upper ? first : second) = got;
}

/// The same in BF16. A thread holds two channels of every eight: the quad trades them, so that a store takes 16 bytes of a row, not 4. All lanes
/// of the warp take part.
template <int kCount>
__device__ __forceinline__ void write_rows(__nv_bfloat16* row, std::int64_t stride, const float (&x)[kCount],
                                           const bool (&valid)[2], int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    __nv_bfloat16* const to = row + half * stride + 8 * (lane % 4);
#pragma unroll
    for (int first = 2 * half; first < kCount; first += 16) {  // 32 channels
      std::uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = ptx::pack_bf16x2(x[first + 4 * j], x[first + 4 * j + 1]);
      trade(words[0], words[1], 1, lane);
      trade(words[2], words[3], 1, lane);
      trade(words[0], words[2], 2, lane);
      trade(words[1], words[3], 2, lane);
      if (valid[half]) *reinterpret_cast<uint4*>(to + first / 16 * 32) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

/// The same for a format chosen at run time.
template <int kHeadDim, int kCount>
__device__ __forceinline__ void write_rows(void* tensor, GradientFormat format, std::int64_t at, std::int64_t stride,
                                           const float (&x)[kCount], const bool (&valid)[2], int lane) {
  if (format == GradientFormat::bf16) {
    write_rows(static_cast<__nv_bfloat16*>(tensor) + at, stride, x, valid, lane);
  } else {
    write_rows(static_cast<float*>(tensor) + at, stride, x, valid, lane);
  }
}

/// Rows after finish_turn(): the lane has four channels of every 16. `row` points at channel 0.
template <int kCount>
__device__ __forceinline__ void write_turned_rows(float* row, std::int64_t stride, const float (&x)[kCount], const bool (&valid)[2],
                                                  int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!valid[half]) continue;
    float* const to = row + half * stride + 4 * (lane % 4);
#pragma unroll
    for (int i = 2 * half; i < kCount; i += 8)
      *reinterpret_cast<float4*>(to + i / 8 * 16) = make_float4(x[i], x[i + 1], x[i + 4], x[i + 5]);
  }
}
template <int kCount>
__device__ __forceinline__ void write_turned_rows(__nv_bfloat16* row, std::int64_t stride, const float (&x)[kCount],
                                                  const bool (&valid)[2], int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!valid[half]) continue;
    __nv_bfloat16* const to = row + half * stride + 4 * (lane % 4);
#pragma unroll
    for (int i = 2 * half; i < kCount; i += 8)
      *reinterpret_cast<uint2*>(to + i / 8 * 16) =
          make_uint2(ptx::pack_bf16x2(x[i], x[i + 1]), ptx::pack_bf16x2(x[i + 4], x[i + 5]));
  }
}
template <int kHeadDim>
__device__ __forceinline__ void write_turned_rows(void* tensor, GradientFormat format, std::int64_t at, std::int64_t stride,
                                                  const float (&x)[kHeadDim / 2], const bool (&valid)[2], int lane) {
  if (format == GradientFormat::bf16) {
    write_turned_rows(static_cast<__nv_bfloat16*>(tensor) + at, stride, x, valid, lane);
  } else {
    write_turned_rows(static_cast<float*>(tensor) + at, stride, x, valid, lane);
  }
}

/// Rows of dQ or dK: times a factor for each of the two, and rotated back if Q and K were rotated. All lanes of the warp take part.
template <int kHeadDim>
__device__ __forceinline__ void write_turned_back(void* tensor, GradientFormat format, std::int64_t at, std::int64_t stride,
                                                  float (&x)[kHeadDim / 2], const float (&factor)[2], bool rotated,
                                                  const bool (&valid)[2], int lane) {
  if (!rotated) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) x[i] *= factor[i / 2 % 2];
    write_rows<kHeadDim>(tensor, format, at, stride, x, valid, lane);
    return;
  }
  turn_sixteens(x, lane);
  finish_turn<kHeadDim>(x, factor, lane);
  write_turned_rows<kHeadDim>(tensor, format, at, stride, x, valid, lane);
}

}  // namespace flamia::sm90::backward
