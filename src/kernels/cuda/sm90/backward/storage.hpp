// SPDX-License-Identifier: Apache-2.0
// Shared memory of one block. Every barrier is named for what it announces.
#pragma once
#include <cstdint>

#include "config.hpp"

namespace flamia::sm90::backward {

/// One unit of work as the roles see it: a key tile of a document and the query heads that read it. `steps` < 0 ends the kernel.
struct alignas(16) Work {
  std::int32_t slot_start, token_start, length, first_key;
  std::int32_t key_head;
  std::int32_t first_step;  // of 64 queries
  std::int32_t blocks;      // steps per query head
  std::int32_t steps;       // blocks * query heads of the group
};

/// What is planned for a step, beside its operands.
struct alignas(16) StepInfo {
  std::int32_t query;      // position of its first query
  std::int32_t head;       // query head
  std::int32_t row;        // slot of its first query, counted through all query heads
  std::uint16_t flags;     // StepFlags
  std::uint16_t last_key;  // index in the tile of the item's last key
};

/// What a step streams: Q and dO' of 64 queries, both ways, and their records.
template <class Config>
struct Stage {
  std::uint8_t operands[4 * Config::kStepBytes];
  std::uint8_t records[kStepRecordBytes];

  __device__ __forceinline__ std::uint8_t* query() { return operands; }
  __device__ __forceinline__ std::uint8_t* gradient() { return operands + Config::kStepBytes; }
  __device__ __forceinline__ std::uint8_t* query_transposed() { return operands + 2 * Config::kStepBytes; }
  __device__ __forceinline__ std::uint8_t* gradient_transposed() { return operands + 3 * Config::kStepBytes; }
};

/// How far the plans have come; the planning warp's own.
struct CopyCursor {
  Work work;              // the item whose steps are being planned
  Work next;              // the one after it, when `progress` says so
  std::int32_t left;      // steps of `work` not yet planned; negative at the end
  std::int32_t head;      // query head of the next one
  std::int32_t block;     // and its place among the head's steps
  std::int32_t item;      // items begun
  std::int32_t planned;   // steps planned
  std::int32_t progress;  // of fetching `next`: 0 nothing, 1 ticket, 2 item, 3 ready
  std::int32_t ticket;
  WorkItem fetched;
  std::int32_t key_head;
};

/// Steps counted since the block's first: where a step's stage and exchange slot lie in their rings, and the parity of that round.
template <class Config>
struct StepCounter {
  std::uint32_t count = 0;

  __device__ __forceinline__ std::uint32_t stage() const { return count % Config::kStages; }
  __device__ __forceinline__ std::uint32_t stage_parity() const { return count / Config::kStages & 1; }
  __device__ __forceinline__ std::uint32_t exchange() const { return count % Config::kExchangeSlots; }
  __device__ __forceinline__ std::uint32_t exchange_parity() const { return count / Config::kExchangeSlots & 1; }
  __device__ __forceinline__ StepCounter next() const { return {count + 1}; }
};

template <class Config>
struct Storage {
  alignas(128) std::uint8_t key[Config::kKeyBytes];
  alignas(128) std::uint8_t value[Config::kKeyBytes];
  alignas(128) std::uint8_t key_transposed[Config::kKeyBytes];
  alignas(128) Stage<Config> stage[Config::kStages];
  alignas(128) std::uint8_t exchange[Config::kExchangeSlots][Config::kExchangeBytes];
  alignas(128) std::uint8_t staging[4 * Config::kStagingBytes];  // of the dQ warpgroup's warps
  alignas(128) KeyRecord key_records[kKeyTile];
  Work work[Config::kWorkSlots];
  std::int32_t references[128 * Config::kConsumers];         // each consumer thread's R of its two keys (int16 each), step by step
  std::uint32_t visible[128 * Config::kConsumers];           // each consumer thread's visible pairs of a masked step
  alignas(16) float shifts[Config::kConsumers][kQueryStep];  // factors of a step's rows where they differ, per consumer warpgroup
  StepInfo plan[Config::kPlanSlots];
  CopyCursor cursor;

  std::uint64_t keys_ready;                    // copy engine -> all: K, V and their records of an item
  std::uint64_t transposed_keys_ready;         // copy engine -> dQ: Kt of an item
  std::uint64_t stage_ready[Config::kStages];  // copy engine -> all: the operands of a step (and its plan, and an item's work slot)
  std::uint64_t exchange_ready[Config::kExchangeSlots];  // consumers -> dQ: dS is written; also: the stage before is free
  std::uint64_t exchange_free[Config::kExchangeSlots];   // dQ -> consumers: dS, and the payload in its place, are read

  __device__ __forceinline__ const StepInfo& info(StepCounter<Config> now) const { return plan[now.count % Config::kPlanSlots]; }
};

template <class Config>
constexpr Dimensions dimensions() {
  return {Config::kHeadDim,
          kKeyTile,
          kQueryStep,
          Config::kStages,
          Config::kExchangeSlots,
          Config::kThreads,
          Config::kConsumerRegisters,
          Config::kQueryRegisters,
          static_cast<int>(sizeof(Storage<Config>))};
}

}  // namespace flamia::sm90::backward
