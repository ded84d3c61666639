// SPDX-License-Identifier: Apache-2.0
// Compile-time shape and shared memory of the kernel that makes dQ alone, with dS in BF16: deterministic mode.
//
// Lane = 4 g + c of warp w. Scores are held as 64 queries x 64 keys a warpgroup: register i of a thread belongs to query
// 16 w + g + 8 (i / 2 % 2) of the warpgroup ("half" is i / 2 % 2) and to key 8 (i / 4) + 2 c + i % 2 of the step. Two registers that are
// neighbours make a word of dS: the accumulator's order is the order of an A operand in BF16.
#pragma once
#include <cstdint>

#include "../backward/work.hpp"
#include "../split/query_config.hpp"  // mirrored_tile
#include "records.hpp"

namespace flamia::sm90::ds16 {

inline constexpr int kKeyStep = 64;  // keys a step

template <int kHeadDim_, ScaleGroup kScaleGroup_>
struct QueryConfig {
  static_assert(kHeadDim_ == 64 || kHeadDim_ == 128);
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr ScaleGroup kScaleGroup = kScaleGroup_;
  using Record = RowRecord<kScaleGroup>;

  // Roles: two consumer warpgroups own 64 queries each (their dQ stays in registers), one thread of the third moves all data.
  static constexpr int kConsumers = 2;
  static constexpr int kRowsPerConsumer = 64;
  static constexpr int kQueryTile = kConsumers * kRowsPerConsumer;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kProducerRegisters = 40;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * (65536 / kThreads / 8 * 8));
  static constexpr int kConsumerWarps = 4 * kConsumers;

  static constexpr int kStages = 4;  // of keys
  static constexpr bool kLarge = kHeadDim * kScoreBytes<kScaleGroup> == 256;
  static constexpr int kQueryBuffers = kLarge ? 1 : 2;    // Q and dO' of the next item come while the current one is worked on
  static constexpr int kStepBytes = kKeyStep * kHeadDim;  // one copy of K or V in E4M3
  static constexpr int kQueryBytes = kQueryTile * kHeadDim;
  static constexpr int kScoreStepBytes = kStepBytes * kScoreBytes<kScaleGroup>;  // K and Q of the scores
  static constexpr int kScoreQueryBytes = kQueryBytes * kScoreBytes<kScaleGroup>;
  static constexpr int kRecordBytes = kQueryTile / kGroup * Record::kBytes;
  static constexpr int kFactorBytes = kKeyStep * static_cast<int>(sizeof(KeyFactors));
  static constexpr int kSums = kHeadDim / 2;  // registers of dQ
};

/// Steps of 64 keys, counted from the document's start; empty if last < first.
using forward::TileRange;

/// Those in which any of the queries first_query ... first_query + count - 1 (clipped to the document) sees a key.
FLAMIA_LAYOUT_FN TileRange steps_of_keys(backward::Window window, int first_query, int count, int length) {
  return forward::tile_range(window, first_query, count, length, kKeyStep);
}

/// Those of which every one of these queries sees every key.
FLAMIA_LAYOUT_FN TileRange free_steps(backward::Window window, int first_query, int count, int length) {
  const int last_query = first_query + count < length ? first_query + count - 1 : length - 1;
  return {(window.first_key(last_query) + kKeyStep - 1) / kKeyStep, (window.last_key(first_query, length) + 1) / kKeyStep - 1};
}

/// A tile of queries of one head; `length` < 0 ends the kernel.
struct alignas(16) QueryWork {
  std::int32_t token_start, length, first_query, head;
};

template <class Config>
struct QueryBuffer {
  alignas(128) std::uint8_t query[Config::kScoreQueryBytes];
  alignas(128) std::uint8_t gradient[Config::kQueryBytes];
  alignas(128) std::uint8_t records[Config::kRecordBytes];
  QueryWork work;
};

template <class Config>
struct KeyStage {
  alignas(1024) std::uint8_t key16[2 * Config::kStepBytes];
  alignas(128) std::uint8_t key[Config::kScoreStepBytes];
  alignas(128) std::uint8_t value[Config::kStepBytes];
  alignas(128) KeyFactors factors[kKeyStep];
};

template <class Config>
struct QueryStorage {
  KeyStage<Config> stage[Config::kStages];
  QueryBuffer<Config> queries[Config::kQueryBuffers];

  std::uint64_t queries_ready[Config::kQueryBuffers];  // copy engine and producer (work) -> consumers
  std::uint64_t queries_free[Config::kQueryBuffers];   // consumers -> producer
  std::uint64_t stage_ready[Config::kStages];
  std::uint64_t stage_free[Config::kStages];
};

}  // namespace flamia::sm90::ds16
