// SPDX-License-Identifier: Apache-2.0
// Writing the two rows that a thread's fragments hold to a [tokens][heads][head_dim] tensor.
#pragma once
#include <cuda_bf16.h>

#include "backward.hpp"
#include "fragments.hpp"

namespace flamia::sm90::backward {

/// `row` points at the thread's first row (16 w + g), channel 0; `stride` elements lie between rows that are eight tokens apart. `valid[half]`.
template <int kHeadDim, int kCount, class Element>
__device__ __forceinline__ void write_rows(Element* row, std::int64_t stride, const float (&x)[kCount], const bool (&valid)[2],
                                           int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!valid[half]) continue;
    Element* const to = row + half * stride + 2 * (lane % 4);
#pragma unroll
    for (int i = 2 * half; i < kCount; i += 4) {
      const int channel = 64 * (i / kScores) + 8 * (i % kScores / 4);
      if constexpr (sizeof(Element) == 2) {
        *reinterpret_cast<__nv_bfloat162*>(to + channel) = __floats2bfloat162_rn(x[i], x[i + 1]);
      } else {
        *reinterpret_cast<float2*>(to + channel) = make_float2(x[i], x[i + 1]);
      }
    }
  }
}

/// The same for a format chosen at run time.
template <int kHeadDim, int kCount>
__device__ __forceinline__ void write_rows(void* tensor, GradientFormat format, std::int64_t at, std::int64_t stride,
                                           const float (&x)[kCount], const bool (&valid)[2], int lane) {
  if (format == GradientFormat::bf16) {
    write_rows<kHeadDim>(static_cast<__nv_bfloat16*>(tensor) + at, stride, x, valid, lane);
  } else {
    write_rows<kHeadDim>(static_cast<float*>(tensor) + at, stride, x, valid, lane);
  }
}

}  // namespace flamia::sm90::backward
