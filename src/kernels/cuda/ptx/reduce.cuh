// SPDX-License-Identifier: Apache-2.0
// Additions in global memory, 16 bytes an instruction, and the flags that put them in order.
#pragma once
#include <cstdint>

namespace flamia::ptx {

/// Adds FP16 numbers from shared memory, by the copy engine; the executing thread waits for it by the functions below.
__device__ __forceinline__ void add_bulk_f16(void* global, std::uint32_t shared, std::uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(global),
      "r"(shared), "r"(bytes)
      : "memory");
}
/// Until what the thread has sent so far has been read from shared memory; has arrived in global memory.
__device__ __forceinline__ void wait_bulk_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_bulk_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/// Adds four FP32 numbers.
__device__ __forceinline__ void add_global_f32x4(void* global, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

/// Puts what the copy engine and what the thread do in global memory in order.
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ __forceinline__ int load_acquire(const int* global) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(int* global, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace flamia::ptx
