// SPDX-License-Identifier: Apache-2.0
// Prefix maximum over the blocks of a document in the one launch that also makes them (decoupled look-back, Merrill and Garland 2016).
//
// Every (head, block) publishes the maximum of its own exponents as soon as it is known, then reads its predecessors' words, 32 at a
// time, until it meets one that already holds a maximum from the document's start, and publishes its own of that kind. Thread blocks
// start in the order of their index, as the device-wide scans of cub rely on too; a block waits for lower indices only. The table of
// blocks is ordered by position (schedule.hpp), so with many documents the predecessor is long done: its word is read at the start
// already, beside the input.
#pragma once
#include <cuda/atomic>

#include <cstdint>

namespace flamia::quantize::gpu {

inline constexpr std::uint32_t kOwnMaximum = 0x100;     // low byte: of this block alone
inline constexpr std::uint32_t kPrefixMaximum = 0x200;  // low byte: of the document up to and including this block

/// Words of one head, one for every 16 slots, zero before the launch; a block uses that of its first slot.
struct LookBack {
  std::uint32_t* own;  // this block's word
  int earlier;         // blocks of the document before this one
  std::uint32_t first_look;

  using Word = cuda::atomic_ref<std::uint32_t, cuda::thread_scope_device>;
  static constexpr int kStride = 2;  // words from one block of a document to the next

  __device__ LookBack(std::uint32_t* head_words, std::int64_t slot, int earlier_blocks)
      : own(head_words + slot / 16), earlier(earlier_blocks), first_look(kPrefixMaximum) {
    if (earlier > 0) first_look = Word(own[-kStride]).load(cuda::std::memory_order_relaxed);
  }

  /// Called by one whole warp with the block's own maximum. Returns the maximum over the document's earlier blocks.
  __device__ std::uint32_t resolve(std::uint32_t maximum) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const std::uint32_t look = __shfl_sync(0xffffffffu, first_look, 0);
    std::uint32_t greatest = look & 0xff;
    if (look < kPrefixMaximum) {
      if (lane == 0) Word(*own).store(kOwnMaximum | maximum, cuda::std::memory_order_relaxed);
      greatest = search(lane);
    }
    if (lane == 0) Word(*own).store(kPrefixMaximum | max(greatest, maximum), cuda::std::memory_order_relaxed);
    return greatest;
  }

 private:
  __device__ std::uint32_t search(int lane) const {
    std::uint32_t greatest = 0;
    for (int distance = 1 + lane;; distance += 32) {
      std::uint32_t word;
      do {
        word = distance > earlier ? kPrefixMaximum : Word(own[-kStride * distance]).load(cuda::std::memory_order_relaxed);
      } while (__any_sync(0xffffffffu, word < kOwnMaximum));
      const std::uint32_t closed = __ballot_sync(0xffffffffu, word >= kPrefixMaximum);
      const bool counts = closed == 0 || lane < __ffs(static_cast<int>(closed));
      greatest = max(greatest, __reduce_max_sync(0xffffffffu, counts ? word & 0xff : 0u));
      if (closed != 0) return greatest;
    }
  }
};

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
