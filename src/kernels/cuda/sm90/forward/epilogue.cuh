// SPDX-License-Identifier: Apache-2.0
// Rows leave: O = A / l in BF16, the log-sum-exp, and the row's reference and sum for the backward pass.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "../../ptx/matrix.cuh"
#include "config.hpp"
#include "storage.hpp"
#include "tile_output.cuh"

namespace flamia::sm90::forward {

__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

/// 64 channels of the warp's 16 rows through shared memory, so that eight lanes write 128 consecutive bytes of a row. Chunks of eight
/// channels (16 bytes) lie at chunk ^ row % 8: neither the stores of matrices nor the loads of rows meet a bank twice.
template <class Config>
__device__ __forceinline__ void store_channels(const ForwardParams& params, const Work& work, const float* output,
                                               const float (&inverse)[2], std::uint8_t* stage, int channel, int first_row,
                                               int lane) {
  constexpr int kRows = Config::kRowsOut, kHalves = kRows / 8;  // at once: both halves of the warp's rows, or one
  constexpr int kChunks = 4 / kHalves, kLoads = kRows / 4;      // of a store, of a lane
  const int row = lane % kRows;                                 // of the matrix row that this lane addresses
  const std::uint32_t at = ptx::shared_address(stage) + row * 128;
  const int chunk = lane % 8;
  auto* const out = static_cast<std::uint8_t*>(params.output) + 2 * (work.head * Config::kHeadDim + channel + 8 * chunk);
#pragma unroll
  for (int first = 0; first < 16; first += kRows) {
#pragma unroll
    for (int some = 0; some < 8; some += kChunks) {
      std::uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = first / 8 + i % kHalves;
        const float* const two = output + 4 * (some + i / kHalves) + 2 * half;
        word[i] = pack_bf16(two[0] * inverse[half], two[1] * inverse[half]);
      }
      ptx::store_matrices(at + ((some + lane / kRows ^ row % 8) << 4), word[0], word[1], word[2], word[3]);
    }
    __syncwarp();
    const std::int64_t first_token = static_cast<std::int64_t>(work.token_start) + first_row + first;
    uint4 data[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int r = 4 * i + lane / 8;
      data[i] = *reinterpret_cast<const uint4*>(stage + r * 128 + ((chunk ^ r % 8) << 4));
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int r = 4 * i + lane / 8;
      if (first_row + first + r < work.length)
        *reinterpret_cast<uint4*>(out + (first_token + r) * (2 * Config::kHeadDim * params.query_heads)) = data[i];
    }
    __syncwarp();
  }
}

/// Stores the warp's 16 rows, those inside the document. `first_row` is the warp's first position in the document.
template <class Config>
__device__ __forceinline__ void store_rows(const ForwardParams& params, const Work& work, const RowState<Config>& state, int unit,
                                           std::uint8_t* stage, int first_row, int lane) {
  constexpr float ln2 = 0.6931471805599453f;
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) inverse[half] = __frcp_rn(state.sum[half]) * power_of_two(unit);
  const int half = lane % 4, row = first_row + lane / 4 + 8 * half;  // two of the four lanes that share two rows write for one each
  if (half < 2 && row < work.length) {
    const float reference = half == 0 ? state.reference[0] : state.reference[1];
    const float sum = (half == 0 ? state.sum[0] : state.sum[1]) * power_of_two(-static_cast<int>(kCodeShift));
    params.lse[work.head * params.tokens + work.token_start + row] = (reference + log2f(sum)) * ln2;
    const std::int64_t slot = work.head * params.slots + work.slot_start + row;
    if (params.row_reference != nullptr) params.row_reference[slot] = reference;
    if (params.row_sum != nullptr) params.row_sum[slot] = sum;
  }
#pragma unroll
  for (int channel = 0; channel < Config::kHeadDim; channel += 64) {
    store_channels<Config>(params, work, state.output + channel / 2, inverse, stage, channel, first_row, lane);
  }
}

}  // namespace flamia::sm90::forward
