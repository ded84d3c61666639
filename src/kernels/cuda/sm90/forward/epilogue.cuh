// SPDX-License-Identifier: Apache-2.0
// Rows leave: O = A / l in BF16, the log-sum-exp, and the row's reference and sum for the backward pass.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "config.hpp"
#include "tile_output.cuh"

namespace flamia::sm90::forward {

__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

/// Transposes 4 x 4 words inside a quad: thread c gives word i to thread i and ends with word c of all four.
__device__ __forceinline__ void transpose_quad(std::uint32_t (&word)[4], int c) {
  std::uint32_t a = c & 1 ? word[0] : word[1], b = c & 1 ? word[2] : word[3];
  a = __shfl_xor_sync(kFullWarp, a, 1);
  b = __shfl_xor_sync(kFullWarp, b, 1);
  if (c & 1) {
    word[0] = a;
    word[2] = b;
  } else {
    word[1] = a;
    word[3] = b;
  }
  a = c & 2 ? word[0] : word[2];
  b = c & 2 ? word[1] : word[3];
  a = __shfl_xor_sync(kFullWarp, a, 2);
  b = __shfl_xor_sync(kFullWarp, b, 2);
  if (c & 2) {
    word[0] = a;
    word[1] = b;
  } else {
    word[2] = a;
    word[3] = b;
  }
}

/// Stores the warp's 16 rows, those inside the document. `first_row` is the warp's first position in the document.
template <class Config>
__device__ __forceinline__ void store_rows(const ForwardParams& params, const Work& work, const RowState<Config>& state, int unit,
                                           int first_row, int lane) {
  const int c = lane % 4;
  constexpr float ln2 = 0.6931471805599453f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + lane / 4 + 8 * half;
    const bool inside = row < work.length;
    const std::int64_t token = static_cast<std::int64_t>(work.token_start) + row;
    const float inverse = power_of_two(unit) / state.sum[half];
    if (c == 0 && inside) {
      const float sum = state.sum[half] * power_of_two(-static_cast<int>(kCodeShift<Config::kReference>));
      params.lse[work.head * params.tokens + token] = (state.reference[half] + log2f(sum)) * ln2;
      const std::int64_t slot = work.head * params.slots + work.slot_start + row;
      if (params.row_reference != nullptr) params.row_reference[slot] = state.reference[half];
      if (params.row_sum != nullptr) params.row_sum[slot] = sum;
    }
    auto* const output =
        static_cast<std::uint32_t*>(params.output) + (token * params.query_heads + work.head) * (Config::kHeadDim / 2);
#pragma unroll
    for (int block = 0; block < Config::kHeadDim / 32; ++block) {  // 32 channels: four groups of eight
      std::uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 16 * block + 4 * i + 2 * half;
        word[i] = pack_bf16(state.output[at] * inverse, state.output[at + 1] * inverse);
      }
      transpose_quad(word, c);
      if (inside) *reinterpret_cast<uint4*>(output + 16 * block + 4 * c) = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
}

}  // namespace flamia::sm90::forward
