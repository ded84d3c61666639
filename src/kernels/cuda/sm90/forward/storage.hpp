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

/// Value exponents of a tile: one; several; token-blocks: several that lie close together (block_exponents.cuh).
struct Values {
  static constexpr int kUniform = 0, kMixed = 1, kClose = 2;
};

/// The exponents of a key tile, made ready by the copy warp. A tile is *uniform* when every key has one key exponent, every value one
/// value exponent, and no token is flagged; then the first four words say everything, and no more are written for tokens.
template <int kEntries>
struct alignas(16) TileExponents {
  std::int32_t mixed_keys;       // tokens: key_factor does not hold for every key; token-blocks: some block is flagged
  std::int32_t mixed_values;     // value_exponent does not hold for every value: Values
  float key_factor;              // 2^exponent of the first key (tokens)
  std::int32_t value_exponent;   // the greatest of the tile
  float key_factors[kEntries];   // 2^exponent; NaN for a flagged key or value
  std::int32_t value[kEntries];  // bits of value exponent - value_exponent as a float (token-blocks), of 2^exponent (tokens)
  std::int32_t reach[kEntries];  // their prefix maximum: what a row may know that sees the tile up to here
};

template <class Config>
struct Storage {
  alignas(128) std::uint8_t query[Config::kQueryBuffers][Config::kQueryBytes];
  alignas(128) std::uint8_t key[Config::kStages][Config::kKeyBytes];
  alignas(128) std::uint8_t value[Config::kStages][Config::kValueBytes];
  TileExponents<Config::kScaleEntries> exponents[Config::kStages];
  std::int32_t ones_shifts[Config::kStages];               // what stands in the columns of ones (block_exponents.cuh)
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
  std::uint64_t tile_ready[Config::kStages];          // copy engine (keys and values) and copy warp (exponents) -> consumers
  std::uint64_t tile_free[Config::kStages];           // consumers -> copy warp
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
