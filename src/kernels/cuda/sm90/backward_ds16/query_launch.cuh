// SPDX-License-Identifier: Apache-2.0
// Launching the dQ kernel; included by the translation units that instantiate it.
#pragma once
#include <cuda_runtime_api.h>

#include "instances.hpp"
#include "query_kernel.cuh"

namespace flamia::sm90::ds16 {

template <int kHeadDim, ScaleGroup kScaleGroup>
cudaError_t launch_query_gradient(const BackwardParams& params, const BackwardConfig& config, int multiprocessors,
                                  cudaStream_t stream) {
  using Instance = QueryConfig<kHeadDim, kScaleGroup>;
  constexpr int shared_bytes = static_cast<int>(sizeof(QueryStorage<Instance>));
  static_assert(shared_bytes <= 227 * 1024, "a block may use 227 KiB of shared memory");
  if (const cudaError_t error =
          cudaFuncSetAttribute(query_gradient_kernel<Instance>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
      error != cudaSuccess) {
    return error;
  }
  query_gradient_kernel<Instance>
      <<<multiprocessors, Instance::kThreads, shared_bytes, stream>>>(params, config.gradients, config.rotated);
  return cudaGetLastError();
}

}  // namespace flamia::sm90::ds16
