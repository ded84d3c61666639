// SPDX-License-Identifier: Apache-2.0
#include "quantize/cuda/rotated_kernel.cuh"

namespace flamia::quantize::gpu {

void enqueue_rotated(const OperandSet& set, Chain& chain) {
  const bool bf16 = set.operand[0].input.dtype == DType::bf16;
  if (set.operand[0].head_dim == 128)
    bf16 ? launch_rotated<128, __nv_bfloat16>(set, chain) : launch_rotated<128, __half>(set, chain);
  else
    bf16 ? launch_rotated<64, __nv_bfloat16>(set, chain) : launch_rotated<64, __half>(set, chain);
}

}  // namespace flamia::quantize::gpu
