// SPDX-License-Identifier: Apache-2.0
// The gradients kernel: a persistent block per multiprocessor, three warpgroups. An item is a tile of 128 keys of a key head; its steps are
// 64 queries each, of the query heads of the group one after the other.
//
//   time ->         step n                                        step n + 1                                    end of item
//   consumer 0      dV(n)  dK(n) | S P dP dS(n+1), which leaves | dV(n+1)  dK(n+1) | S P dP dS(n+2) ...        dK, dV leave
//   consumer 1          dV(n)  dK(n) | S P dP dS(n+1), which leaves | ...                                      dK, dV leave
//   dQ warpgroup    maxima(n)  payload  dS(n) K, added to dQ      | maxima(n+1) ...                            K, V of the next item
//                   copies of step n - 1 + stages (dS(n) is there: step n - 1 is done with)
//
// Barriers: stage_ready (copies of a step have landed), exchange_ready (both consumers have written dS), exchange_free (the dQ warpgroup has
// read it and its payload), keys_ready and transposed_keys_ready (K and V, Kt of an item have landed). exchange_ready of step n also says that
// every read of the stage of step n - 1 and, for an item's last step, of K and V, is over; so no further barrier frees them.
//
// What bounds it (docs/log/backward.md): instructions issued, the latency of shared memory under the products' operand reads, and the
// instruction cache. So both consumers run the same code, and steps without masks a loop body without rare branches.
#pragma once
#include "../../ptx/registers.cuh"
#include "config.hpp"
#include "consumer.cuh"
#include "query_gradient.cuh"
#include "storage.hpp"

namespace flamia::sm90::backward {

template <class Config>
__device__ __forceinline__ void initialise(Storage<Config>& storage) {
  if (threadIdx.x == 0) {
    ptx::barrier_init(&storage.keys_ready, 3);
    ptx::barrier_init(&storage.transposed_keys_ready, 1);
    for (int i = 0; i < Config::kStages; ++i) ptx::barrier_init(&storage.stage_ready[i], 4);
    for (int i = 0; i < Config::kExchangeSlots; ++i) {
      ptx::barrier_init(&storage.exchange_ready[i], Config::kConsumerWarps);
      ptx::barrier_init(&storage.exchange_free[i], 4);
    }
  }
  ptx::fence_before_async_use();
  __syncthreads();
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    gradients_kernel(const __grid_constant__ BackwardParams params, GradientFormat format, bool rotated) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  auto& storage = *reinterpret_cast<Storage<Config>*>(shared_memory);
  const int warpgroup = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 128, 0), thread = threadIdx.x % 128;
  initialise<Config>(storage);
  if (warpgroup == 2) {
    ptx::give_registers<Config::kQueryRegisters>();
    make_query_gradients<Config>(params, storage, thread);
  } else {
    ptx::take_registers<Config::kConsumerRegisters>();
    consume<Config>(params, storage, format, rotated, warpgroup, thread);
  }
}

}  // namespace flamia::sm90::backward
