// SPDX-License-Identifier: Apache-2.0
// Compile-time shape and shared memory of the kernel that makes dK and dV.
#pragma once
#include <cstdint>

#include "../backward/fragments.hpp"
#include "../backward/work.hpp"
#include "split.hpp"

namespace flamia::sm90::split {

using namespace backward;

template <int kHeadDim_, ScaleGroup kScaleGroup_, bool kRecordCodes_>
struct KeyConfig {
  static_assert(kHeadDim_ == 64 || kHeadDim_ == 128);
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr ScaleGroup kScaleGroup = kScaleGroup_;
  static constexpr bool kRecordCodes = kRecordCodes_;

  // Roles: two consumer warpgroups own 64 keys each (their dK and dV stay in registers), one thread of the third moves all data.
  static constexpr int kConsumers = 2;
  static constexpr int kKeysPerConsumer = 64;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = 240;
  static constexpr int kProducerRegisters = 24;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * (65536 / kThreads / 8 * 8));
  static constexpr int kConsumerWarps = 4 * kConsumers;

  static constexpr int kHalves = kHeadDim / 64;  // products with d columns are made 64 columns at a time
  static constexpr int kStages = 4;              // of queries
  static constexpr int kKeyBuffers = 2;          // K and V of the next item come while the current one is worked on
  static constexpr int kKeyBytes = kKeyTile * kHeadDim;
  static constexpr int kStepBytes = kQueryStep * kHeadDim;  // one copy of Q or dO'
};

/// A tile of keys of a document and the query heads that read it; `steps` < 0 ends the kernel.
struct alignas(16) KeyWork {
  std::int32_t slot_start, token_start, length, first_key;
  std::int32_t key_head;
  std::int32_t steps;
};

/// What a step streams: Q and dO' of 64 queries, both ways, and their records; what the producer says about it.
template <class Config>
struct QueryStage {
  alignas(128) std::uint8_t query[Config::kStepBytes];
  alignas(128) std::uint8_t gradient[Config::kStepBytes];
  alignas(128) std::uint8_t query_transposed[Config::kStepBytes];
  alignas(128) std::uint8_t gradient_transposed[Config::kStepBytes];
  alignas(128) std::uint8_t records[kStepRecordBytes];
  alignas(128) std::int32_t query_position;  // of the first query
  std::int32_t flags;                        // StepFlags
  std::int32_t head;                         // query head
};

/// K, V and their records of an item; the item itself. `work.steps` < 0 ends the kernel.
template <class Config>
struct KeyBuffer {
  alignas(128) std::uint8_t key[Config::kKeyBytes];
  alignas(128) std::uint8_t value[Config::kKeyBytes];
  alignas(128) KeyRecord records[kKeyTile];
  KeyWork work;
};

template <class Config>
struct KeyStorage {
  KeyBuffer<Config> keys[Config::kKeyBuffers];
  QueryStage<Config> stage[Config::kStages];

  std::uint64_t keys_ready[Config::kKeyBuffers];  // copy engine and producer (work) -> consumers
  std::uint64_t keys_free[Config::kKeyBuffers];   // consumers -> producer
  std::uint64_t stage_ready[Config::kStages];
  std::uint64_t stage_free[Config::kStages];
};

}  // namespace flamia::sm90::split
