// SPDX-License-Identifier: Apache-2.0
// Moving 8 x 8 matrices of 16-bit elements between registers and shared memory. Lane l gives the address of row l % 8 (16 bytes) of
// matrix l / 8; a register holds, for lane l, the elements (row l / 4, columns 2 (l % 4) and 2 (l % 4) + 1).
#pragma once
#include <cstdint>

namespace flamia::ptx {

/// Writes four matrices, each transposed: the elements of a register lie in column l / 4 of the stored rows.
__device__ __forceinline__ void store_matrices_transposed(std::uint32_t shared, std::uint32_t m0, std::uint32_t m1,
                                                          std::uint32_t m2, std::uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(m0), "r"(m1), "r"(m2),
               "r"(m3)
               : "memory");
}

/// Writes four matrices as they lie.
__device__ __forceinline__ void store_matrices(std::uint32_t shared, std::uint32_t m0, std::uint32_t m1, std::uint32_t m2,
                                               std::uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

/// Reads four matrices as they lie.
__device__ __forceinline__ void load_matrices(std::uint32_t (&m)[4], std::uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared)
               : "memory");
}

/// Address of shared memory as the instructions above and the loads below want it.
__device__ __forceinline__ std::uint32_t shared_address(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

/// Loads that stay where they are written (the compiler would gather or repeat plain ones across products in flight).
__device__ __forceinline__ float4 load_shared_float4(std::uint32_t shared) {
  float4 f;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(f.x), "=f"(f.y), "=f"(f.z), "=f"(f.w) : "r"(shared) : "memory");
  return f;
}
__device__ __forceinline__ int4 load_shared_int4(std::uint32_t shared) {
  int4 i;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(i.x), "=r"(i.y), "=r"(i.z), "=r"(i.w) : "r"(shared) : "memory");
  return i;
}
__device__ __forceinline__ float2 load_shared_float2(std::uint32_t shared) {
  float2 f;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(f.x), "=f"(f.y) : "r"(shared) : "memory");
  return f;
}
__device__ __forceinline__ float load_shared_float(std::uint32_t shared) {
  float f;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(f) : "r"(shared) : "memory");
  return f;
}
__device__ __forceinline__ int load_shared_int(std::uint32_t shared) {
  int i;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(i) : "r"(shared) : "memory");
  return i;
}

__device__ __forceinline__ void store_shared_float2(std::uint32_t shared, float2 f) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(f.x), "f"(f.y) : "memory");
}
__device__ __forceinline__ void store_shared(std::uint32_t shared, std::uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
}

__device__ __forceinline__ void store_shared_x4(std::uint32_t shared, std::uint32_t w0, std::uint32_t w1, std::uint32_t w2,
                                                std::uint32_t w3) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(w0), "r"(w1), "r"(w2), "r"(w3) : "memory");
}

}  // namespace flamia::ptx
