// SPDX-License-Identifier: Apache-2.0
#include "launch.cuh"

namespace flamia::sm90::forward {

template cudaError_t launch<Config<128, ScaleGroup::nvfp4, RowReference::phase32, false>>(const ForwardParams&, cudaStream_t);
template cudaError_t launch<Config<128, ScaleGroup::nvfp4, RowReference::phase32, true>>(const ForwardParams&, cudaStream_t);
template cudaError_t launch<Config<128, ScaleGroup::nvfp4, RowReference::tilesum, false>>(const ForwardParams&, cudaStream_t);
template cudaError_t launch<Config<128, ScaleGroup::nvfp4, RowReference::tilesum, true>>(const ForwardParams&, cudaStream_t);

}  // namespace flamia::sm90::forward
