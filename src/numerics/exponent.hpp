// SPDX-License-Identifier: Apache-2.0
// Power-of-two scales: a scale is an integer exponent e, value = code * 2^e. Stored as UE8M0, byte = e + 127, 255 = flagged token.
#pragma once
#include "numerics/format.hpp"

namespace flamia::numerics {

inline constexpr int kLeastExponent = -127;    // UE8M0 byte 0; the exponent of an all-zero group
inline constexpr std::uint8_t kFlagged = 255;  // UE8M0 NaN: the group holds NaN or infinity, all its codes are 0 (numerics.md §10)

/// Least e with amax <= qmax * 2^e, from the bits (the *ceil* rule): no element of the group can saturate.
/// qmax = 1.m * 2^qexp is the format's largest value; E4M3 448 = 1.75 * 2^8. amax finite and >= 0; zero gives kLeastExponent.
template <MiniFloat F>
FLAMIA_FN int ceil_exponent(float amax) {
  constexpr std::uint32_t largest = F.largest;
  constexpr int qexp = static_cast<int>(largest >> F.mantissa_bits) - F.bias;
  constexpr std::uint32_t qmantissa = (largest & ((1u << F.mantissa_bits) - 1u)) << (23 - F.mantissa_bits);
  const std::uint32_t u = bits_of(amax);
  const int e = static_cast<int>(u >> 23) - 127 - qexp + ((u & 0x7fffffu) > qmantissa ? 1 : 0);
  return u == 0 ? kLeastExponent : max_of(e, kLeastExponent);
}

/// floor(log2 amax) - emax (the OCP MX reference, *floor* rule): elements above qmax * 2^e saturate, which is a leak of its own.
/// Kept to show what it costs.
template <MiniFloat F>
FLAMIA_FN int floor_exponent(float amax) {
  constexpr int qexp = static_cast<int>(F.largest >> F.mantissa_bits) - F.bias;
  const std::uint32_t u = bits_of(amax);
  return u == 0 ? kLeastExponent : max_of(static_cast<int>(u >> 23) - 127 - qexp, kLeastExponent);
}

inline constexpr int kMostHeadroom = 4;
/// The byte of a document's first group (not flagged) where sticky exponents begin `headroom` binades higher; one that holds nothing stays.
/// At most 2^126, whose inverse is normal.
FLAMIA_FN std::uint32_t with_headroom(std::uint32_t byte, int headroom) {
  const std::uint32_t raised = byte + static_cast<std::uint32_t>(headroom);
  return byte == 0 ? 0u : raised < 253u ? raised : 253u;
}

FLAMIA_FN std::uint8_t encode_ue8m0(int exponent) { return static_cast<std::uint8_t>(exponent + 127); }
/// Exponent of a scale byte; a flagged token counts as 2^0: its codes are zero, and an MMA never sees scale 255.
FLAMIA_FN int decode_ue8m0(std::uint8_t byte) { return byte == kFlagged ? 0 : static_cast<int>(byte) - 127; }

/// 2^e, e in -149 ... 127 (subnormal results are exact).
FLAMIA_FN float pow2(int e) {
  return e >= -126 ? float_of(static_cast<std::uint32_t>(e + 127) << 23) : float_of(e >= -149 ? 1u << (e + 149) : 0u);
}

/// x * 2^e for any e that arises as a sum of two or three exponents (|e| <= 507): two normal factors, so no constant is subnormal
/// and a single rounding happens unless the result is subnormal (numerics.md §8).
FLAMIA_FN float scale_pow2(float x, int e) {
  const auto clamp = [](int k) { return max_of(-126, min_of(k, 127)); };
  const int low = e >> 1;  // floor(e / 2)
  return mul(mul(x, pow2(clamp(low))), pow2(clamp(e - low)));
}

/// NVFP4 group scale: E4M3 code of amax / (divisor * tensor_scale), divisor 6 (or 4). Zero guard: a group whose scale rounds to
/// zero has zero codes.
FLAMIA_FN std::uint32_t nvfp4_scale(float amax, float divisor, float tensor_scale) {
  return encode<kE4M3>(amax / (divisor * tensor_scale));
}

}  // namespace flamia::numerics
