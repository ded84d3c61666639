// SPDX-License-Identifier: Apache-2.0
// What the kernels of the split pass and of ../backward_ds16 have in common around their work: two consumer warpgroups, copying threads in the
// third, and rings of buffers between them.
#pragma once
#include <cstdint>

#include "../../ptx/barrier.cuh"
#include "../../ptx/registers.cuh"
#include "../backward/power.cuh"

namespace flamia::sm90::split {

/// Dynamic shared memory is only promised 16 bytes of alignment; the launch asks for what rounding up takes.
template <class Storage>
__device__ __forceinline__ Storage& storage_in(std::uint8_t* shared_memory) {
  return *reinterpret_cast<Storage*>(shared_memory +
                                     ((0u - static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_memory))) & 127u));
}

/// Barriers of a ring: the copying thread makes a slot ready, every consumer warp frees it.
template <int kSlots>
__device__ __forceinline__ void initialise_ring(std::uint64_t (&ready)[kSlots], std::uint64_t (&free)[kSlots], int consumer_warps) {
  for (int i = 0; i < kSlots; ++i) {
    ptx::barrier_init(&ready[i], 1);
    ptx::barrier_init(&free[i], consumer_warps);
  }
}

/// `initialise` by one thread; then consume(thread of the warpgroup, warpgroup) beside copy(thread of the warpgroup).
template <class Config, class Initialise, class Copy, class Consume>
__device__ __forceinline__ void run_roles(Initialise initialise, Copy copy, Consume consume) {
  const int warpgroup = __shfl_sync(backward::kFullWarp, static_cast<int>(threadIdx.x) / 128, 0), thread = threadIdx.x % 128;
  if (threadIdx.x == 0) initialise();
  ptx::fence_before_async_use();
  __syncthreads();
  if (warpgroup == 2) {
    ptx::give_registers<Config::kProducerRegisters>();
    copy(thread);
  } else {
    ptx::take_registers<Config::kConsumerRegisters>();
    consume(thread, warpgroup);
  }
}

}  // namespace flamia::sm90::split
