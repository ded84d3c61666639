// SPDX-License-Identifier: Apache-2.0
// Moving registers between the warpgroups of a block.
#pragma once

namespace flamia::ptx {

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
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

}  // namespace flamia::ptx
