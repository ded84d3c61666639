// SPDX-License-Identifier: Apache-2.0
// What the copy warp makes of the exponent bytes of a key tile with token-blocks. The warp is slow beside the consumers, and every instruction of
// it delays the tile: lane i looks at token-block i % 4 alone, by its first key, and nothing branches.
#pragma once
#include <cstdint>

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

/// What is found in a tile's exponents, once.
struct TileBlocks {
  BlockBytes bytes;  // of blocks beyond the document as of the first, so that they decide nothing
  int greatest;      // byte of the greatest value exponent, flagged blocks skipped
  int lower;         // a bit for each block whose values do not have it; 0: the tile has one value exponent
};

__device__ __forceinline__ TileBlocks examine(BlockBytes bytes, int valid_keys, int lane) {
  constexpr unsigned kBlocks = (1u << kKeyTile / kBlock) - 1;
  TileBlocks tile;
  const int first_key = __shfl_sync(kFullWarp, bytes.key, 0), first_value = __shfl_sync(kFullWarp, bytes.value, 0);
  const bool inside = kBlock * (lane % (kKeyTile / kBlock)) < valid_keys;
  tile.bytes = {inside ? bytes.key : first_key, inside ? bytes.value : first_value};
  tile.greatest = __reduce_max_sync(kFullWarp, tile.bytes.value == kFlaggedByte ? 0 : tile.bytes.value);
  tile.lower = __ballot_sync(kFullWarp, tile.bytes.value != tile.greatest) & kBlocks;
  return tile;
}

/// Writes the exponents of one tile; all lanes of the copy warp take part. `folded`: the folding warps make one of several value exponents.
template <class Config>
__device__ __forceinline__ void store_exponents(TileExponents<Config::kScaleEntries>& tile, const TileBlocks& found, int lane,
                                                bool folded) {
  constexpr int kBlocks = kKeyTile / kBlock;
  static_assert(Config::kScaleEntries == kBlocks && kBlocks == 4);
  const auto [key, value] = found.bytes;
  const bool flagged = (key == kFlaggedByte) | (value == kFlaggedByte);
  const int mixed_keys = __any_sync(kFullWarp, flagged);
  int reach = value == kFlaggedByte ? 0 : value;  // inclusive prefix maximum over the blocks: four lanes, out of range is oneself
  reach = max(reach, __shfl_up_sync(kFullWarp, reach, 1, kBlocks));
  reach = max(reach, __shfl_up_sync(kFullWarp, reach, 2, kBlocks));
  if (lane < kBlocks) {
    tile.key_factors[lane] = flagged ? kNaN : power_of_two_full(key - kExponentBias);
    tile.value[lane] = (value == kFlaggedByte ? 0 : value) - kExponentBias;
    tile.reach[lane] = reach - kExponentBias;
  }
  if (lane == kBlocks)
    *reinterpret_cast<int4*>(&tile) = make_int4(mixed_keys, found.lower != 0 && !folded, 0, found.greatest - kExponentBias);
}

}  // namespace flamia::sm90::forward
