// SPDX-License-Identifier: Apache-2.0
// Gradients kernels with dS in BF16 for head dim 64, scores from NVFP4.
#include "launch.cuh"

namespace flamia::sm90::ds16 {

template cudaError_t launch_gradients<64, ScaleGroup::nvfp4>(const BackwardParams&, const BackwardConfig&, int, cudaStream_t);

}  // namespace flamia::sm90::ds16
