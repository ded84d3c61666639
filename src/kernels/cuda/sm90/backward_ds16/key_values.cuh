// SPDX-License-Identifier: Apache-2.0
// K of an item as BF16 values, the B operand of dQ. Made in the block, of the codes that the scores are made of or, where those are NVFP4, of E4M3 codes in
// memory: no such copy exists there.
#pragma once
#include <cstdint>

#include "../../ptx/barrier.cuh"
#include "../../ptx/matrix.cuh"
#include "../values16.cuh"
#include "config.hpp"
#include "numerics/exponent.hpp"

namespace flamia::sm90::ds16 {

/// Where a thread finds codes of a key, and the power of two that they are multiplied by, 0 of a flagged one. NVFP4: in memory, for one item a block; four
/// loads are under way at a time, and the other warpgroup works meanwhile.
template <class Config>
struct KeyCodes {
  const BackwardParams& params;
  const Storage<Config>& storage;
  std::int64_t first;  // the tile's first row
  float common;        // what has been taken out of the slopes

  __device__ __forceinline__ int4 of(std::uint32_t at) const {
    if constexpr (Config::kKeysFromMemory)
      return *reinterpret_cast<const int4*>(params.key_codes + first * Config::kHeadDim + at);
    else
      return ptx::load_shared_int4(ptx::shared_address(storage.key) + at);
  }
  __device__ __forceinline__ float factor(std::uint32_t key) const {
    if constexpr (Config::kKeysFromMemory) {
      const int byte = params.key_exponents[first + key];
      return byte == kFlaggedByte ? 0.0f : numerics::pow2(byte - kExponentBias);
    } else {
      const float slope = ptx::load_shared_float(ptx::shared_address(&storage.key_factors[key]));
      return slope == slope ? slope * common : 0.0f;
    }
  }
};

/// The channels of dQ that belong to a warpgroup, for all keys of the tile; its 128 threads. Nobody else reads these, so the warps of the warpgroup
/// alone must have done with those of the item before, and see these: they meet twice. A key that is flagged, or whose value is, has no factor: its values
/// are 0, because where it is seen dS is NaN anyway, and elsewhere 0.
template <class Config>
__device__ __forceinline__ void make_key_values(Storage<Config>& storage, const KeyCodes<Config>& keys, std::uint32_t thread,
                                                std::uint32_t group) {
  constexpr std::uint32_t kPieces = Config::kQueryColumns / 16, kKeysAtOnce = 128 / kPieces;  // pieces of 16 channels
  constexpr std::uint32_t kAtoms = Config::kHeadDim / 64, kTimes = 128 / kKeysAtOnce;
  const std::uint32_t in_group = thread % 128, row = thread % 8;
  const std::uint32_t piece = group * kPieces + in_group / 8 % kPieces, eight = in_group / (8 * kPieces);
  const std::uint32_t from = eight * (8 * Config::kHeadDim) + piece * 128 + row * 16;
  const std::uint32_t to = ptx::shared_address(storage.key16) + (eight * kAtoms + piece / 4) * 1024 + row * 128;
  const std::uint32_t first = (piece % 4 * 2 ^ row) * 16, second = first ^ 16;  // chunks of 8 channels
  int4 codes[kTimes];
  float factor[kTimes];
  const auto load = [&](std::uint32_t i) {
    codes[i] = keys.of(from + i * (kKeysAtOnce * Config::kHeadDim));
    factor[i] = keys.factor(8 * eight + row + i * kKeysAtOnce);
  };
  if constexpr (Config::kKeysFromMemory) {
#pragma unroll
    for (std::uint32_t i = 0; i < kTimes; ++i) load(i);
  }
  ptx::named_barrier_sync(3 + group, 128);
#pragma unroll
  for (std::uint32_t i = 0; i < kTimes; ++i) {
    if constexpr (!Config::kKeysFromMemory) load(i);
    uint2 values[4] = {products16(static_cast<std::uint32_t>(codes[i].x), factor[i]),
                       products16(static_cast<std::uint32_t>(codes[i].y), factor[i]),
                       products16(static_cast<std::uint32_t>(codes[i].z), factor[i]),
                       products16(static_cast<std::uint32_t>(codes[i].w), factor[i])};
    if (factor[i] >= kMayOverflow) {  // one branch for all: each took longer than the products
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
