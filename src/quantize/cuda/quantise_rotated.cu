// SPDX-License-Identifier: Apache-2.0
#include "quantize/cuda/instance.cuh"
#include "quantize/cuda/rotated_kernel.cuh"

namespace flamia::quantize::gpu {

void enqueue_rotated(const OperandSet& set, Chain& chain) {
  with_instance(set.operand[0].head_dim, set.operand[0].input.dtype,
                [&]<int D, class Element>() { launch_rotated<D, Element>(set, chain); });
}

}  // namespace flamia::quantize::gpu
