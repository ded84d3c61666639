// SPDX-License-Identifier: Apache-2.0
// Powers of two and the exponent rule, from bits.
#pragma once
#include <cstdint>

#include "records.hpp"

namespace flamia::sm90::backward {

inline constexpr unsigned kFullWarp = 0xFFFFFFFFu;

__device__ __forceinline__ int clamp(int value, int low, int high) { return min(max(value, low), high); }

/// 2^exponent, -126 ... 127.
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + kExponentBias) << 23); }

/// The ceil rule on the bits of a magnitude: least e with x <= 448 * 2^e; -135 for all subnormal numbers.
__device__ __forceinline__ int unclamped_payload_exponent(std::uint32_t magnitude_bits) {
  constexpr std::uint32_t above_448 = 0x1FFFFF;  // carries into the exponent from a mantissa above 1.75 on
  return static_cast<int>((magnitude_bits + above_448) >> 23) - kExponentBias - 8;
}
/// Held within -100 ... 120, where a payload of smaller or larger magnitude contributes nothing or is infinite, so that products of such
/// factors stay finite.
__device__ __forceinline__ int payload_exponent(std::uint32_t magnitude_bits) {
  return clamp(unclamped_payload_exponent(magnitude_bits), -100, 120);
}

/// 2^payload_exponent.
__device__ __forceinline__ float payload_scale(std::uint32_t magnitude_bits) {
  return power_of_two(payload_exponent(magnitude_bits));
}

/// Greatest over the four lanes of a quad.
__device__ __forceinline__ std::uint32_t greatest_of_quad(std::uint32_t magnitude_bits) {
  magnitude_bits = max(magnitude_bits, __shfl_xor_sync(kFullWarp, magnitude_bits, 1));
  return max(magnitude_bits, __shfl_xor_sync(kFullWarp, magnitude_bits, 2));
}

/// Of a power of two, 2^-126 ... 2^126.
__device__ __forceinline__ float inverse_power(float power) {
  return __int_as_float((2 * kExponentBias << 23) - __float_as_int(power));
}

/// The power of two that brings a row's Y into FP16: 2^-(greatest V exponent it sees, or what D' asks), and 2^-(how far its greatest K
/// exponent lies below the tile's). A function of what the row sees alone.
__device__ __forceinline__ int fp16_shift(int value_exponent, int row_reach, int key_exponent, int tile_key_exponent) {
  return clamp(tile_key_exponent - key_exponent - max(value_exponent, row_reach), -100, 100);
}

}  // namespace flamia::sm90::backward
