// SPDX-License-Identifier: Apache-2.0
// The kernels that write NVFP4 beside E4M3: a translation unit of their own, for they take long to compile.
#include "quantize/cuda/instance.cuh"
#include "quantize/cuda/nvfp4_kernel.cuh"

namespace flamia::quantize::gpu {

void enqueue_nvfp4(const OperandSet& set, Chain& chain) {
  with_instance(set.operand[0].head_dim, set.operand[0].input.dtype,
                [&]<int D, class Element>() { launch_nvfp4<D, Element>(set, chain); });
}

}  // namespace flamia::quantize::gpu
