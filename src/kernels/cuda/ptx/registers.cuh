// SPDX-License-Identifier: Apache-2.0
// Moving registers between the warpgroups of a block.
#pragma once
#include <cstdint>

namespace flamia::ptx {

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// True in one lane of a warp that is complete; the compiler knows that it is one.
__device__ __forceinline__ bool elect_lane() {
  std::uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

/// threadIdx.x, read anew at every call: nothing that is computed from it is kept in a register for a branch that is rarely taken.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

/// The same value, in a register that is kept: the compiler cannot compute it anew at every use.
__device__ __forceinline__ unsigned kept(unsigned value) {
  unsigned copy;
  asm volatile("mov.b32 %0, %1;" : "=r"(copy) : "r"(value));
  return copy;
}

/// Does nothing. A branch around it is a point that no independent instruction crosses; a wait is none.
__device__ __forceinline__ void mark() { asm volatile("nanosleep.u32 0;"); }

/// Makes the bits of a number that is not negative be there at this point of the program, at the price of a comparison.
__device__ __forceinline__ void need(std::uint32_t bits) {
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %0, 0xffffffff;\n@p nanosleep.u32 1;\n}" ::"r"(bits) : "memory");
}

}  // namespace flamia::ptx
