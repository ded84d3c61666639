// SPDX-License-Identifier: Apache-2.0
// Launching the dQ kernel; included by the translation units that instantiate it.
#pragma once
#include <cuda_runtime_api.h>

#include "../launch_persistent.cuh"
#include "instances.hpp"
#include "query_kernel.cuh"

namespace flamia::sm90::split {

template <int kHeadDim, ScaleGroup kScaleGroup>
cudaError_t launch_query_gradient(const BackwardParams& params, const BackwardConfig& config, int multiprocessors,
                                  cudaStream_t stream) {
  using Instance = QueryConfig<kHeadDim, kScaleGroup>;
  return launch_persistent<query_gradient_kernel<Instance>, static_cast<int>(sizeof(QueryStorage<Instance>)) + kSharedAlign>(
      multiprocessors, Instance::kThreads, stream, params, config.gradients, config.rotated);
}

}  // namespace flamia::sm90::split
