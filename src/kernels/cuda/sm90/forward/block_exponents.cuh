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

/// How far apart the value exponents of a tile's blocks lie.
struct BlockShifts {
  int greatest;  // byte of the greatest value exponent, flagged blocks skipped
  int shift;     // of the lane's block: how far below the greatest
  int fold;      // the same if all blocks are close, otherwise 0
  int values;    // Flags
};

/// `value`: the exponent byte of the lane's block, 0 if it is flagged.
__device__ __forceinline__ BlockShifts compare_blocks(int value) {
  BlockShifts blocks;
  blocks.greatest = __reduce_max_sync(kFullWarp, value);
  blocks.shift = blocks.greatest - value;
  const bool far = __any_sync(kFullWarp, blocks.shift > kClosest);
  blocks.fold = far ? 0 : blocks.shift;
  blocks.values = far ? Flags::kMixedValues : __any_sync(kFullWarp, blocks.shift != 0) ? Flags::kClose : 0;
  return blocks;
}

/// What is found in a tile's exponents, once.
struct TileBlocks {
  BlockBytes bytes;  // of blocks beyond the document as of the first, so that they decide nothing
  BlockShifts blocks;
};

__device__ __forceinline__ TileBlocks examine(BlockBytes bytes, int valid_keys, int lane) {
  TileBlocks tile;
  const int first_key = __shfl_sync(kFullWarp, bytes.key, 0), first_value = __shfl_sync(kFullWarp, bytes.value, 0);
  const bool inside = kBlock * (lane % (kKeyTile / kBlock)) < valid_keys;
  tile.bytes = {inside ? bytes.key : first_key, inside ? bytes.value : first_value};
  tile.blocks = compare_blocks(tile.bytes.value == kFlaggedByte ? 0 : tile.bytes.value);
  return tile;
}

/// Of a tile with an exponent for every token: whether its values have token-blocks, none of them flagged, and how far apart those lie.
__device__ __forceinline__ BlockShifts find_blocks(const TileWords& tile, int lane) {
  if (tile.one_value) return {static_cast<int>(tile.first_value), 0, 0, 0};
  constexpr int kLanes = kBlock / 4;  // of a block
  const std::uint32_t own = tile.words.value & 255;
  const bool whole = __all_sync(kFullWarp, (tile.words.value == own * 0x01010101u) & (own != kFlaggedByte) &
                                               (own == __shfl_sync(kFullWarp, own, lane / kLanes * kLanes)));
  const BlockShifts blocks = compare_blocks(static_cast<int>(__shfl_sync(kFullWarp, own, lane % (kKeyTile / kBlock) * kLanes)));
  return whole ? blocks : BlockShifts{blocks.greatest, 0, 0, Flags::kMixedValues};
}

/// Puts 2^fold into the columns of ones beside a block's values: codes folded by 2^-fold then add up to what unfolded ones would. The stage
/// is free; whole warp.
template <class Config>
__device__ __forceinline__ void set_ones(Stage<Config>& stage, const BlockShifts& blocks, int lane) {
  constexpr int kBlocks = kKeyTile / kBlock;
  if (__all_sync(kFullWarp, stage.ones_folds[lane % kBlocks] == blocks.fold)) return;
  constexpr std::uint32_t one = 0x38;  // E4M3; a power of two is 8 more
  const std::uint32_t word = (one + 8 * __shfl_sync(kFullWarp, blocks.fold, lane / 8)) * 0x01010101u;
  const std::uint32_t at = ptx::shared_address(stage.value) + lane / 4 * Config::kValueGroupStride + Config::kValueGroupBytes +
                           lane % 4 * (Config::kOnesBytes / 4);
  ptx::store_shared_x4(at, word, word, word, word);
  ptx::store_shared_x4(at + 16, word, word, word, word);
  __syncwarp();  // every lane has read what stood
  if (lane < kBlocks) stage.ones_folds[lane] = blocks.fold;
  ptx::fence_async_reads();
  __syncwarp();
}

/// Beside the exponents of tokens; in place of them where the bias folds and no mask cuts the tile (not `by_token`).
template <class Config>
__device__ __forceinline__ void store_shifts(Stage<Config>& stage, const TileWords& found, const BlockShifts& blocks, bool by_token,
                                             int lane) {
  if (lane < kKeyTile / kBlock) stage.shift[lane] = static_cast<float>(-blocks.fold);
  if (by_token || lane != 0) return;
  const int key_factor = __float_as_int(power_of_two_full(static_cast<int>(found.first_key) - kExponentBias));
  const int exponent = blocks.greatest - kExponentBias;
  *reinterpret_cast<int4*>(&stage.exponents) = make_int4(exponent, blocks.values, key_factor, exponent);
}

/// Writes the exponents of one tile; all lanes of the copy warp take part.
template <class Config>
__device__ __forceinline__ void store_exponents(TileExponents<Config::kScaleEntries>& tile, const TileBlocks& found, int lane) {
  constexpr int kBlocks = kKeyTile / kBlock;
  static_assert(Config::kScaleEntries == kBlocks && kBlocks == 4);
  const auto [key, value] = found.bytes;
  const bool flagged = (key == kFlaggedByte) | (value == kFlaggedByte);
  const int flags = found.blocks.values | (__any_sync(kFullWarp, flagged) ? Flags::kMixedKeys : 0);
  if (lane < kBlocks) {
    tile.key_factors[lane] = flagged ? kNaN : power_of_two_full(key - kExponentBias);
    tile.value[lane] = __float_as_int(static_cast<float>(-found.blocks.shift));
  }
  const int exponent = found.blocks.greatest - kExponentBias;
  if (lane == kBlocks) *reinterpret_cast<int4*>(&tile) = make_int4(plain_exponent(flags, exponent), flags, 0, exponent);
}

}  // namespace flamia::sm90::forward
