// SPDX-License-Identifier: Apache-2.0
#include "key_gradients.cuh"
#include "launch.cuh"

namespace flamia::sm90::int8 {

template cudaError_t launch<KeyGradients<64>>(const BackwardParams&, cudaStream_t);
template cudaError_t launch<KeyGradients<128>>(const BackwardParams&, cudaStream_t);

}  // namespace flamia::sm90::int8
