// SPDX-License-Identifier: Apache-2.0
// 2^x in FP32. The kind is a field of the recipe and the same in the forward and the backward pass: a backward pass with another
// kind sees other probabilities than the forward pass used, and training diverges.
//
// Every kind: x <= -126 -> +0 (as the GPU's ex2.approx.ftz flushes), -inf -> 0, x >= 128 -> +inf, NaN -> NaN.
#pragma once
#include "numerics/platform.hpp"

namespace flamia::numerics {

enum class Exp2Kind : std::uint8_t { hardware, polynomial, mitchell, schraudolph };

namespace detail {

/// Splits x = n + f, n integer, |f| <= 1/2, both exact; p(f) * 2^n with the range handled by selection.
template <class Polynomial>
FLAMIA_FN float exp2_split(float x, Polynomial polynomial) {
  const float clamped = x < -127.f ? -127.f : (x > 128.f ? 128.f : x);
  const float shifted = add(clamped, 12582912.f);  // 1.5 * 2^23: the low bits become round(x)
  const float n = add(shifted, -12582912.f);
  const float p = polynomial(add(clamped, -n));  // in [0.7, 1.5]
  const std::uint32_t step = (bits_of(shifted) - 0x4b400000u) << 23;
  float y = float_of(bits_of(p) + step);  // exponent added as an integer
  y = x <= -126.f ? 0.f : y;
  y = x >= 128.f ? infinity() : y;
  return is_nan(x) ? x : y;
}

}  // namespace detail

/// Reference: within 1 unit in the last place of 2^x (Taylor to degree 7, truncation 6e-9). The CPU uses it wherever the GPU uses its
/// special function unit (ex2.approx, 2 units); the two differ by less than a code except at rounding borders.
FLAMIA_FN float exp2_reference(float x) {
  return detail::exp2_split(x, [](float f) {
    float p = 1.52527336e-05f;
    p = fma(p, f, 1.54035297e-04f);
    p = fma(p, f, 1.33335579e-03f);
    p = fma(p, f, 9.61812865e-03f);
    p = fma(p, f, 5.55041097e-02f);
    p = fma(p, f, 2.40226507e-01f);
    p = fma(p, f, 6.93147182e-01f);
    return fma(p, f, 1.f);
  });
}

/// Greatest relative error of exp2_polynomial<Degree> for x >= -125, rounding included (asserted by the tests). Just above 2^-126 a
/// polynomial that falls short of 1 lands on a subnormal and may be off by twice as much.
template <int Degree>
inline constexpr float kExp2PolynomialBound = Degree == 2   ? 1.73e-3f
                                              : Degree == 3 ? 7.49e-5f
                                                            : 2.70e-6f;

/// Minimax polynomial in relative error on [-1/2, 1/2], Degree 2, 3 or 4, on the FP32 FMA pipe.
template <int Degree>
FLAMIA_FN float exp2_polynomial(float x) {
  static_assert(Degree >= 2 && Degree <= 4);
  return detail::exp2_split(x, [](float f) {
    if constexpr (Degree == 2) return fma(fma(0.23842894f, f, 0.703448f), f, 1.0004431f);
    if constexpr (Degree == 3) return fma(fma(fma(0.05517167f, f, 0.24261113f), f, 0.69326097f), f, 0.99992806f);
    return fma(fma(fma(fma(0.009570102f, f, 0.05591786f), f, 0.24024744f), f, 0.6931218f), f, 0.9999993f);
  });
}

namespace detail {
/// The line through powers of two: the bits of (x + 127 - lift) * 2^23 read as a float.
FLAMIA_FN float exp2_line(float x, float lift) {
  if (is_nan(x)) return x;
  if (x <= -126.f) return 0.f;
  if (x >= 128.f) return infinity();
  const float y = mul(add(x, 127.f - lift), 8388608.f);
  return float_of(static_cast<std::uint32_t>(y < 8388608.f ? 8388608.f : y));
}
}  // namespace detail

/// Mitchell: 2^floor(x) * (1 + frac(x)); at most 6.15 % too large, exact at integers. Inference only.
FLAMIA_FN float exp2_mitchell(float x) { return detail::exp2_line(x, 0.f); }
/// Schraudolph: the same line lowered by 0.04303566, which balances its relative error to about +-3 %. Inference only.
FLAMIA_FN float exp2_schraudolph(float x) { return detail::exp2_line(x, 0.04303566f); }

/// Which of a tile's 128 keys use the polynomial: keys are taken in groups of 8, `sixteenths` of the 16 groups, spread evenly.
FLAMIA_FN bool uses_polynomial(int key_in_tile, int sixteenths) { return key_in_tile / 8 % 16 * 7 % 16 < sixteenths; }

/// 2^x by a recipe's kind; `sixteenths` is the share of a tile's keys that `polynomial` covers (the rest is `hardware`).
FLAMIA_FN float exp2_of(Exp2Kind kind, int degree, int sixteenths, int key_in_tile, float x) {
  switch (kind) {
    case Exp2Kind::mitchell:
      return exp2_mitchell(x);
    case Exp2Kind::schraudolph:
      return exp2_schraudolph(x);
    case Exp2Kind::polynomial:
      if (!uses_polynomial(key_in_tile, sixteenths)) break;
      return degree == 2 ? exp2_polynomial<2>(x) : degree == 3 ? exp2_polynomial<3>(x) : exp2_polynomial<4>(x);
    case Exp2Kind::hardware:
      break;
  }
  return exp2_reference(x);
}

}  // namespace flamia::numerics
