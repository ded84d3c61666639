// SPDX-License-Identifier: Apache-2.0
// Additions in global memory, 16 bytes an instruction.
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
/// Until what the thread has sent so far has been read from shared memory.
__device__ __forceinline__ void wait_bulk_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

/// Adds eight FP16 numbers, two a word.
__device__ __forceinline__ void add_global_f16x8(void* global, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  asm volatile("red.relaxed.gpu.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

/// Adds four FP32 numbers.
__device__ __forceinline__ void add_global_f32x4(void* global, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

}  // namespace flamia::ptx
