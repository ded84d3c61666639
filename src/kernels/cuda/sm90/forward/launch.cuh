// SPDX-License-Identifier: Apache-2.0
// Launching one instance of the kernel; included by the translation units that instantiate it.
#pragma once
#include <cuda_runtime_api.h>

#include "../launch_persistent.cuh"
#include "kernel.cuh"

namespace flamia::sm90::forward {

template <class Config>
cudaError_t launch(const ForwardParams& params, cudaStream_t stream) {
  int multiprocessors = 0;
  if (const cudaError_t error = count_multiprocessors(&multiprocessors); error != cudaSuccess) return error;
  constexpr int shared_bytes = static_cast<int>(sizeof(Storage<Config>)) + kSharedAlign;
  if (!params.beside_previous)
    return launch_persistent<forward_kernel<Config>, shared_bytes>(multiprocessors, Config::kThreads, stream, params);
  if (const cudaError_t error =
          cudaFuncSetAttribute(forward_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
      error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute beside{};
  beside.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  beside.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t grid{};
  grid.gridDim = dim3(static_cast<unsigned>(multiprocessors));
  grid.blockDim = dim3(Config::kThreads);
  grid.dynamicSmemBytes = shared_bytes;
  grid.stream = stream;
  grid.attrs = &beside;
  grid.numAttrs = 1;
  return cudaLaunchKernelEx(&grid, forward_kernel<Config>, params);
}

}  // namespace flamia::sm90::forward
