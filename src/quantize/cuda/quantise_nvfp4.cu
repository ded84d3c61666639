// SPDX-License-Identifier: Apache-2.0
// The kernels that write NVFP4 beside E4M3: a translation unit of their own, for they take long to compile.
#include "quantize/cuda/rotated_kernel.cuh"

namespace flamia::quantize::gpu {

void enqueue_nvfp4(const OperandSet& set, Chain& chain) { launch_rotated<true>(set, chain); }

}  // namespace flamia::quantize::gpu
