// SPDX-License-Identifier: Apache-2.0
// Q, K and V as `sage3` has them, on the GPU: BF16 or FP16 in, NVFP4 as FP16 values (code times scale, exact) out, in the layouts of
// sm90/sage3. K less its mean over the document and Q less its mean over tiles of 128 tokens, in blocks of 16 channels; V in blocks of 16
// tokens. Values equal those of the host quantiser bit for bit (the means as long as double holds the sums exactly).
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "flamia/status.hpp"
#include "flamia/types.hpp"
#include "kernels/cuda/sm90/layout.hpp"
#include "schedule/cuda/schedule.hpp"

namespace flamia::quantize::gpu {

/// One operand's results.
struct SmoothedOutputs {
  std::uint16_t* halves = nullptr;  // Q, K: rows_f16; V: columns_f16
  std::uint8_t* flags =
      nullptr;  // [heads][slots]: 1 where the token (V: its block of 16) holds NaN or infinity, whose values are 0
};

struct Sage3Params {
  TensorView q, k, v;  // BF16 or FP16; data and strides multiples of 16 bytes
  int query_heads = 0, key_heads = 0;
  int head_dim = 0;  // 64 or 128
  float softmax_scale = 0.f;

  SmoothedOutputs query, key, value;
  float* query_means = nullptr;  // [query_heads][slots / kSlotAlign][head_dim], that of a tile at its first slot
  float* key_means = nullptr;    // [documents][key_heads][head_dim]
  float* mean_scores = nullptr;  // [query_heads][slots]: softmax_scale * q . k'

  std::int64_t slots = 0;
  std::int64_t document_capacity = 0, item_capacity = 0;
  const sm90::Document* documents = nullptr;
  const sm90::WorkItem* items = nullptr;  // every tile of 128 tokens once
  const schedule::gpu::Totals* totals = nullptr;
};

/// Enqueues kernels only: can be captured.
Status launch_sage3(const Sage3Params& params, cudaStream_t stream);

}  // namespace flamia::quantize::gpu
