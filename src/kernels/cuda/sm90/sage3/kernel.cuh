// SPDX-License-Identifier: Apache-2.0
// The kernel: a persistent block per multiprocessor, three warpgroups.
#pragma once
#include "../launch_persistent.cuh"
#include "consumer.cuh"
#include "loader.cuh"

namespace flamia::sm90::sage3 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) sage3_kernel(const __grid_constant__ Params p) {
  extern __shared__ std::uint8_t shared_memory[];
  auto& storage = *reinterpret_cast<Storage<Config>*>(
      shared_memory + ((0u - static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_memory))) & (kSharedAlign - 1)));
  constexpr int kConsumerWarps = 4 * Config::kConsumers;
  if (threadIdx.x == 0) {
    ptx::barrier_init(&storage.query_ready, 1);
    ptx::barrier_init(&storage.query_free, kConsumerWarps);
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::barrier_init(&storage.tile_ready[i], 128);
      ptx::barrier_init(&storage.tile_free[i], kConsumerWarps);
    }
  }
  ptx::fence_before_async_use();
  __syncthreads();
  const int warpgroup = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    ptx::give_registers<Config::kLoaderRegisters>();
    load<Config>(p, storage, static_cast<int>(threadIdx.x));
  } else {
    ptx::take_registers<Config::kConsumerRegisters>();
    consume<Config>(p, storage, warpgroup - 1, static_cast<int>(threadIdx.x) % 128);
  }
}

template <int kHeadDim>
cudaError_t launch_instance(const Params& params, cudaStream_t stream) {
  using Shape = Config<kHeadDim>;
  int multiprocessors = 0;
  if (const cudaError_t error = count_multiprocessors(&multiprocessors); error != cudaSuccess) return error;
  return launch_persistent<sage3_kernel<Shape>, static_cast<int>(sizeof(Storage<Shape>)) + kSharedAlign>(
      multiprocessors, Shape::kThreads, stream, params);
}

}  // namespace flamia::sm90::sage3
