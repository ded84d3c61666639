// SPDX-License-Identifier: Apache-2.0
// Compile-time shape of the kernel and its shared memory. Every barrier is named for what it announces.
#pragma once
#include <cstdint>

#include "sage3.hpp"

namespace flamia::sm90::sage3 {

template <int kHeadDim_>
struct Config {
  static_assert(kHeadDim_ == 64 || kHeadDim_ == 128);
  static constexpr int kHeadDim = kHeadDim_;

  // Roles. Warpgroup 0 copies operands and makes the rank-one correction of the scores, a key a thread; each of the others owns 64 queries.
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kLoaderRegisters = 96;
  static constexpr int kConsumerRegisters = 200;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;  // of a thread at first: what is redistributed
  static_assert(kConsumers * kConsumerRegisters + kLoaderRegisters <= (kConsumers + 1) * kLaunchRegisters);

  static constexpr int kStages = kHeadDim == 128 ? 3 : 4;
  static constexpr int kQueryBytes = kTile * kHeadDim * 2;
  static constexpr int kKeyBytes = kTile * kHeadDim * 2;
  static constexpr int kValueBytes = kTile * kHeadDim * 2;

  // Accumulators of a thread.
  static constexpr int kScores = kTile / 2;
  static constexpr int kOutputs = kHeadDim / 2;
};

template <class Config>
struct Storage {
  alignas(128) std::uint8_t query[Config::kQueryBytes];
  alignas(128) std::uint8_t key[Config::kStages][Config::kKeyBytes];
  alignas(128) std::uint8_t value[Config::kStages][Config::kValueBytes];
  alignas(16) float correction[Config::kStages][kTile];  // q' . (k_j - k'); NaN where K or V is flagged

  std::uint64_t query_ready, query_free;
  std::uint64_t tile_ready[Config::kStages];  // copy engine and the threads that make the correction -> consumers
  std::uint64_t tile_free[Config::kStages];   // consumers -> loader
};

/// Position in the ring of stages and the parity of its current round.
template <int kSlots>
struct Ring {
  std::uint32_t slot = 0;
  std::uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

/// One tile of queries of one head. Heads follow each other, so that the keys and values which the blocks work on at a time stay in the L2 cache; in a
/// head the dearest tile comes first. Blocks take every gridDim.x-th, in turn from both ends.
struct Work {
  Document document;
  int first;  // position of the tile's first query
  int document_index, head, key_head;
  int tiles;  // key tiles, visited from the highest down

  __device__ __forceinline__ std::int64_t slot() const { return std::int64_t{document.slot_start} + first; }
};

__device__ __forceinline__ bool take_work(const Params& p, int index, Work& work) {
  const int items = *p.item_count, blocks = static_cast<int>(gridDim.x), round = index / blocks, in_round = index % blocks;
  const int place = round * blocks + (round % 2 == 0 ? in_round : blocks - 1 - in_round);
  if (place >= items * p.query_heads) return false;
  const WorkItem item = p.items[place % items];
  work.document = p.documents[item.document];
  work.first = item.first;
  work.document_index = item.document;
  work.head = place / items;
  work.key_head = work.head / (p.query_heads / p.key_heads);
  work.tiles = p.causal ? item.first / kTile + 1 : (work.document.length + kTile - 1) / kTile;
  return true;
}

}  // namespace flamia::sm90::sage3
