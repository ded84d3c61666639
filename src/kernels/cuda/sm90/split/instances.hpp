// SPDX-License-Identifier: Apache-2.0
// The kernels behind split.hpp: what the public entry may launch. Instances are compiled in files of their own.
#pragma once
#include <cuda_runtime_api.h>

#include "split.hpp"

namespace flamia::sm90::split {

template <int kHeadDim, ScaleGroup kScaleGroup>
cudaError_t launch_query_gradient(const BackwardParams& params, const BackwardConfig& config, int multiprocessors,
                                  cudaStream_t stream);

template <int kHeadDim, ScaleGroup kScaleGroup>
cudaError_t launch_key_gradients(const BackwardParams& params, const BackwardConfig& config, int multiprocessors,
                                 cudaStream_t stream);

}  // namespace flamia::sm90::split
