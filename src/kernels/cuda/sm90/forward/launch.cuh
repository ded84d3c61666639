// SPDX-License-Identifier: Apache-2.0
// Launching one instance of the kernel; included by the translation units that instantiate it.
#pragma once
#include <cuda_runtime_api.h>

#include "kernel.cuh"

namespace flamia::sm90::forward {

inline constexpr int kSharedAlign = 128;  // dynamic shared memory is only promised 16 bytes of alignment

template <class Config>
cudaError_t launch(const ForwardParams& params, cudaStream_t stream) {
  constexpr int shared_bytes = static_cast<int>(sizeof(Storage<Config>)) + kSharedAlign;
  static_assert(shared_bytes <= 227 * 1024, "a block may use 227 KiB of shared memory");
  int device = 0, multiprocessors = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess) {
    return error;
  }
  if (const cudaError_t error =
          cudaFuncSetAttribute(forward_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
      error != cudaSuccess) {
    return error;
  }
  forward_kernel<Config><<<multiprocessors, Config::kThreads, shared_bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace flamia::sm90::forward
