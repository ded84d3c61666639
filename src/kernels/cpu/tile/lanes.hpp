// SPDX-License-Identifier: Apache-2.0
// What happens to one key's row of a tile: 128 lanes, one a query. Loops over `width` lanes (a multiple of 16) that the compiler
// vectorises; every lane is computed alone, in IEEE operations.
#pragma once
#include "kernels/cpu/call.hpp"
#include "kernels/cpu/tile/simd.hpp"
#include "numerics/exp2.hpp"
#include "numerics/exponent.hpp"

namespace flamia::cpu::FLAMIA_ISA {

/// Floats as integers of the same order; NaN below everything.
FLAMIA_FN std::int32_t ordered(float x) {
  const auto bits = static_cast<std::int32_t>(numerics::bits_of(x));
  const std::int32_t order = bits ^ ((bits >> 31) & 0x7fffffff);
  return numerics::is_nan(x) ? INT32_MIN : order;
}
FLAMIA_FN float from_ordered(std::int32_t order) {
  return numerics::float_of(static_cast<std::uint32_t>(order ^ ((order >> 31) & 0x7fffffff)));
}

/// Bits of |x|, 0 for NaN: maxima of magnitudes are maxima of these.
FLAMIA_FN std::uint32_t magnitude_bits(float x) {
  const std::uint32_t bits = numerics::bits_of(x) & 0x7fffffffu;
  return bits > 0x7f800000u ? 0u : bits;
}

/// x * 2^e in two factors, for |e| up to 252.
FLAMIA_FN float times_pow2(float x, int e) {
  const int clamped = numerics::max_of(-252, numerics::min_of(e, 252));
  const int low = clamped >> 1;
  const float a = numerics::float_of(static_cast<std::uint32_t>(low + 127) << 23);
  const float b = numerics::float_of(static_cast<std::uint32_t>(clamped - low + 127) << 23);
  return numerics::mul(numerics::mul(x, a), b);
}

/// x[i] = 2^x[i] by the recipe's kind; `key` is counted inside the tile.
static void exp2_lanes(const Settings& s, int key, float* x, int width) {
  using numerics::Exp2Kind;
  Exp2Kind kind = s.exp2;
  if (kind == Exp2Kind::polynomial && !numerics::uses_polynomial(key, s.polynomial_sixteenths)) kind = Exp2Kind::hardware;
  switch (kind) {
    case Exp2Kind::hardware:
      for (int i = 0; i < width; ++i) x[i] = numerics::exp2_reference(x[i]);
      break;
    case Exp2Kind::polynomial:
      if (s.polynomial_degree == 2)
        for (int i = 0; i < width; ++i) x[i] = numerics::exp2_polynomial<2>(x[i]);
      else if (s.polynomial_degree == 3)
        for (int i = 0; i < width; ++i) x[i] = numerics::exp2_polynomial<3>(x[i]);
      else
        for (int i = 0; i < width; ++i) x[i] = numerics::exp2_polynomial<4>(x[i]);
      break;
    case Exp2Kind::mitchell:
      for (int i = 0; i < width; ++i) x[i] = numerics::exp2_mitchell(x[i]);
      break;
    case Exp2Kind::schraudolph:
      for (int i = 0; i < width; ++i) x[i] = numerics::exp2_schraudolph(x[i]);
      break;
  }
}

/// code[i] = value of the code nearest to x[i]. NaN stays NaN, also where the type has none: it marks a flagged pair.
static void round_lanes(Element element, const float* x, float* code, int width) {
  switch (element) {
    case Element::bf16:
      for (int i = 0; i < width; ++i) code[i] = numerics::round_bf16(x[i]);
      break;
    case Element::e2m1:
      for (int i = 0; i < width; ++i) {
        const float rounded = numerics::decode<numerics::kE2M1>(numerics::encode<numerics::kE2M1>(x[i]));
        code[i] = numerics::is_nan(x[i]) ? x[i] : rounded;
      }
      break;
    case Element::int8:
      for (int i = 0; i < width; ++i) {
        const float rounded = numerics::decode_int8(numerics::encode_int8(x[i]));
        code[i] = numerics::is_nan(x[i]) ? x[i] : rounded;
      }
      break;
    default:
      for (int i = 0; i < width; ++i) code[i] = numerics::round_e4m3(x[i]);
      break;
  }
}

/// Value that lies beyond the largest code by more than rounding covers.
FLAMIA_FN bool saturates(Element element, float x) {
  const float limit = element == Element::e4m3   ? 464.f
                      : element == Element::e2m1 ? 7.f
                      : element == Element::int8 ? 127.5f
                                                 : numerics::infinity();
  return numerics::abs_of(x) > limit;
}

constexpr float largest_code(Element element) {
  return element == Element::e4m3 ? 448.f : element == Element::e5m2 ? 57344.f : element == Element::e2m1 ? 6.f : 127.f;
}

}  // namespace flamia::cpu::FLAMIA_ISA
