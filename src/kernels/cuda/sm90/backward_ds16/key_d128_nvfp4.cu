// SPDX-License-Identifier: Apache-2.0
// The gradients kernel with dS in BF16 for dK and dV alone, head dim 128, scores from NVFP4.
#include "launch.cuh"

namespace flamia::sm90::ds16 {

template cudaError_t launch_key_gradients<128, ScaleGroup::nvfp4>(const BackwardParams&, const BackwardConfig&, int, cudaStream_t);

}  // namespace flamia::sm90::ds16
