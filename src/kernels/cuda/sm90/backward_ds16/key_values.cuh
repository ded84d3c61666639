// SPDX-License-Identifier: Apache-2.0
// K of an item as BF16 values, the B operand of dQ. Made in the block, of the codes that the scores are made of, or of codes that were copied for it:
// no such copy exists in memory.
#pragma once
#include <cstdint>

#include "../../ptx/barrier.cuh"
#include "../../ptx/matrix.cuh"
#include "../values16.cuh"
#include "config.hpp"
#include "numerics/exponent.hpp"

namespace flamia::sm90::ds16 {

/// The power of two that a key's codes are multiplied by, of whose slope `common` has been taken out; 0 of a flagged one.
template <class Config>
__device__ __forceinline__ float key_factor(const Storage<Config>& storage, std::uint32_t key, float common) {
  if constexpr (Config::kKeyCodesCopied) {
    const int byte = storage.copied.exponents[key];
    return byte == kFlaggedByte ? 0.0f : numerics::pow2(byte - kExponentBias);
  } else {
    const float slope = ptx::load_shared_float(ptx::shared_address(&storage.key_factors[key]));
    return slope == slope ? slope * common : 0.0f;
  }
}

/// The channels of dQ that belong to a warpgroup, for all keys of the tile; its 128 threads. Nobody else reads these, so the warps of the warpgroup
/// alone must have done with those of the item before, and see these: they meet twice (once where codes are copied, which waits for that). A key that is
/// flagged, or whose value is, has no factor: its values are 0, because where it is seen dS is NaN anyway, and elsewhere 0. `begun` = number of the item's
/// first step, whose records say what the slopes lack.
template <class Config>
__device__ __forceinline__ void make_key_values(Storage<Config>& storage, std::uint32_t thread, std::uint32_t group,
                                                std::uint32_t begun) {
  constexpr std::uint32_t kPieces = Config::kQueryColumns / 16, kKeysAtOnce = 128 / kPieces;  // pieces of 16 channels
  constexpr std::uint32_t kAtoms = Config::kHeadDim / 64;
  const std::uint32_t in_group = thread % 128, row = thread % 8;
  const std::uint32_t piece = group * kPieces + in_group / 8 % kPieces, eight = in_group / (8 * kPieces);
  constexpr std::uint32_t kEightBytes =
      (Config::kKeyCodesInPlace ? 2 : 1) * 8 * Config::kHeadDim;  // of codes, from eight keys to the next
  std::uint32_t from = eight * kEightBytes + row * 16;
  if constexpr (Config::kKeyCodesInPlace)
    from += ptx::shared_address(storage.key16) + group * 1024 + piece % 4 * 128;
  else if constexpr (Config::kKeyCodesCopied)
    from += ptx::shared_address(storage.copied.codes) + piece * 128;
  else
    from += ptx::shared_address(storage.key) + piece * 128;
  const std::uint32_t to = ptx::shared_address(storage.key16) + (eight * kAtoms + piece / 4) * 1024 + row * 128;
  const std::uint32_t first = (piece % 4 * 2 ^ row) * 16, second = first ^ 16;  // chunks of 8 channels
  const float common = Config::Record::kPerToken ? storage.sums[begun % Config::kSumSlots].group_words[0] : 1.0f;
  if constexpr (!Config::kKeyCodesCopied) ptx::named_barrier_sync(3 + group, 128);
#pragma unroll
  for (std::uint32_t i = 0; i < 128 / kKeysAtOnce; ++i) {
    const int4 codes = ptx::load_shared_int4(from + i * (kKeysAtOnce / 8 * kEightBytes));
    const float factor = key_factor(storage, 8 * eight + row + i * kKeysAtOnce, common);
    if constexpr (Config::kKeyCodesInPlace) __syncwarp();  // the warp has read what it now writes over
    uint2 values[4] = {
        products16(static_cast<std::uint32_t>(codes.x), factor), products16(static_cast<std::uint32_t>(codes.y), factor),
        products16(static_cast<std::uint32_t>(codes.z), factor), products16(static_cast<std::uint32_t>(codes.w), factor)};
    if (factor >= kMayOverflow) {  // one branch for all: each took longer than the products
#pragma unroll
      for (uint2& two : values) two = {finite16(two.x), finite16(two.y)};
    }
    const std::uint32_t at = to + i * (kKeysAtOnce * Config::kHeadDim * 2);
    ptx::store_shared_x4(at + first, values[0].x, values[0].y, values[1].x, values[1].y);
    ptx::store_shared_x4(at + second, values[2].x, values[2].y, values[3].x, values[3].y);
  }
  ptx::fence_async_reads();
  ptx::named_barrier_sync(3 + group, 128);
}

}  // namespace flamia::sm90::ds16
