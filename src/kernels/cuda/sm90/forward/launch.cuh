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
  return launch_persistent<forward_kernel<Config>, static_cast<int>(sizeof(Storage<Config>)) + kSharedAlign>(
      multiprocessors, Config::kThreads, stream, params);
}

}  // namespace flamia::sm90::forward
