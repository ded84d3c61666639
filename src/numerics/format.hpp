// SPDX-License-Identifier: Apache-2.0
// Small number formats as data, and one encoder and decoder for all of them.
//
//   format  sign exponent mantissa bias  largest  least normal  least subnormal  NaN            Inf
//   E4M3    1    4        3        7     448      2^-6          2^-9             0x7f, 0xff     none
//   E5M2    1    5        2        15    57344    2^-14         2^-16            above 0x7c     0x7c, 0xfc
//   E3M2    1    3        2        3     28       2^-2          2^-4             none           none
//   E2M3    1    2        3        1     7.5      2^0           2^-3             none           none
//   E2M1    1    2        1        1     6        2^0           2^-1             none           none
//   UE8M0   0    8        0        127   2^127    2^-127        -                255            none
//   INT8    two's complement, -127 ... 127
//
// Encoding rounds to nearest, ties to even, and saturates to the largest finite magnitude (OCP MX 1.0 §5.3; E4M3 and E5M2 as in
// OCP FP8 1.0). NaN and infinities follow CUDA's cuda_fp8.h and cuda_fp4.h with __NV_SATFINITE: E4M3, E5M2: NaN -> 0x7f, infinity ->
// +-largest; formats without NaN: NaN -> +largest, infinity -> +-largest. Bit-exact with the toolkit for every float (tests/numerics).
#pragma once
#include "numerics/platform.hpp"

namespace flamia::numerics {

/// A sign-magnitude binary floating-point format of at most 8 bits.
struct MiniFloat {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  std::uint32_t largest;  // code of the largest finite magnitude
  bool has_nan;           // 0x7f (all ones) is NaN
  bool has_infinity;      // decoding only: encoding saturates
  FLAMIA_FN constexpr int bits() const { return 1 + exponent_bits + mantissa_bits; }
  FLAMIA_FN constexpr std::uint32_t sign_bit() const { return 1u << (exponent_bits + mantissa_bits); }
};

inline constexpr MiniFloat kE4M3{4, 3, 7, 0x7e, true, false};
inline constexpr MiniFloat kE5M2{5, 2, 15, 0x7b, true, true};
inline constexpr MiniFloat kE3M2{3, 2, 3, 0x1f, false, false};
inline constexpr MiniFloat kE2M3{2, 3, 1, 0x1f, false, false};
inline constexpr MiniFloat kE2M1{2, 1, 1, 0x07, false, false};

/// Value of a code. Exact: every code is an FP32 number.
template <MiniFloat F>
FLAMIA_FN float decode(std::uint32_t code) {
  const std::uint32_t magnitude = code & (F.sign_bit() - 1u);
  const std::uint32_t sign = (code & F.sign_bit()) ? 0x80000000u : 0u;
  const std::uint32_t exponent = magnitude >> F.mantissa_bits;
  const std::uint32_t mantissa = magnitude & ((1u << F.mantissa_bits) - 1u);
  constexpr std::uint32_t top = (1u << F.exponent_bits) - 1u;
  if constexpr (F.has_infinity) {
    if (exponent == top) return float_of(sign | (mantissa ? 0x7fc00000u : 0x7f800000u));
  } else if constexpr (F.has_nan) {
    if (magnitude == F.sign_bit() - 1u) return float_of(sign | 0x7fc00000u);
  }
  if (exponent == 0) {  // subnormal: mantissa * 2^(1 - bias - mantissa bits), a small integer times a power of two
    const float unit = float_of(static_cast<std::uint32_t>(127 + 1 - F.bias - F.mantissa_bits) << 23);
    return float_of(bits_of(static_cast<float>(mantissa) * unit) | sign);
  }
  return float_of(sign | (exponent + 127u - F.bias) << 23 | mantissa << (23 - F.mantissa_bits));
}

/// Nearest code, ties to even, saturating. Branch-free on finite input, so that it vectorises.
template <MiniFloat F>
FLAMIA_FN std::uint32_t encode(float x) {
  constexpr int shift = 23 - F.mantissa_bits;
  constexpr std::uint32_t least_normal = static_cast<std::uint32_t>(127 + 1 - F.bias) << 23;
  // Adding 2^(23 + exponent of the least subnormal) makes FP32 itself round to a multiple of that subnormal.
  constexpr std::uint32_t magic = static_cast<std::uint32_t>(127 + 1 - F.bias - F.mantissa_bits + 23) << 23;
  const std::uint32_t magnitude = bits_of(x) & 0x7fffffffu;
  const std::uint32_t sign = (bits_of(x) >> 31) ? F.sign_bit() : 0u;
  const std::uint32_t rounded = magnitude + ((1u << (shift - 1)) - 1u) + (magnitude >> shift & 1u);
  const std::uint32_t normal = (rounded >> shift) - (static_cast<std::uint32_t>(127 - F.bias) << F.mantissa_bits);
  const std::uint32_t subnormal = bits_of(add(float_of(magnitude), float_of(magic))) - magic;
  std::uint32_t code = magnitude < least_normal ? subnormal : normal;
  // `rounded` is monotone in the magnitude, so everything that rounds above the largest finite number lands here, infinity too.
  constexpr std::uint32_t limit = (F.largest + (static_cast<std::uint32_t>(127 - F.bias) << F.mantissa_bits)) << shift;
  code = rounded >= limit ? F.largest : code;
  const bool nan = magnitude > 0x7f800000u;
  if constexpr (F.has_nan) return nan ? F.sign_bit() - 1u : code | sign;
  return nan ? F.largest : code | sign;
}

/// INT8, symmetric: -127 ... 127, nearest even; NaN -> 0.
FLAMIA_FN std::int8_t encode_int8(float x) {
  if (is_nan(x)) return 0;
  const float clamped = x > 127.f ? 127.f : (x < -127.f ? -127.f : x);
  // 1.5 * 2^23: the sum's low bits are the rounded integer
  return static_cast<std::int8_t>(static_cast<std::int32_t>(bits_of(add(clamped, 12582912.f))) - 0x4b400000);
}
FLAMIA_FN float decode_int8(std::int8_t code) { return static_cast<float>(code); }

// ---- 16-bit formats (nearest even; NaN stays NaN; BF16 overflow gives infinity as IEEE rounding does) ----

FLAMIA_FN std::uint16_t encode_bf16(float x) {
  const std::uint32_t u = bits_of(x);
  if (is_nan(x)) return static_cast<std::uint16_t>(u >> 16 | 0x40u);
  return static_cast<std::uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
FLAMIA_FN float decode_bf16(std::uint16_t h) { return float_of(static_cast<std::uint32_t>(h) << 16); }

FLAMIA_FN float decode_f16(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t exponent = h >> 10 & 0x1fu;
  const std::uint32_t mantissa = h & 0x3ffu;
  if (exponent == 0x1fu) return float_of(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(mantissa) * float_of(103u << 23)));  // * 2^-24
  return float_of(sign | (exponent + 112u) << 23 | mantissa << 13);
}
FLAMIA_FN std::uint16_t encode_f16(float x) {
  const std::uint32_t magnitude = bits_of(x) & 0x7fffffffu;
  const std::uint16_t sign = static_cast<std::uint16_t>(bits_of(x) >> 16 & 0x8000u);
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and more round to infinity
  if (magnitude < 0x38800000u) {                                                    // below 2^-14: multiples of 2^-24
    const std::uint32_t magic = 126u << 23;                                         // 2^-1: unit in the last place 2^-24
    return static_cast<std::uint16_t>(sign | (bits_of(add(float_of(magnitude), float_of(magic))) - magic));
  }
  const std::uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}

/// x rounded to BF16 and back.
FLAMIA_FN float round_bf16(float x) { return decode_bf16(encode_bf16(x)); }
/// The same, but finite for every x that is no NaN: what a product meets beside a masked pair's 0 must not be infinite.
FLAMIA_FN float round_bf16_finite(float x) {
  const float largest = float_of(0x7f7f0000u);
  return round_bf16(x > largest ? largest : x < -largest ? -largest : x);
}
/// x rounded to E4M3 and back, the form in which the CPU backend keeps codes.
FLAMIA_FN float round_e4m3(float x) { return decode<kE4M3>(encode<kE4M3>(x)); }

}  // namespace flamia::numerics
