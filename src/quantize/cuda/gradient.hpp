// SPDX-License-Identifier: Apache-2.0
// What the backward pass needs of dO, in one launch: dO' = dO / l quantised (rows and transposed), D' = rowsum(dequantised dO' o O),
// the power of two that dQ's partial sums carry, and dQ's accumulator set to zero.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "flamia/status.hpp"
#include "flamia/types.hpp"
#include "quantize/cuda/quantise.hpp"

namespace flamia::quantize::gpu {

struct GradientParams {
  TensorView d_o;  // [tokens, heads, head_dim], BF16 or FP16
  TensorView o;    // the forward pass's output, BF16 or F32 (then rounded to BF16 first: D' is defined from BF16(O))
  int heads = 0;
  int key_heads = 0;  // divides heads
  int head_dim = 0;   // 64 or 128
  Group group = Group::block;
  const float* row_sum = nullptr;  // l, [heads][slots]; rows with l = 0 or +inf see no key and become zero rows
  schedule::MaskReach reach;

  std::uint8_t* rows = nullptr;
  std::uint8_t* transposed = nullptr;  // order pi
  std::uint8_t* exponents = nullptr;   // [heads][slots]
  float* d_prime = nullptr;            // D', [heads][slots]; 0 in slots without a token

  // Scale of dQ (quantize/cuda/prescale.hpp): partial sums of row i are multiplied by 2^z, z = dq_exponent[i].
  const std::uint8_t* key_prefix = nullptr;  // prefix_exponents of K and V, [key_heads][slots]
  const std::uint8_t* value_prefix = nullptr;
  std::int16_t* dq_exponent = nullptr;    // [heads][slots]; null: not wanted
  void* dq_accumulator = nullptr;         // [heads][slots][head_dim], set to zero; null: not wanted
  std::int64_t dq_untouched_tokens = -1;  // in documents of at most so many tokens it is left as it is
  int dq_accumulator_bytes = 2;           // of one element: 2 or 4

  std::int64_t slots = 0;
  const schedule::gpu::TokenBlock* blocks = nullptr;
  std::int64_t block_capacity = 0;
  std::uint32_t* scratch = nullptr;  // Group::tensor: 4 bytes, any contents
};

Status launch_gradient(const GradientParams& params, cudaStream_t stream);

}  // namespace flamia::quantize::gpu
