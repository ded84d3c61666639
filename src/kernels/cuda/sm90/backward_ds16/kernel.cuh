// SPDX-License-Identifier: Apache-2.0
// The gradients kernel with dS in BF16: a persistent block per multiprocessor, two consumer warpgroups and three copying threads. An item is a tile of
// 128 keys of a key head; its steps are 64 queries each, of the query heads of the group one after the other.
#pragma once
#include "../split/frame.cuh"
#include "key_consumer.cuh"
#include "producer.cuh"

namespace flamia::sm90::ds16 {

template <class Config>
__device__ __forceinline__ void initialise(Storage<Config>& storage) {
  ptx::barrier_init(&storage.item_wanted, 1);
  ptx::barrier_init(&storage.item_ready, 1);
  ptx::barrier_init(&storage.keys_ready, 1);
  ptx::barrier_init(&storage.keys_free, Config::kConsumerWarps);
  for (int i = 0; i < Config::kRing; ++i) {
    ptx::barrier_init(&storage.early_ready[i], 1);
    ptx::barrier_init(&storage.early_free[i], Config::kConsumerWarps + 1);
    ptx::barrier_init(&storage.exchange_ready[i], Config::kConsumerWarps);
  }
  split::initialise_ring(storage.late_ready, storage.late_free, Config::kConsumerWarps);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    gradients_kernel(const __grid_constant__ BackwardParams params, const __grid_constant__ RowArrays rows, GradientFormat format,
                     bool rotated) {
  extern __shared__ __align__(1024) std::uint8_t shared_memory[];
  auto& storage = *reinterpret_cast<Storage<Config>*>(shared_memory);
  split::run_roles<Config>([&] { initialise<Config>(storage); },
                           [&](int thread) {
                             const Producer<Config> producer{params, rows, storage};
                             if (thread == 0) producer.copy_early();
                             if (thread == 32) producer.copy_late();
                             if (thread == 64) producer.schedule();
                           },
                           [&](int, int group) {
                             if constexpr (Config::kQueryGradients)
                               consume<Consumer>(params, storage, format, rotated, group);
                             else
                               consume<KeyConsumer>(params, storage, format, rotated, group);
                           });
}

}  // namespace flamia::sm90::ds16
