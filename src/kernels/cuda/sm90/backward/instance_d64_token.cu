// SPDX-License-Identifier: Apache-2.0
// Gradients kernels for head dim 64, exponents per token.
#include "launch.cuh"

namespace flamia::sm90::backward {

template cudaError_t launch_gradients<64, ScaleGroup::token>(const BackwardParams&, const BackwardConfig&, int, cudaStream_t);

}  // namespace flamia::sm90::backward
