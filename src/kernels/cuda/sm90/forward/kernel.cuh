// SPDX-License-Identifier: Apache-2.0
// The kernel: a persistent block per multiprocessor, four warpgroups.
//
//   time ->            item n                                                          item n + 1
//   scheduler warp     ticket, item, document: when the copy warp comes near the end of an item ...........
//   copy warp          Q | K V exponents of tile t | t-1 | t-2 | ... (as stages become free) | Q | K V ...
//   query warp     NVFP4, d = 128: Q of a consumer as soon as it has no use for its old one ................
//   consumer 0         S(t) softmax PV(t) promote | S(t-1) softmax PV promote | ... | rows leave | S ...
//   consumer 1             S(t) softmax PV(t) promote | ...              the three drift apart by themselves: one
//   consumer 2                 S(t) softmax PV(t) ...                    multiplies while another exponentiates
//
// Every row takes its key tiles from the highest down, so results do not depend on the query tile.
#pragma once
#include "../../ptx/registers.cuh"
#include "config.hpp"
#include "consumer.cuh"
#include "loader.cuh"
#include "storage.hpp"

namespace flamia::sm90::forward {

/// Ones beside V, and the barriers. Ends with a block-wide barrier.
template <class Config>
__device__ __forceinline__ void prepare(Storage<Config>& storage) {
  constexpr std::uint32_t one_e4m3_x4 = 0x38383838u;
  constexpr int words = Config::kStages * Config::kTokenGroups * Config::kOnesBytes / 4;
  for (int i = threadIdx.x; i < words; i += Config::kThreads) {
    const int word = i % (Config::kOnesBytes / 4), group = i / (Config::kOnesBytes / 4);
    std::uint8_t* const ones = storage.stages[group / Config::kTokenGroups].value +
                               group % Config::kTokenGroups * Config::kValueGroupStride + Config::kValueGroupBytes;
    reinterpret_cast<std::uint32_t*>(ones)[word] = one_e4m3_x4;
  }
  if (threadIdx.x < 2 * Config::kOnesBytes / 4) reinterpret_cast<std::uint32_t*>(storage.ones)[threadIdx.x] = one_e4m3_x4;
  constexpr int kBlocks = kKeyTile / kBlock;
  if (threadIdx.x < Config::kStages * kBlocks) storage.stages[threadIdx.x / kBlocks].ones_folds[threadIdx.x % kBlocks] = 0;
  if (Config::kBiasFolds && !Config::kTokenBlocks && threadIdx.x < Config::kStages * kBlocks)
    storage.stages[threadIdx.x / kBlocks].shift[threadIdx.x % kBlocks] = 0;
  if (threadIdx.x == 0) {
    constexpr int kWarp = 32;  // lanes of the copy warp
    constexpr int consumer_warps = kWarpsPerConsumer * Config::kConsumers;
    for (int i = 0; i < Config::kWorkSlots; ++i) {
      ptx::barrier_init(&storage.work_ready[i], 1);
      // every consumer warp, the copy warp near its next item's end, the query warp
      ptx::barrier_init(&storage.work_taken[i], consumer_warps + 1 + (Config::kLarge ? 1 : 0));
    }
    for (int i = 0; i < Config::kQueryBarriers; ++i) {
      ptx::barrier_init(&storage.query_ready[i], kWarp);
      ptx::barrier_init(&storage.query_free[i], Config::kLarge ? kWarpsPerConsumer : consumer_warps);
    }
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::barrier_init(&storage.stages[i].ready, Config::kExponentWriters);
      ptx::barrier_init(&storage.stages[i].free, consumer_warps);
    }
  }
  ptx::fence_before_async_use();
  __syncthreads();
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) forward_kernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ std::uint8_t shared_memory[];
  auto& storage = *reinterpret_cast<Storage<Config>*>(
      shared_memory + ((0u - static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_memory))) & 127u));
  const int warpgroup = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 128, 0);
  prepare<Config>(storage);
  if (warpgroup == 0) {
    ptx::give_registers<Config::kLoaderRegisters>();
    const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
    if (warp == 1) {
      copy_operands<Config>(params, storage, lane);
    } else if (warp == 0) {
      if (lane == 0) schedule<Config>(params, storage);
    } else if constexpr (Config::kLarge) {
      if (warp == 2) copy_queries_apart<Config>(params, storage, lane);
    }
  } else {
    ptx::take_registers<Config::kConsumerRegisters>();
    consume<Config>(params, storage, warpgroup - 1, threadIdx.x % 128);
  }
}

}  // namespace flamia::sm90::forward
