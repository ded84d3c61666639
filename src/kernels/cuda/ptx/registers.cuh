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

}  // namespace flamia::ptx
