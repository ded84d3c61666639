// SPDX-License-Identifier: Apache-2.0
// The kernel of dK and dV for head dim 128, exponents per block.
#include "key_launch.cuh"

namespace flamia::sm90::split {

template cudaError_t launch_key_gradients<128, ScaleGroup::block>(const BackwardParams&, const BackwardConfig&, int, cudaStream_t);

}  // namespace flamia::sm90::split
