// SPDX-License-Identifier: Apache-2.0
// What the copy warp makes of the exponent bytes of a key tile with token-blocks. The warp is slow beside the consumers, and every instruction of
// it delays the tile: lane i looks at token-block i % 4 alone, by its first key, and nothing branches.
#pragma once
#include <cstdint>

#include "../../ptx/barrier.cuh"
#include "../../ptx/matrix.cuh"
#include "exponents.cuh"
#include "storage.hpp"

namespace flamia::sm90::forward {

/// Exponent bytes of a lane's token-block.
struct BlockBytes {
  int key, value;
};

__device__ __forceinline__ BlockBytes load_block_exponents(const std::uint8_t* key, const std::uint8_t* value,
                                                           std::int64_t first_slot, int lane) {
  const std::int64_t at = first_slot + kBlock * (lane % (kKeyTile / kBlock));
  return {__ldg(key + at), __ldg(value + at)};
}

/// Exponents lie close together where none is further below the greatest than this.
inline constexpr int kClosest = 2;

/// What is found in a tile's exponents, once.
struct TileBlocks {
  BlockBytes bytes;  // of blocks beyond the document as of the first, so that they decide nothing
  int greatest;      // byte of the greatest value exponent, flagged blocks skipped
  int shift;         // of the lane's block: how far below the greatest
  int fold;          // the same if all blocks are close, otherwise 0
  int values;        // Flags
};

__device__ __forceinline__ TileBlocks examine(BlockBytes bytes, int valid_keys, int lane) {
  TileBlocks tile;
  const int first_key = __shfl_sync(kFullWarp, bytes.key, 0), first_value = __shfl_sync(kFullWarp, bytes.value, 0);
  const bool inside = kBlock * (lane % (kKeyTile / kBlock)) < valid_keys;
  tile.bytes = {inside ? bytes.key : first_key, inside ? bytes.value : first_value};
  const int value = tile.bytes.value == kFlaggedByte ? 0 : tile.bytes.value;
  tile.greatest = __reduce_max_sync(kFullWarp, value);
  tile.shift = tile.greatest - value;
  const bool far = __any_sync(kFullWarp, tile.shift > kClosest);
  tile.fold = far ? 0 : tile.shift;
  tile.values = far ? Flags::kMixedValues : __any_sync(kFullWarp, tile.shift != 0) ? Flags::kClose : 0;
  return tile;
}

/// Puts 2^fold into the columns of ones beside a block's values: codes folded by 2^-fold then add up to what unfolded ones would. The stage
/// is free; whole warp.
template <class Config>
__device__ __forceinline__ void set_ones(Stage<Config>& stage, const TileBlocks& found, int lane) {
  constexpr int kBlocks = kKeyTile / kBlock;
  if (__all_sync(kFullWarp, stage.ones_folds[lane % kBlocks] == found.fold)) return;
  constexpr std::uint32_t one = 0x38;  // E4M3; a power of two is 8 more
  const std::uint32_t word = (one + 8 * __shfl_sync(kFullWarp, found.fold, lane / 8)) * 0x01010101u;
  const std::uint32_t at = ptx::shared_address(stage.value) + lane / 4 * Config::kValueGroupStride + Config::kValueGroupBytes +
                           lane % 4 * (Config::kOnesBytes / 4);
  ptx::store_shared_x4(at, word, word, word, word);
  ptx::store_shared_x4(at + 16, word, word, word, word);
  __syncwarp();  // every lane has read what stood
  if (lane < kBlocks) stage.ones_folds[lane] = found.fold;
  ptx::fence_async_reads();
  __syncwarp();
}

/// Writes the exponents of one tile; all lanes of the copy warp take part.
template <class Config>
__device__ __forceinline__ void store_exponents(TileExponents<Config::kScaleEntries>& tile, const TileBlocks& found, int lane) {
  constexpr int kBlocks = kKeyTile / kBlock;
  static_assert(Config::kScaleEntries == kBlocks && kBlocks == 4);
  const auto [key, value] = found.bytes;
  const bool flagged = (key == kFlaggedByte) | (value == kFlaggedByte);
  const int flags = found.values | (__any_sync(kFullWarp, flagged) ? Flags::kMixedKeys : 0);
  if (lane < kBlocks) {
    tile.key_factors[lane] = flagged ? kNaN : power_of_two_full(key - kExponentBias);
    tile.value[lane] = __float_as_int(static_cast<float>(-found.shift));
  }
  const int exponent = found.greatest - kExponentBias;
  if (lane == kBlocks) *reinterpret_cast<int4*>(&tile) = make_int4(plain_exponent(flags, exponent), flags, 0, exponent);
}

}  // namespace flamia::sm90::forward
