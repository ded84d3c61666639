// SPDX-License-Identifier: Apache-2.0
// Copies of 16 bytes a thread from global to shared memory that pass no register.
#pragma once
#include <cstdint>

namespace flamia::ptx {

/// Address in shared memory as the instructions below take it.
__device__ __forceinline__ std::uint32_t shared_address(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

/// 16 bytes, past the L1 cache; zeros instead, without a look at `global`, unless `wanted`.
__device__ __forceinline__ void copy_async16(std::uint32_t shared, const void* global, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(wanted ? 16 : 0) : "memory");
}

/// The thread's copies since the last call become a group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Until at most kGroups of the thread's groups are under way.
template <int kGroups>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace flamia::ptx
