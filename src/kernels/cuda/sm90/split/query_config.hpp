// SPDX-License-Identifier: Apache-2.0
// Compile-time shape and shared memory of the kernel that makes dQ.
//
// Lane = 4 g + c of warp w. Scores are held as 64 queries x 128 keys a warpgroup: register i of a thread belongs to query
// 16 w + g + 8 (i / 2 % 2) of the warpgroup ("half" is i / 2 % 2) and to key 8 (i / 4) + 2 c + i % 2 of the tile.
#pragma once
#include <cstdint>

#include "../backward/work.hpp"
#include "split.hpp"

namespace flamia::sm90::split {

using namespace backward;

template <int kHeadDim_, ScaleGroup kScaleGroup_>
struct QueryConfig {
  static_assert(kHeadDim_ == 64 || kHeadDim_ == 128);
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr ScaleGroup kScaleGroup = kScaleGroup_;

  // Roles: two consumer warpgroups own 64 queries each (their dQ stays in registers), one thread of the third moves all data.
  static constexpr int kConsumers = 2;
  static constexpr int kRowsPerConsumer = 64;
  static constexpr int kQueryTile = kConsumers * kRowsPerConsumer;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = 240;
  static constexpr int kProducerRegisters = 24;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * (65536 / kThreads / 8 * 8));
  static constexpr int kConsumerWarps = 4 * kConsumers;

  static constexpr int kStages = kHeadDim == 128 ? 3 : 5;  // of keys
  static constexpr int kQueryBuffers = 2;                  // Q and dO' of the next item come while the current one is worked on
  static constexpr int kKeyBytes = kKeyTile * kHeadDim;
  static constexpr int kQueryBytes = kQueryTile * kHeadDim;
  static constexpr int kSums = kHeadDim / 2;  // registers of dQ
  static constexpr int kQueryRecordBytes = kQueryTile / kGroup * kRowGroupBytes;

  // Factors of a tile's keys: one for each token-block. With an exponent for every token one serves a uniform tile, and the scores of other
  // tiles are multiplied beforehand.
  static constexpr int kFactors = kScaleGroup == ScaleGroup::block ? kKeyTile / kBlock : 1;
};

/// A tile of queries of one head; `length` < 0 ends the kernel.
struct alignas(16) QueryWork {
  std::int32_t token_start, length, first_query, head;
  std::int32_t first_tile, tiles;  // of keys
};

template <class Config>
struct QueryBuffer {
  alignas(128) std::uint8_t query[Config::kQueryBytes];
  alignas(128) std::uint8_t gradient[Config::kQueryBytes];
  alignas(128) std::uint8_t records[Config::kQueryRecordBytes];
  QueryWork work;
};

/// K and V of 128 keys, K transposed, and their records.
template <class Config>
struct KeyStage {
  alignas(128) std::uint8_t key[Config::kKeyBytes];
  alignas(128) std::uint8_t value[Config::kKeyBytes];
  alignas(128) std::uint8_t key_transposed[Config::kKeyBytes];
  alignas(128) KeyRecord records[kKeyTile];
};

template <class Config>
struct QueryStorage {
  QueryBuffer<Config> queries[Config::kQueryBuffers];
  KeyStage<Config> stage[Config::kStages];

  std::uint64_t queries_ready[Config::kQueryBuffers];  // copy engine and producer (work) -> consumers
  std::uint64_t queries_free[Config::kQueryBuffers];   // consumers -> producer
  std::uint64_t stage_ready[Config::kStages];
  std::uint64_t stage_free[Config::kStages];
};

/// The tile of queries that stands for a tile of keys in the work list. Counted from the other end of the document, queries see what keys are
/// seen by: the list of keys, sorted by cost, is the list of queries too.
FLAMIA_LAYOUT_FN int mirrored_tile(int first_key, int length) { return (length - 1) / kKeyTile * kKeyTile - first_key; }

}  // namespace flamia::sm90::split
