// SPDX-License-Identifier: Apache-2.0
// What one thread block of a quantising kernel works on: a token-block of one head, two warps of 16 slots each.
#pragma once
#include <cuda/atomic>

#include "quantize/cuda/tile.cuh"
#include "schedule/cuda/schedule.hpp"

namespace flamia::quantize::gpu {

inline constexpr int kUnitWarps = sm90::kBlock / kGroupTokens;
inline constexpr int kUnitThreads = 32 * kUnitWarps;

struct Unit {
  int head;
  schedule::gpu::TokenBlock block;
  int tokens;         // of this warp's 16 slots
  bool owned;         // the slots are this block's to write (a short block's second half may belong to the next document)
  std::int64_t slot;  // of this warp

  /// Heads are neighbours in memory and in the grid. False: past the end of the table.
  __device__ bool find(const schedule::gpu::TokenBlock* blocks, int heads, int warp) {
    const unsigned index = blockIdx.x / static_cast<unsigned>(heads);
    head = static_cast<int>(blockIdx.x % static_cast<unsigned>(heads));
    const int4 words = __ldg(reinterpret_cast<const int4*>(blocks + index));
    block = {words.x, words.y, words.z, words.w};
    if (block.length < 0) return false;
    tokens = min(max(block.length - block.position - kGroupTokens * warp, 0), kGroupTokens);
    owned = tokens > 0 || block.length == 0;
    slot = block.slot + kGroupTokens * warp;
    return true;
  }
};

/// The greater of both warps' values. All threads of the unit.
__device__ __forceinline__ std::uint32_t unit_maximum(std::uint32_t bits, const Lane& lane, std::uint32_t (&exchange)[kUnitWarps]) {
  bits = __reduce_max_sync(kFullWarp, bits);
  if (threadIdx.x % 32 == 0) exchange[lane.warp] = bits;
  __syncthreads();
  return max(exchange[0], exchange[1]);
}

/// *all = max(*all, bits over the warp). Most warps only look.
__device__ __forceinline__ void raise_maximum(std::uint32_t* all, std::uint32_t bits) {
  bits = __reduce_max_sync(kFullWarp, bits);
  const cuda::atomic_ref<std::uint32_t, cuda::thread_scope_device> word(*all);
  if (threadIdx.x % 32 == 0 && bits > word.load(cuda::std::memory_order_relaxed))
    word.fetch_max(bits, cuda::std::memory_order_relaxed);
}

}  // namespace flamia::quantize::gpu
