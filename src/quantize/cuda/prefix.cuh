// SPDX-License-Identifier: Apache-2.0
// Prefix maxima of exponents over a document: the greatest byte up to each token.
//
// The kernel that quantises never waits for them. It leaves every group of 16 tokens' own bytes and their maximum; a second, small
// kernel scans those bytes (one a token: 1/384 of the operand's traffic) and writes the prefix maxima.
//
// Sticky exponents are prefix maxima, so codes depend on them. The first kernel encodes with a guess of the maximum over the earlier
// tokens: the greatest of those that are already known (one word a document and head, raised as maxima become known; nothing is known before
// the document's first token-block). The second
// kernel encodes again the groups whose guess was wrong. A maximum of many tokens seldom grows, so these are few: the tokens of a
// document's beginning that were in flight together. What the guesses were cannot be seen in the results.
#pragma once
#include <cuda/atomic>

#include "kernels/cuda/ptx/grid.cuh"
#include "quantize/cuda/quantise.hpp"
#include "quantize/cuda/unit.cuh"

namespace flamia::quantize::gpu {

/// Where 16 slots come from. Zero where no group was quantised.
struct alignas(16) GroupInfo {
  std::int32_t token;     // row of the first one
  std::int32_t position;  // of the first one in its document
  std::int32_t tokens;    // how many of the slots hold a token
  std::int32_t owned;
};

/// QuantiseParams::scratch.
struct PrefixScratch {
  std::int64_t groups;
  GroupInfo* infos;  // [groups], cleared before the first kernel, as is
  std::uint32_t*
      known;  // [heads][groups]: kKnown | greatest byte known so far, the first token-block's among them, in the word of a document's first group
  std::uint16_t* summaries;  // [heads][groups]: greatest byte of the group | guess << 8

  __host__ __device__ PrefixScratch(std::uint32_t* scratch, std::int64_t slots, int heads)
      : groups(slots / kGroupTokens),
        infos(reinterpret_cast<GroupInfo*>(scratch)),
        known(reinterpret_cast<std::uint32_t*>(infos + groups)),
        summaries(reinterpret_cast<std::uint16_t*>(known + heads * groups)) {}

  /// The 16 slots from `in_block` on of a token-block. One head's is enough, one thread's.
  __device__ void describe(const schedule::gpu::TokenBlock& block, int in_block, int tokens) const {
    infos[(block.slot + in_block) / kGroupTokens] = {block.token + in_block, block.position + in_block, tokens, 1};
  }

  static std::size_t cleared_bytes(std::int64_t slots, int heads) {
    return static_cast<std::size_t>(slots / kGroupTokens) *
           (sizeof(GroupInfo) + static_cast<std::size_t>(heads) * sizeof(std::uint32_t));
  }
  static std::size_t bytes(std::int64_t slots, int heads) {
    return cleared_bytes(slots, heads) +
           static_cast<std::size_t>(slots / kGroupTokens) * static_cast<std::size_t>(heads) * sizeof(std::uint16_t);
  }
};

inline constexpr std::uint32_t kKnown = 0x100;
/// What the first kernel knows about the tokens before a token-block.
struct Guess {
  static constexpr std::uint32_t kBegins = 0x200;  // there are none

  unsigned word = 0;       // of PrefixScratch::known
  std::uint32_t seen = 0;  // what it held when the kernel began, or kBegins

  Guess() = default;
  __device__ Guess(const PrefixScratch& scratch, int head, const schedule::gpu::TokenBlock& block)
      : word(static_cast<unsigned>(head * scratch.groups) + (block.slot - block.position) / kGroupTokens),
        seen(block.position == 0 ? kBegins : Word(scratch.known[word]).load(cuda::std::memory_order_relaxed)) {}

  /// Maximum over the document's tokens before the token-block as far as it is known, and at the same time `own`, a warp's maximum,
  /// becomes known if the document's first token-block is. Where it is not: what these tokens would have made of it, were their first one
  /// (lane 0's `byte`) the document's. The whole warp.
  __device__ std::uint32_t before(std::uint32_t own, std::uint32_t byte, int headroom, const PrefixScratch& scratch) const {
    std::uint32_t found = seen;
    if (threadIdx.x % 32 == 0) {
      const Word known(scratch.known[word]);
      if (found == 0) found = known.load(cuda::std::memory_order_relaxed);
      if (found != 0 && (found == kBegins || (kKnown | own) > found))
        known.fetch_max(kKnown | own, cuda::std::memory_order_relaxed);
      if (found == 0) found = kKnown | max(own, numerics::with_headroom(byte, headroom));
    }
    return __shfl_sync(kFullWarp, found, 0) & 0xff;
  }

 private:
  using Word = cuda::atomic_ref<std::uint32_t, cuda::thread_scope_device>;
};

/// Greatest byte up to each of the lane's tokens, given the maximum over everything before the group and the group's own.
__device__ __forceinline__ void prefix_in_group(const Lane& lane, const Scale (&scale)[kLaneTokens], std::uint32_t before,
                                                std::uint32_t own, std::uint32_t (&prefix)[kLaneTokens]) {
  prefix[0] = prefix[1] = before;
  if (own <= before) return;
  const std::uint32_t first = scale[0].prefix_byte();
  std::uint32_t up_to = max(first, scale[1].prefix_byte());
#pragma unroll
  for (int distance = kTokenLanes; distance < 32; distance *= 2) {
    const std::uint32_t other = __shfl_up_sync(kFullWarp, up_to, distance);
    if (static_cast<int>(threadIdx.x % 32) >= distance) up_to = max(up_to, other);
  }
  std::uint32_t earlier = __shfl_up_sync(kFullWarp, up_to, kTokenLanes);
  if (lane.k == 0) earlier = 0;
  prefix[0] = max(max(before, earlier), first);
  prefix[1] = max(before, up_to);
}

inline constexpr int kPrefixWarps = 8;
inline constexpr int kTileGroups = 32;  // groups of a warp, a lane a group

/// 16 bytes in the order of their tokens: own ones (kFlagged = 255 left out), then greatest so far.
struct PrefixBytes {
  std::uint32_t flagged[4];  // masks
  std::uint32_t word[4];

  __device__ explicit PrefixBytes(uint4 own) : word{own.x, own.y, own.z, own.w} {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      flagged[i] = __vcmpeq4(word[i], 0xffffffffu);
      word[i] &= ~flagged[i];
    }
  }
  __device__ std::uint32_t first() const { return word[0] & 0xff; }
  /// From own bytes to the greatest so far; `before` comes before all of them.
  __device__ void scan(std::uint32_t before) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      word[i] = __vmaxu4(word[i], word[i] << 8);
      word[i] = __vmaxu4(word[i], word[i] << 16);
      word[i] = __vmaxu4(word[i], before * 0x01010101u);
      before = word[i] >> 24;
    }
  }
  __device__ std::uint32_t greatest() const { return word[3] >> 24; }  // after scan
  __device__ uint4 prefix() const { return {word[0], word[1], word[2], word[3]}; }
  __device__ uint4 exponents() const {
    return {word[0] | flagged[0], word[1] | flagged[1], word[2] | flagged[2], word[3] | flagged[3]};
  }
};

/// Maximum over the groups first ... end - 1 of a head; `end` is a multiple of 4. The whole warp.
__device__ __forceinline__ std::uint32_t greatest_of_groups(const std::uint16_t* summaries, std::int64_t first, std::int64_t end) {
  const std::int64_t lane = threadIdx.x % 32, aligned = first / 4;
  std::uint32_t greatest = 0;
#pragma unroll 4
  for (std::int64_t i = aligned + lane; i < end / 4; i += 32) {
    uint2 words = __ldcg(reinterpret_cast<const uint2*>(summaries) + i);
    if (i == aligned) {  // groups before the first
      const int skipped = static_cast<int>(first % 4);
      words.x &= skipped == 0 ? 0xffffffffu : skipped == 1 ? 0xffff0000u : 0u;
      words.y &= skipped < 3 ? 0xffffffffu : 0xffff0000u;
    }
    const std::uint32_t both = __vmaxu2(words.x & 0x00ff00ffu, words.y & 0x00ff00ffu);
    greatest = max(greatest, max(both & 0xff, both >> 16));
  }
  return __reduce_max_sync(kFullWarp, greatest);
}

/// Maximum over the document's tokens before each lane's group of the tile. `greatest` = the lane's own, `first_group` = lane 0's.
__device__ __forceinline__ std::uint32_t scan_tile(const PrefixScratch& scratch, int head, std::int64_t first_group,
                                                   const GroupInfo& info, std::uint32_t greatest) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const unsigned starts = __ballot_sync(kFullWarp, !info.owned || info.position == 0);
  const unsigned up_to_here = starts & (0xffffffffu >> (31 - lane));
  const int start = up_to_here != 0 ? 31 - __clz(static_cast<int>(up_to_here)) : -1;  // lane where the document begins
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const std::uint32_t other = __shfl_up_sync(kFullWarp, greatest, distance);
    if (lane - distance >= max(start, 0)) greatest = max(greatest, other);
  }
  std::uint32_t before = __shfl_up_sync(kFullWarp, greatest, 1);
  if (lane == max(start, 0)) before = 0;
  const int position = __shfl_sync(kFullWarp, info.position, 0);
  if ((starts & 1) == 0) {  // the first document began in an earlier tile
    const std::uint32_t carried =
        greatest_of_groups(scratch.summaries + head * scratch.groups, first_group - position / kGroupTokens, first_group);
    if (start < 0) before = max(before, carried);
  }
  return before;
}

}  // namespace flamia::quantize::gpu
