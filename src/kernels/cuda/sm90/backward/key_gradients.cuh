// SPDX-License-Identifier: Apache-2.0
// dK and dV of a consumer warpgroup: the sums of all steps, and how they leave.
#pragma once
#include <cstdint>

#include "rows_out.cuh"

namespace flamia::sm90::backward {

template <class Config>
struct KeyGradients {
  float key[Config::kHeadDim / 2];    // dK without the softmax scale, rotated
  float value[Config::kHeadDim / 2];  // dV
};

/// Where the thread's rows of dK and dV lie. The consumer knows its lane and its first key of the item's tile (fragments.hpp).
struct KeyRows {
  std::int64_t at, stride;  // elements
  bool valid[2];
};
template <class Config, class Consumer, class Work>
__device__ __forceinline__ KeyRows rows_of_keys(const Consumer& consumer, const Work& work) {
  const int key = work.first_key + consumer.first_row();
  const std::int64_t stride = static_cast<std::int64_t>(consumer.params.key_heads) * Config::kHeadDim;
  const std::int64_t at =
      (static_cast<std::int64_t>(work.token_start) + key) * stride + static_cast<std::int64_t>(work.key_head) * Config::kHeadDim;
  return {at, 8 * stride, {key < work.length, key + 8 < work.length}};
}
template <class Config, class Consumer, class Work>
__device__ __forceinline__ void write_value_gradient(const Consumer& consumer, const KeyGradients<Config>& sums, const Work& work,
                                                     GradientFormat format) {
  const KeyRows rows = rows_of_keys<Config>(consumer, work);
  write_rows<Config::kHeadDim>(consumer.params.d_value, format, rows.at, rows.stride, sums.value, rows.valid, consumer.lane());
}
template <class Config, class Consumer, class Work>
__device__ __forceinline__ void write_key_gradient(const Consumer& consumer, KeyGradients<Config>& sums, const Work& work,
                                                   GradientFormat format, bool rotated) {
  const KeyRows rows = rows_of_keys<Config>(consumer, work);
  const float factor[2] = {consumer.params.softmax_scale, consumer.params.softmax_scale};
  write_turned_back<Config::kHeadDim>(consumer.params.d_key, format, rows.at, rows.stride, sums.key, factor, rotated, rows.valid,
                                      consumer.lane());
}

}  // namespace flamia::sm90::backward
