// SPDX-License-Identifier: Apache-2.0
// Launching one instance of the kernel; included by the translation units that instantiate it.
#pragma once
#include <cuda_runtime_api.h>

#include "../../launch_overlapped.cuh"
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
  if (const cudaError_t error = allow_shared_memory<forward_kernel<Config>, shared_bytes>(); error != cudaSuccess) return error;
  return launch_overlapped(forward_kernel<Config>, dim3(static_cast<unsigned>(multiprocessors)), Config::kThreads, shared_bytes,
                           stream, params);
}

}  // namespace flamia::sm90::forward
