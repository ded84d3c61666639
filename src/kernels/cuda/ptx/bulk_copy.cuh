// SPDX-License-Identifier: Apache-2.0
// One-dimensional bulk copies from global to shared memory that complete on an mbarrier.
#pragma once
#include <cuda/ptx>

#include <cstdint>

#include "barrier.cuh"

namespace flamia::ptx {

/// Both addresses and `bytes` are multiples of 16; the barrier receives `bytes` when the copy has landed.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, std::uint32_t bytes, Barrier* landed) {
  cuda::ptx::cp_async_bulk(cuda::ptx::space_cluster, cuda::ptx::space_global, shared, global, bytes, landed);
}

}  // namespace flamia::ptx
