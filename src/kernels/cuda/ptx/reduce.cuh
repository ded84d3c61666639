// SPDX-License-Identifier: Apache-2.0
// Additions in global memory, 16 bytes an instruction, and the flags that put them in order.
#pragma once
#include <cstdint>

namespace flamia::ptx {

/// Adds eight FP16 numbers.
__device__ __forceinline__ void add_global_f16x8(void* global, std::uint32_t p0, std::uint32_t p1, std::uint32_t p2,
                                                 std::uint32_t p3) {
  asm volatile("red.relaxed.gpu.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(p0), "r"(p1), "r"(p2), "r"(p3)
               : "memory");
}

/// Adds four FP32 numbers.
__device__ __forceinline__ void add_global_f32x4(void* global, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

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
