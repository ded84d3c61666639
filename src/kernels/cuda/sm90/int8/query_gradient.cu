// SPDX-License-Identifier: Apache-2.0
#include "launch.cuh"
#include "query_gradient.cuh"

namespace flamia::sm90::int8 {

template cudaError_t launch<QueryGradient<64>>(const BackwardParams&, cudaStream_t);
template cudaError_t launch<QueryGradient<128>>(const BackwardParams&, cudaStream_t);

}  // namespace flamia::sm90::int8
