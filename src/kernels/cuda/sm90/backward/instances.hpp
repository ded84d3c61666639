// SPDX-License-Identifier: Apache-2.0
// The kernels behind backward.hpp: what the public entry may launch. Instances are compiled in files of their own.
#pragma once
#include <cuda_runtime_api.h>

#include "backward.hpp"
#include "config.hpp"

namespace flamia::sm90::backward {

cudaError_t launch_prepare(const BackwardParams& params, bool scaled_partials, int multiprocessors, cudaStream_t stream);

/// kernel.cuh's gradients kernel for one head dim and scale group.
template <int kHeadDim, ScaleGroup kScaleGroup>
cudaError_t launch_gradients(const BackwardParams& params, const BackwardConfig& config, int multiprocessors, cudaStream_t stream);

cudaError_t launch_finish(const BackwardParams& params, const BackwardConfig& config, int multiprocessors, cudaStream_t stream);

}  // namespace flamia::sm90::backward
