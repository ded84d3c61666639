// SPDX-License-Identifier: Apache-2.0
// Prefix maximum over the blocks of a document in the one launch that also makes them (decoupled look-back, Merrill and Garland 2016).
//
// Every (head, block) publishes the maximum of its own exponents as soon as it is known, then reads its predecessors' words, 32 at a
// time, until it meets one that already holds a maximum from the document's start, and publishes its own of that kind. Thread blocks
// start in the order of their index, as the device-wide scans of cub rely on too; a block waits for lower indices only.
#pragma once
#include <cuda/atomic>

#include <cstdint>

namespace flamia::quantize::gpu {

inline constexpr std::uint32_t kOwnMaximum = 0x100;     // low byte: of this block alone
inline constexpr std::uint32_t kPrefixMaximum = 0x200;  // low byte: of the document up to and including this block

/// Called by one whole warp. `words` [block], zero before the launch, of one head. Returns the maximum over the blocks
/// first ... block - 1, 0 if there are none.
__device__ inline std::uint32_t look_back(std::uint32_t* words, int first, int block, std::uint32_t own) {
  using Word = cuda::atomic_ref<std::uint32_t, cuda::thread_scope_device>;
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (block == first) {
    if (lane == 0) Word(words[block]).store(kPrefixMaximum | own, cuda::std::memory_order_relaxed);
    return 0;
  }
  if (lane == 0) Word(words[block]).store(kOwnMaximum | own, cuda::std::memory_order_relaxed);
  std::uint32_t greatest = 0;
  for (int nearest = block - 1;; nearest -= 32) {
    const int index = nearest - lane;
    std::uint32_t word;
    do {
      word = index < first ? kPrefixMaximum : Word(words[index]).load(cuda::std::memory_order_relaxed);
    } while (__any_sync(0xffffffffu, word < kOwnMaximum));
    const std::uint32_t closed = __ballot_sync(0xffffffffu, word >= kPrefixMaximum);
    const bool counts = closed == 0 || lane < __ffs(static_cast<int>(closed));
    greatest = max(greatest, __reduce_max_sync(0xffffffffu, counts ? word & 0xff : 0u));
    if (closed != 0) break;
  }
  if (lane == 0) Word(words[block]).store(kPrefixMaximum | max(greatest, own), cuda::std::memory_order_relaxed);
  return greatest;
}

/// Inclusive maximum over the lanes up to this one.
__device__ __forceinline__ std::uint32_t warp_prefix_maximum(std::uint32_t value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const std::uint32_t other = __shfl_up_sync(0xffffffffu, value, distance);
    if (static_cast<int>(threadIdx.x % 32) >= distance) value = max(value, other);
  }
  return value;
}

}  // namespace flamia::quantize::gpu
