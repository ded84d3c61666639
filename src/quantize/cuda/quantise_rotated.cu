// SPDX-License-Identifier: Apache-2.0
#include "quantize/cuda/rotated_kernel.cuh"

namespace flamia::quantize::gpu {

void enqueue_rotated(const OperandSet& set, Chain& chain) { launch_rotated<false>(set, chain); }

}  // namespace flamia::quantize::gpu
