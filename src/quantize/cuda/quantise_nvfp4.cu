// SPDX-License-Identifier: Apache-2.0
// The kernels that write NVFP4 beside E4M3: a translation unit of their own, for they take long to compile.
#include "quantize/cuda/nvfp4_kernel.cuh"

namespace flamia::quantize::gpu {

void enqueue_nvfp4(const OperandSet& set, Chain& chain) {
  const bool bf16 = set.operand[0].input.dtype == DType::bf16;
  if (set.operand[0].head_dim == 128)
    bf16 ? launch_nvfp4<128, __nv_bfloat16>(set, chain) : launch_nvfp4<128, __half>(set, chain);
  else
    bf16 ? launch_nvfp4<64, __nv_bfloat16>(set, chain) : launch_nvfp4<64, __half>(set, chain);
}

}  // namespace flamia::quantize::gpu
