// SPDX-License-Identifier: Apache-2.0
// Shared memory of one block. Every barrier is named for what it announces.
#pragma once
#include <vector_types.h>

#include <cstddef>
#include <cstdint>

#include "config.hpp"

namespace flamia::sm90::forward {

/// One unit of work as the roles see it; `length` < 0 ends the kernel.
struct Work {
  std::int32_t slot_start, token_start, length, first, head, key_head;
  std::int32_t unused[2];
};

/// The same to the compiler's knowledge: one value for the warp, in uniform registers.
__device__ __forceinline__ Work uniform(const Work& work) {
  const auto first = [](int value) { return __shfl_sync(0xFFFFFFFFu, value, 0); };
  return {first(work.slot_start),
          first(work.token_start),
          first(work.length),
          first(work.first),
          first(work.head),
          first(work.key_head),
          {}};
}

/// What a tile's exponents ask for.
struct Flags {
  static constexpr int kMixedKeys = 1;    // tokens: several key exponents, or a flagged token; token-blocks: a flagged block
  static constexpr int kMixedValues = 2;  // several value exponents
  static constexpr int kClose = 4;        // token-blocks, instead: several that lie close together (block_exponents.cuh)
};

/// The exponents of a key tile, made ready by the copy warp. A tile is *plain* when it is neither mixed in keys nor in values; then the first
/// four words say everything, and no more are written for tokens.
inline constexpr int kNotPlain = -(1 << 20);
template <int kEntries>
struct alignas(16) TileExponents {
  std::int32_t plain_exponent;   // value_exponent in a plain tile, kNotPlain otherwise
  std::int32_t flags;            // Flags
  float key_factor;              // tokens: 2^exponent of every key; 1 where keys are mixed
  std::int32_t value_exponent;   // the greatest of the tile
  float key_factors[kEntries];   // 2^exponent; NaN for a flagged key or value
  std::int32_t value[kEntries];  // bits of value exponent - value_exponent as a float (token-blocks), of 2^exponent (tokens)
  static constexpr int kReached = kEntries > kKeyTile / kBlock ? kEntries : 1;  // token-blocks need none
  std::int32_t reach[kReached];  // tokens: prefix maximum of value exponents, what a row may know that sees the tile up to here
};

/// A key tile. All of it lies at constant distances from one address, which is what a consumer carries from tile to tile.
template <class Config>
struct alignas(128) Stage {
  std::uint8_t key[Config::kKeyBytes];
  std::uint8_t value[Config::kValueBytes];
  TileExponents<Config::kScaleEntries> exponents;
  std::uint64_t ready;                         // copy engine (keys and values) and copy warp (exponents) -> consumers
  std::uint64_t free;                          // consumers -> copy warp
  std::int32_t ones_folds[kKeyTile / kBlock];  // what stands in the columns of ones (block_exponents.cuh)
  float shift[kKeyTile / kBlock];  // NVFP4: of V's token-blocks, if they lie close together: exponent below the greatest
};

template <class Config>
struct Storage {
  Stage<Config> stages[Config::kStages];
  alignas(128) std::uint8_t query[Config::kQueryBuffers][Config::kQueryBytes];
  alignas(128) std::uint8_t ones[2 * Config::kOnesBytes];  // token-blocks: columns of ones that stay ones
  float query_scale[Config::kQueryBuffers]
                   [Config::kQueryTile];  // softmax scale * log2 e * 2^(query exponent); NaN for a flagged query
  alignas(16) Work work[Config::kWorkSlots];

  // A consumer thread's own, parked while products need the registers; for its two rows.
  float2 row_scale[128 * Config::kConsumers];    // query_scale of its rows
  float2 mixed_sums[128 * Config::kConsumers];   // row sums of a mixed tile
  float2 value_scale[128 * Config::kConsumers];  // of the partial O wherever it is not one: 2^(value exponent - unit)

  alignas(128) std::uint8_t rows_out[kWarpsPerConsumer * Config::kConsumers][Config::kRowsOutBytes];

  std::uint64_t work_ready[Config::kWorkSlots];       // scheduler -> copy warp and consumers
  std::uint64_t work_taken[Config::kWorkSlots];       // ... -> scheduler
  std::uint64_t query_ready[Config::kQueryBarriers];  // copy engine and copy or query warp (scales) -> consumers
  std::uint64_t query_free[Config::kQueryBarriers];   // consumers -> copy or query warp
};

/// Where a thread's parked values lie, in bytes from its row_scale.
template <class Config>
struct Parked {
  static constexpr std::uint32_t kMixedSums = offsetof(Storage<Config>, mixed_sums) - offsetof(Storage<Config>, row_scale);
  static constexpr std::uint32_t kValueScale = offsetof(Storage<Config>, value_scale) - offsetof(Storage<Config>, row_scale);
};

/// Position in a ring of `kSlots` buffers and the parity of its current round.
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

/// The stage at a shared address; `base` is that of the storage.
template <class Config>
FLAMIA_LAYOUT_FN Stage<Config>& stage_at(Storage<Config>& storage, std::uint32_t base, std::uint32_t at) {
  return *reinterpret_cast<Stage<Config>*>(reinterpret_cast<std::uint8_t*>(&storage) + (at - base));
}

/// A consumer's place in the ring of key tiles: the shared address of a stage instead of its number.
template <class Config>
struct StageRing {
  std::uint32_t at;
  std::uint32_t parity;

  static constexpr std::uint32_t kBytes = sizeof(Stage<Config>), kReady = offsetof(Stage<Config>, ready),
                                 kFree = offsetof(Stage<Config>, free), kExponents = offsetof(Stage<Config>, exponents);

  __device__ __forceinline__ void advance(std::uint32_t begin) {
    at += kBytes;
    if (at == begin + Config::kStages * kBytes) {
      at = begin;
      parity ^= 1;
    }
  }
  /// Undoes advance().
  __device__ __forceinline__ void retreat(std::uint32_t begin) {
    if (at == begin) {
      at = begin + Config::kStages * kBytes;
      parity ^= 1;
    }
    at -= kBytes;
  }
};

template <class Config>
constexpr Dimensions dimensions() {
  return {Config::kHeadDim,
          Config::kQueryTile,
          kKeyTile,
          Config::kStages,
          Config::kQueryBuffers,
          Config::kConsumers,
          Config::kThreads,
          Config::kConsumerRegisters,
          Config::kLoaderRegisters,
          static_cast<int>(sizeof(Storage<Config>))};
}

}  // namespace flamia::sm90::forward
