// SPDX-License-Identifier: Apache-2.0
// The dQ kernel with dS in BF16 for head dim 128, scores from NVFP4.
#include "query_launch.cuh"

namespace flamia::sm90::ds16 {

template cudaError_t launch_query_gradient<128, ScaleGroup::nvfp4>(const BackwardParams&, const BackwardConfig&, int, cudaStream_t);

}  // namespace flamia::sm90::ds16
