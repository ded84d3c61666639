// SPDX-License-Identifier: Apache-2.0
// Power-of-two exponents of a key tile: what the copy warp makes of the exponent bytes, and the arithmetic both sides share.
#pragma once
#include <cstdint>

#include "config.hpp"
#include "storage.hpp"

namespace flamia::sm90::forward {

inline constexpr int kExponentBias = 127;
inline constexpr int kFlaggedByte = 255;  // the token holds NaN or infinity; its codes are 0
inline constexpr float kNaN = __builtin_nanf("");
inline constexpr unsigned kFullWarp = 0xFFFFFFFFu;

/// 2^exponent for -126 ... 127.
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + kExponentBias) << 23); }

/// 2^exponent for -127 (subnormal, exact) ... 127.
__device__ __forceinline__ float power_of_two_full(int exponent) {
  return exponent <= -127 ? __int_as_float(0x00400000) : power_of_two(exponent);
}

__device__ __forceinline__ int clamp(int value, int low, int high) { return min(max(value, low), high); }

/// Factor from raw scores to base-2 logits for a query of this exponent byte; the tile's key exponent is multiplied in later. Queries
/// below 2^-100 of E4M3's range keep that exponent: their logits vanish against any key of an amplitude under 2^100.
__device__ __forceinline__ float query_scale(float softmax_scale, int byte) {
  const float scale = __fmul_rn(softmax_scale, 1.4426950408889634f) * power_of_two(clamp(byte - kExponentBias, -100, 120));
  return byte == kFlaggedByte ? kNaN : scale;
}

/// Four keys' exponent bytes, one register per operand; a lane of the copy warp holds keys 4 * lane ... 4 * lane + 3 of the tile.
struct ExponentWords {
  std::uint32_t key, value;
};

__device__ __forceinline__ ExponentWords load_token_exponents(const std::uint8_t* key, const std::uint8_t* value,
                                                              std::int64_t first_slot, int lane) {
  const std::int64_t at = first_slot + 4 * lane;
  return {__ldg(reinterpret_cast<const std::uint32_t*>(key + at)), __ldg(reinterpret_cast<const std::uint32_t*>(value + at))};
}

/// Keys beyond the document take the first key's exponents, so that they decide nothing.
__device__ __forceinline__ std::uint32_t blank_beyond(std::uint32_t word, std::uint32_t first_byte, int valid_keys, int lane) {
  const int keep = clamp(valid_keys - 4 * lane, 0, 4);
  const std::uint32_t mask = keep == 4 ? 0xFFFFFFFFu : (1u << 8 * keep) - 1u;
  return (word & mask) | (first_byte * 0x01010101u & ~mask);
}

/// A token's entry of a mixed tile.
template <class Config>
__device__ __forceinline__ void store_entry(TileExponents<Config::kScaleEntries>& tile, int entry, int key_byte, int value_byte,
                                            int reach) {
  const bool flagged = key_byte == kFlaggedByte || value_byte == kFlaggedByte;
  tile.key_factors[entry] = flagged ? kNaN : power_of_two_full(key_byte - kExponentBias);
  tile.value[entry] = __float_as_int(power_of_two_full(value_byte == kFlaggedByte ? -127 : value_byte - kExponentBias));
  tile.reach[entry] = reach;
}

__device__ __forceinline__ bool has_flagged(std::uint32_t word) { return __vcmpeq4(word, 0xFFFFFFFFu) != 0; }

/// Greatest value exponent among a lane's own keys, flagged ones skipped.
__device__ __forceinline__ int greatest_exponent(std::uint32_t word) {
  int greatest = -127;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int byte = word >> 8 * i & 255;
    greatest = byte == kFlaggedByte ? greatest : max(greatest, byte - kExponentBias);
  }
  return greatest;
}

/// Whether all tokens have the first one's exponent and none is flagged.
__device__ __forceinline__ bool one_exponent(std::uint32_t word, std::uint32_t first_byte) {
  return __all_sync(kFullWarp, word == first_byte * 0x01010101u) && first_byte != kFlaggedByte;
}

/// What is found in a tile's exponents, once.
struct TileWords {
  ExponentWords words;  // keys beyond the document as the first
  std::uint32_t first_key, first_value;
  bool one_key, one_value;
};

__device__ __forceinline__ TileWords examine(ExponentWords words, int valid_keys, int lane) {
  TileWords tile;
  tile.first_key = __shfl_sync(kFullWarp, words.key & 255, 0);
  tile.first_value = __shfl_sync(kFullWarp, words.value & 255, 0);
  if (valid_keys < kKeyTile) {
    words.key = blank_beyond(words.key, tile.first_key, valid_keys, lane);
    words.value = blank_beyond(words.value, tile.first_value, valid_keys, lane);
  }
  tile.words = words;
  tile.one_key = one_exponent(words.key, tile.first_key);
  tile.one_value = one_exponent(words.value, tile.first_value);
  return tile;
}

/// The first word of TileExponents.
__device__ __forceinline__ int plain_exponent(int flags, int value_exponent) {
  return (flags & (Flags::kMixedKeys | Flags::kMixedValues)) != 0 ? kNotPlain : value_exponent;
}

/// Writes the exponents of one tile; all lanes of the copy warp take part. `values`: Flags of the values.
template <class Config>
__device__ __forceinline__ void store_exponents(TileExponents<Config::kScaleEntries>& tile, const TileWords& found, int values,
                                                int lane) {
  const ExponentWords words = found.words;
  const int key_factor = __float_as_int(power_of_two_full(static_cast<int>(found.first_key) - kExponentBias));

  if (found.one_key && found.one_value) {
    if (lane == 0) {
      const int exponent = static_cast<int>(found.first_value) - kExponentBias;
      *reinterpret_cast<int4*>(&tile) = make_int4(exponent, 0, key_factor, exponent);
    }
    return;
  }

  int reach = greatest_exponent(words.value);  // inclusive prefix maximum over the lanes
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(kFullWarp, reach, step);
    if (lane >= step) reach = max(reach, before);
  }
  const int greatest = __shfl_sync(kFullWarp, reach, 31);
  const bool flagged = __any_sync(kFullWarp, has_flagged(words.key) || has_flagged(words.value));
  const bool mixed_keys = !found.one_key | flagged;
  const int flags = (mixed_keys ? Flags::kMixedKeys : 0) | values;
  if (lane == 0) {
    *reinterpret_cast<int4*>(&tile) =
        make_int4(plain_exponent(flags, greatest), flags, mixed_keys ? __float_as_int(1.0f) : key_factor, greatest);
  }

  int running = __shfl_up_sync(kFullWarp, reach, 1);
  if (lane == 0) running = -127;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key_byte = words.key >> 8 * i & 255;
    const int value_byte = words.value >> 8 * i & 255;
    running = value_byte == kFlaggedByte ? running : max(running, value_byte - kExponentBias);
    store_entry<Config>(tile, 4 * lane + i, key_byte, value_byte, running);
  }
}

}  // namespace flamia::sm90::forward
