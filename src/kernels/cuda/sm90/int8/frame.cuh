// SPDX-License-Identifier: Apache-2.0
// The frame of the INT8 kernels: a persistent block per multiprocessor; one warp brings operands, consumer warpgroups compute.
//
//   copy warp    ticket n + 1 | fixed(n) | stage 0 | stage 1 | ... as they become free | fixed(n + 1) ...
//   consumers                   wait     | step 0  | step 1  | ...                     | rows leave | step 0 ...
//
// A kernel is a type with its tiles, its shared memory (Fixed: what an item keeps; Stage: what a step streams; Tail: what of it is needed at the
// step's end only, in one buffer; Own: the consumers'), and how an item is found and copied.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../../ptx/barrier.cuh"
#include "../../ptx/bulk_copy.cuh"
#include "../../ptx/registers.cuh"
#include "../forward/storage.hpp"  // Ring
#include "../forward/work.hpp"
#include "int8.hpp"

namespace flamia::sm90::int8 {

using forward::decode_ticket;
using forward::Ring;
using forward::Ticket;
using forward::TileRange;
using forward::Window;

inline constexpr std::uint32_t kFullWarp = 0xffffffffu;
inline constexpr int kWarps = 4;               // of a warpgroup
inline constexpr std::uint32_t kSleep = 2000;  // nanoseconds a waiting copy warp sleeps at most

/// One unit of work as the roles see it; `length` < 0 ends the kernel.
struct alignas(16) Work {
  std::int32_t slot_start, token_start, length, first, head, first_step, steps, unused;
};

template <class Kernel>
struct Storage {
  alignas(128) typename Kernel::Fixed fixed[Kernel::kFixedBuffers];
  // Not the last: an operand whose rows all lie in one place reads 256 bytes, but memcheck takes it for 4 KB in a row, which would leave the block's memory
  // where it is the last.
  alignas(128) typename Kernel::Own own;
  alignas(128) typename Kernel::Stage stage[Kernel::kStages];
  alignas(128) typename Kernel::Tail tail;
  Work work[Kernel::kFixedBuffers];
  std::uint64_t fixed_ready[Kernel::kFixedBuffers];  // copies and the copy warp's lane -> consumers; the item, too
  std::uint64_t fixed_free[Kernel::kFixedBuffers];   // consumers -> copy warp
  std::uint64_t stage_ready[Kernel::kStages];
  std::uint64_t stage_free[Kernel::kStages];
  std::uint64_t tail_ready, tail_free;
};

/// A kernel without.
struct NoTail {};
template <class Kernel>
inline constexpr bool kHasTail = !std::is_same_v<typename Kernel::Tail, NoTail>;

/// A consumer warpgroup's place.
template <class Kernel>
struct Consumer {
  int index;  // warpgroup
  int warp, lane;
  Ring<Kernel::kFixedBuffers> fixed;
  Ring<Kernel::kStages> stage;
  Ring<1> tail;

  __device__ __forceinline__ int first_row() const { return 16 * warp + lane / 4; }  // of the warpgroup's 64; the second is 8 on
};

/// The copy warp, one lane of it.
template <class Kernel, class Params>
__device__ __forceinline__ void produce(const Params& params, Storage<Kernel>& storage) {
  const auto items = static_cast<std::uint32_t>(*params.item_count);
  const auto heads = static_cast<std::uint32_t>(Kernel::heads(params));
  const auto heads_per_group = static_cast<std::uint32_t>(params.key_heads_per_group) * (heads / params.key_heads);
  Ring<Kernel::kFixedBuffers> fixed;
  Ring<Kernel::kStages> stage;
  Ring<1> tail;
  std::uint32_t ticket = blockIdx.x;
  while (true) {
    Work work{};
    work.length = -1;
    const bool more = ticket < items * heads;
    if (more) {
      const Ticket decoded = decode_ticket(ticket, items, heads, heads_per_group);
      const WorkItem item = params.items[decoded.item];
      work = Kernel::work(params, params.documents[item.document], item.first, decoded.head);
      ticket = gridDim.x + atomicAdd(params.counter, 1);
    }
    ptx::barrier_wait_asleep(&storage.fixed_free[fixed.slot], fixed.parity ^ 1, kSleep);
    storage.work[fixed.slot] = work;
    if (!more) {
      ptx::barrier_arrive(&storage.fixed_ready[fixed.slot]);
      break;
    }
    Kernel::copy_fixed(params, work, storage.fixed[fixed.slot], &storage.fixed_ready[fixed.slot]);
    fixed.advance();
    for (int step = 0; step < work.steps; ++step) {
      const auto scales = Kernel::step_scales(params, work, step);
      ptx::barrier_wait_asleep(&storage.stage_free[stage.slot], stage.parity ^ 1, kSleep);
      Kernel::copy_step(params, work, step, scales, storage.stage[stage.slot], &storage.stage_ready[stage.slot]);
      stage.advance();
      if constexpr (kHasTail<Kernel>) {
        ptx::barrier_wait_asleep(&storage.tail_free, tail.parity ^ 1, kSleep);
        Kernel::copy_tail(params, work, step, storage.tail, &storage.tail_ready);
        tail.advance();
      }
    }
  }
  // The last block to run out of tickets leaves the counter as it found it.
  if (atomicAdd(params.counter + 1, 1) == static_cast<int>(gridDim.x) - 1) {
    params.counter[0] = 0;
    params.counter[1] = 0;
  }
}

template <class Kernel, class Params>
__device__ __forceinline__ void consume(const Params& params, Storage<Kernel>& storage, int index, int thread) {
  Consumer<Kernel> self{index, __shfl_sync(kFullWarp, thread / 32, 0), thread % 32, {}, {}, {}};
  while (true) {
    ptx::barrier_wait(&storage.fixed_ready[self.fixed.slot], self.fixed.parity);
    Work work = storage.work[self.fixed.slot];
    work.length = __shfl_sync(kFullWarp, work.length, 0);
    work.first = __shfl_sync(kFullWarp, work.first, 0);
    work.steps = __shfl_sync(kFullWarp, work.steps, 0);
    if (work.length < 0) return;
    Kernel::compute(params, storage, self, work);
    self.fixed.advance();
  }
}

/// One lane of every warp hands a buffer back, behind the warp's own reads.
__device__ __forceinline__ void hand_back(std::uint64_t* free, int lane) {
  __syncwarp();
  if (lane == 0) ptx::barrier_arrive(free);
}

template <class Kernel, class Params>
__global__ void __launch_bounds__(Kernel::kThreads, 1) attention_kernel(const __grid_constant__ Params params) {
  extern __shared__ std::uint8_t shared_memory[];
  auto& storage = *reinterpret_cast<Storage<Kernel>*>(
      shared_memory + ((0u - static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_memory))) & 127u));
  const int warpgroup = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 128, 0);
  if constexpr (requires { Kernel::prepare(storage, 0); }) {
    if (threadIdx.x < 32) Kernel::prepare(storage, static_cast<int>(threadIdx.x));
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < Kernel::kFixedBuffers; ++i) {
      ptx::barrier_init(&storage.fixed_ready[i], 1);
      ptx::barrier_init(&storage.fixed_free[i], kWarps * Kernel::kConsumers);
    }
    for (int i = 0; i < Kernel::kStages; ++i) {
      ptx::barrier_init(&storage.stage_ready[i], 1);
      ptx::barrier_init(&storage.stage_free[i], kWarps * Kernel::kConsumers);
    }
    ptx::barrier_init(&storage.tail_ready, 1);
    ptx::barrier_init(&storage.tail_free, kWarps * Kernel::kConsumers);
  }
  ptx::fence_before_async_use();
  __syncthreads();
  if (warpgroup == 0) {
    ptx::give_registers<Kernel::kCopyRegisters>();
    if (threadIdx.x == 0) produce<Kernel>(params, storage);
  } else {
    ptx::take_registers<Kernel::kConsumerRegisters>();
    consume<Kernel>(params, storage, warpgroup - 1, static_cast<int>(threadIdx.x) % 128);
  }
}

}  // namespace flamia::sm90::int8
