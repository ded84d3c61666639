// SPDX-License-Identifier: Apache-2.0
// How a tensor core adds. The FP8 accumulator of Hopper is not FP32: one instruction takes 32 products and the accumulator C, aligns
// all of them to the largest exponent, keeps 13 fractional bits of each (truncation), adds exactly, and truncates the result to 13
// fractional bits (published model of the hardware, MMA-Sim; confirmed on an H200 for zero products, shared prototypes).
#pragma once
#include "numerics/format.hpp"

namespace flamia::numerics {

enum class Accumulator : std::uint8_t { fp32, hopper13 };

inline constexpr int kHopperGroup = 32;  // products per instruction
inline constexpr int kHopperFractionBits = 13;

namespace detail {
/// Integer significand and exponent of a finite float: x = significand * 2^(exponent - 23). Zero has significand 0.
FLAMIA_FN void split(float x, std::int64_t& significand, int& exponent) {
  const std::uint32_t u = bits_of(x);
  const int biased = static_cast<int>(u >> 23 & 0xffu);
  exponent = (biased == 0 ? 1 : biased) - 127;
  significand = static_cast<std::int64_t>((u & 0x7fffffu) | (biased == 0 ? 0u : 0x800000u));
  if (u >> 31) significand = -significand;
}

FLAMIA_FN std::int64_t shift_toward_zero(std::int64_t v, int shift) {
  if (shift >= 0) return v << shift;
  if (shift < -62) return 0;
  const std::int64_t magnitude = (v < 0 ? -v : v) >> -shift;
  return v < 0 ? -magnitude : magnitude;
}
}  // namespace detail

/// One instruction's sum: c + sum of a[k * a_stride] * b[k * b_stride], k < n <= 32; a and b hold values of 8-bit codes (FP32, exact).
/// Products of subnormal codes keep the exponent of the codes' own subnormal range, as the hardware does (-6 for E4M3).
FLAMIA_FN float hopper_dot(float c, const float* a, std::int64_t a_stride, const float* b, std::int64_t b_stride, int n) {
  constexpr int kLeast = -6;  // exponent of the least normal E4M3 number
  std::int64_t significand[kHopperGroup + 1];
  int exponent[kHopperGroup + 1];
  int top = -1000;
  for (int k = 0; k <= n; ++k) {
    std::int64_t s = 0, t = 0;
    int e = 0, f = 0;
    if (k == n) {
      detail::split(c, s, e);
      significand[k] = s;
      exponent[k] = e;
    } else {
      detail::split(a[k * a_stride], s, e);
      detail::split(b[k * b_stride], t, f);
      // codes have 4 significand bits: move subnormal codes to the exponent of their format
      if (e < kLeast) s = detail::shift_toward_zero(s, e - kLeast), e = kLeast;
      if (f < kLeast) t = detail::shift_toward_zero(t, f - kLeast), f = kLeast;
      significand[k] = (s >> 12) * (t >> 12) * 2;  // value = significand * 2^(e + f - 23): 11 + 11 + 1 = 23 fractional bits
      exponent[k] = e + f;
    }
    if (significand[k] != 0 && exponent[k] > top) top = exponent[k];
  }
  if (top == -1000) return 0.f;
  std::int64_t sum = 0;  // in units of 2^(top - 13)
  for (int k = 0; k <= n; ++k)
    if (significand[k] != 0) sum += detail::shift_toward_zero(significand[k], exponent[k] - top + kHopperFractionBits - 23);
  if (sum == 0) return 0.f;
  std::uint64_t magnitude = static_cast<std::uint64_t>(sum < 0 ? -sum : sum);
  int lead = 0;
  while (magnitude >> (lead + 1)) ++lead;
  if (lead > kHopperFractionBits) magnitude = magnitude >> (lead - kHopperFractionBits) << (lead - kHopperFractionBits);
  const float value = static_cast<float>(magnitude);  // at most 14 significant bits: exact
  const int e = top - kHopperFractionBits;            // e + lead is in FP32's normal range for E4M3 operands and FP32 C
  const float scaled = e >= -126 ? value * float_of(static_cast<std::uint32_t>(e + 127) << 23)
                                 : value * float_of(1u << 23) * float_of(static_cast<std::uint32_t>(e + 126 + 127) << 23);
  return sum < 0 ? -scaled : scaled;
}

}  // namespace flamia::numerics
