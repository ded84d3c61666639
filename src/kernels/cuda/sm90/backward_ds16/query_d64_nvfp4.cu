// SPDX-License-Identifier: Apache-2.0
// The dQ kernel with dS in BF16 for head dim 64, scores from NVFP4.
#include "query_launch.cuh"

namespace flamia::sm90::ds16 {

template cudaError_t launch_query_gradient<64, ScaleGroup::nvfp4>(const BackwardParams&, const BackwardConfig&, int, cudaStream_t);

}  // namespace flamia::sm90::ds16
