// SPDX-License-Identifier: Apache-2.0
#include "forward.cuh"
#include "launch.cuh"

namespace flamia::sm90::int8 {

template cudaError_t launch<Forward<64>>(const ForwardParams&, cudaStream_t);
template cudaError_t launch<Forward<128>>(const ForwardParams&, cudaStream_t);

}  // namespace flamia::sm90::int8
