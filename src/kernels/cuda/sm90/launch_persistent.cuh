// SPDX-License-Identifier: Apache-2.0
// Launching a persistent kernel: a block per multiprocessor, with the shared memory that its storage takes.
#pragma once
#include <cuda_runtime_api.h>

namespace flamia::sm90 {

inline constexpr int kSharedAlign = 128;  // dynamic shared memory is only promised 16 bytes of alignment

inline cudaError_t count_multiprocessors(int* multiprocessors) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(multiprocessors, cudaDevAttrMultiProcessorCount, device);
}

/// Lets blocks of `kKernel` have so much dynamic shared memory.
template <auto kKernel, int kSharedBytes>
cudaError_t allow_shared_memory() {
  static_assert(kSharedBytes <= 227 * 1024, "a block may use 227 KiB of shared memory");
  return cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
}

/// `kKernel` takes `parameters`; its blocks have `threads` threads.
template <auto kKernel, int kSharedBytes, class... Parameters>
cudaError_t launch_persistent(int multiprocessors, int threads, cudaStream_t stream, const Parameters&... parameters) {
  if (const cudaError_t error = allow_shared_memory<kKernel, kSharedBytes>(); error != cudaSuccess) return error;
  kKernel<<<multiprocessors, threads, kSharedBytes, stream>>>(parameters...);
  return cudaGetLastError();
}

}  // namespace flamia::sm90
