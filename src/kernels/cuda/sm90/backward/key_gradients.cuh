// SPDX-License-Identifier: Apache-2.0
// dK and dV of a consumer warpgroup: the sums of all steps, and how they leave.
#pragma once
#include <cstdint>

#include "rotation.cuh"
#include "rows_out.cuh"

namespace flamia::sm90::backward {

template <class Config>
struct KeyGradients {
  float key[Config::kHeadDim / 2];    // dK without the softmax scale, rotated
  float value[Config::kHeadDim / 2];  // dV
};

/// Rows of one of them leave. The consumer knows the thread's lane and its first key of the item's tile (fragments.hpp).
template <int kHeadDim, class Consumer, class Work>
__device__ __forceinline__ void write_rows_of_keys(const Consumer& consumer, void* tensor, const float (&x)[kHeadDim / 2],
                                                   const Work& work, GradientFormat format) {
  const int key = work.first_key + consumer.first_row();
  const bool valid[2] = {key < work.length, key + 8 < work.length};
  const std::int64_t stride = static_cast<std::int64_t>(consumer.params.key_heads) * kHeadDim;
  const std::int64_t at =
      (static_cast<std::int64_t>(work.token_start) + key) * stride + static_cast<std::int64_t>(work.key_head) * kHeadDim;
  write_rows<kHeadDim>(tensor, format, at, 8 * stride, x, valid, consumer.lane());
}
template <class Config, class Consumer, class Work>
__device__ __forceinline__ void write_value_gradient(const Consumer& consumer, const KeyGradients<Config>& sums, const Work& work,
                                                     GradientFormat format) {
  write_rows_of_keys<Config::kHeadDim>(consumer, consumer.params.d_value, sums.value, work, format);
}
template <class Config, class Consumer, class Work>
__device__ __forceinline__ void write_key_gradient(const Consumer& consumer, KeyGradients<Config>& sums, const Work& work,
                                                   GradientFormat format, bool rotated) {
  if (rotated) rotate_back<Config::kHeadDim>(sums.key, consumer.lane());
#pragma unroll
  for (int i = 0; i < Config::kHeadDim / 2; ++i) sums.key[i] *= consumer.params.softmax_scale;
  write_rows_of_keys<Config::kHeadDim>(consumer, consumer.params.d_key, sums.key, work, format);
}

}  // namespace flamia::sm90::backward
