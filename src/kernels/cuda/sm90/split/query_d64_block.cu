// SPDX-License-Identifier: Apache-2.0
// The dQ kernel for head dim 64, exponents per block.
#include "query_launch.cuh"

namespace flamia::sm90::split {

template cudaError_t launch_query_gradient<64, ScaleGroup::block>(const BackwardParams&, const BackwardConfig&, int, cudaStream_t);

}  // namespace flamia::sm90::split
