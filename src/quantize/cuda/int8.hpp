// SPDX-License-Identifier: Apache-2.0
// INT8 on the GPU (recipe `sagebwd`): blocks of 128 tokens (from the document's start) x head dim with an FP32 scale of amax / 127, K less its mean over the document, in
// the layouts of sm90/layout.hpp. One launch an operand, and one before it for the means (means.hpp).
//
// Codes and scales equal those of the host quantiser (quantize/quantize.hpp) but where a mean's last bit differs: its sum is made in double, in
// another order.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "flamia/status.hpp"
#include "flamia/types.hpp"
#include "quantize/cuda/means.hpp"
#include "schedule/cuda/schedule.hpp"

namespace flamia::quantize::gpu {

struct Int8Params {
  TensorView input;  // [tokens, heads, head_dim], BF16 or FP16
  int heads = 0;
  int head_dim = 0;              // 64 or 128
  const float* means = nullptr;  // subtracted from the codes' operand; null: nothing is

  // Results. Slots without a token hold 0. Null: not wanted.
  std::uint8_t* rows = nullptr;
  std::uint8_t* transposed = nullptr;  // order pi
  bool decoded = false;                // rows16 is what the codes stand for
  std::uint16_t* rows16 = nullptr;     // the input in BF16, [heads][slots / 8][d / 8][slot % 8][8]
  float* scales = nullptr;  // [heads][slots / 16], of the block that the slots belong to; NaN: it holds NaN or infinity. Never null

  // Of Q: q . mean of its key head, [heads][slots]
  const float* key_means = nullptr;
  int key_heads = 0;
  float* key_mean_score = nullptr;

  // Of dO, D = rowsum(dO o BF16(O)): -D as a sum of three BF16 numbers, [heads][slots][8], the rest 0; m + log2 l, [heads][slots]. 0 where l is 0
  TensorView output;  // O, BF16 or F32
  const float* row_reference = nullptr;
  const float* row_sum = nullptr;
  std::uint16_t* row_d = nullptr;
  float* row_lse = nullptr;

  std::int64_t slots = 0;
  const schedule::gpu::TokenBlock* blocks = nullptr;
  std::int64_t block_capacity = 0;
};

Status launch_int8(const Int8Params& params, cudaStream_t stream);

}  // namespace flamia::quantize::gpu
