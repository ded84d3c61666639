// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory (mbarrier), named barriers, and the waits built on them.
//
// FLAMIA_WATCHDOG (compile-time) turns a wait that never ends into a trap, so that a protocol error in a kernel under development
// shows as an error instead of a hung GPU. No message: a call inside the loop would serialise the products.
#pragma once
#include <cuda/ptx>

#include <cstdint>

namespace flamia::ptx {

using Barrier = std::uint64_t;

__device__ __forceinline__ void barrier_init(Barrier* barrier, std::uint32_t arrivals) {
  cuda::ptx::mbarrier_init(barrier, arrivals);
}

/// Makes initialised barriers, and ordinary stores so far, visible to the copy engine and the tensor cores.
__device__ __forceinline__ void fence_before_async_use() {
  cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
  cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
}

/// Makes ordinary stores to shared memory so far visible to copy engine and tensor cores (after a barrier: those of its other threads).
__device__ __forceinline__ void fence_async_reads() { cuda::ptx::fence_proxy_async(cuda::ptx::space_shared); }

__device__ __forceinline__ void barrier_arrive(Barrier* barrier) { static_cast<void>(cuda::ptx::mbarrier_arrive(barrier)); }

/// The same for `arrivals` arrivals at once.
__device__ __forceinline__ void barrier_arrive_many(Barrier* barrier, std::uint32_t arrivals) {
  static_cast<void>(
      cuda::ptx::mbarrier_arrive(cuda::ptx::sem_release, cuda::ptx::scope_cta, cuda::ptx::space_shared, barrier, arrivals));
}

/// Arrives and announces `bytes` that bulk copies will still add.
__device__ __forceinline__ void barrier_arrive_expect(Barrier* barrier, std::uint32_t bytes) {
  static_cast<void>(
      cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release, cuda::ptx::scope_cta, cuda::ptx::space_shared, barrier, bytes));
}

/// Whether the phase of this parity has completed.
__device__ __forceinline__ bool barrier_passed(Barrier* barrier, std::uint32_t parity) {
  return cuda::ptx::mbarrier_try_wait_parity(barrier, parity);
}

/// Waits until the phase of this parity has completed.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, std::uint32_t parity) {
#if defined(FLAMIA_WATCHDOG)
  for (std::uint32_t tries = 0; !cuda::ptx::mbarrier_try_wait_parity(barrier, parity); ++tries) {
    if (tries > 4000000) __trap();
  }
#else
  while (!cuda::ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
#endif
}

/// The same for a warp that has time: it sleeps between tries. A spinning warp takes issue slots, and queue slots in front of the
/// special function unit, from the warps that compute beside it.
__device__ __forceinline__ void barrier_wait_patiently(Barrier* barrier, std::uint32_t parity, std::uint32_t nanoseconds) {
  for (std::uint32_t tries = 0; !cuda::ptx::mbarrier_try_wait_parity(barrier, parity); ++tries) {
    __nanosleep(nanoseconds);
#if defined(FLAMIA_WATCHDOG)
    if (tries > 4000000) __trap();
#endif
  }
}

/// The same for a wait that is long as a rule: the warp sleeps up to `nanoseconds` at a time, and the barrier's phase wakes it.
__device__ __forceinline__ void barrier_wait_asleep(Barrier* barrier, std::uint32_t parity, std::uint32_t nanoseconds) {
  for (std::uint32_t tries = 0; !cuda::ptx::mbarrier_try_wait_parity(barrier, parity, nanoseconds); ++tries) {
#if defined(FLAMIA_WATCHDOG)
    if (tries > 4000000) __trap();
#endif
  }
}

// The same by shared address, for a barrier that is found by arithmetic on addresses.

__device__ __forceinline__ void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive_many(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ bool barrier_passed(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t passed;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(passed)
               : "r"(barrier), "r"(parity)
               : "memory");
  return passed != 0;
}
__device__ __forceinline__ void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
#if defined(FLAMIA_WATCHDOG)
  for (std::uint32_t tries = 0; !barrier_passed(barrier, parity); ++tries) {
    if (tries > 4000000) __trap();
  }
#else
  while (!barrier_passed(barrier, parity)) {
  }
#endif
}

/// Named barrier among `threads` threads (a multiple of 32).
__device__ __forceinline__ void named_barrier_sync(std::uint32_t name, std::uint32_t threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

/// Counts the calling warp in without waiting.
__device__ __forceinline__ void named_barrier_arrive(std::uint32_t name, std::uint32_t threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

/// named_barrier_sync, and whether any of the threads voted yes.
__device__ __forceinline__ bool named_barrier_any(std::uint32_t name, std::uint32_t threads, bool vote) {
  std::uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred mine, all;\n"
      "setp.ne.u32 mine, %1, 0;\n"
      "barrier.cta.red.or.pred all, %2, %3, mine;\n"
      "selp.u32 %0, 1, 0, all;\n"
      "}"
      : "=r"(any)
      : "r"(static_cast<std::uint32_t>(vote)), "r"(name), "r"(threads)
      : "memory");
  return any != 0;
}

}  // namespace flamia::ptx
