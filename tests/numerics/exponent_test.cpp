// SPDX-License-Identifier: Apache-2.0
#include "numerics/exponent.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace flamia::numerics {
namespace {

template <MiniFloat F>
struct Format {
  static constexpr MiniFloat kFormat = F;
};
template <class F>
class Exponents : public testing::Test {};
using AllFormats = testing::Types<Format<kE4M3>, Format<kE5M2>, Format<kE2M1>, Format<kE3M2>, Format<kE2M3>>;
TYPED_TEST_SUITE(Exponents, AllFormats);

/// Positive finite floats: random bits, powers of two and multiples of the largest value with their neighbours, subnormals.
template <MiniFloat F, class Check>
void for_magnitudes(Check check) {
  std::mt19937 bits(3);
  for (int i = 0; i < 100000; ++i) {
    const float x = abs_of(float_of(static_cast<std::uint32_t>(bits())));
    if (is_finite(x)) check(x);
  }
  for (int e = -149; e < 128; ++e)
    for (const float centre : {std::ldexp(1.f, e), std::ldexp(decode<F>(F.largest), e)})
      for (const float x : {std::nextafter(centre, 0.f), centre, std::nextafter(centre, 3e38f)})
        if (is_finite(x) && x > 0.f) check(x);
}

/// Least e >= -127 with amax <= largest * 2^e, found by search in long double.
template <MiniFloat F>
int least_exponent(float amax) {
  int e = kLeastExponent;
  while (static_cast<long double>(amax) > std::ldexp(static_cast<long double>(decode<F>(F.largest)), e)) ++e;
  return e;
}

TYPED_TEST(Exponents, CeilIsTheLeastAtWhichNothingSaturates) {
  static constexpr MiniFloat f = TypeParam::kFormat;
  for_magnitudes<f>([](float x) { ASSERT_EQ(ceil_exponent<f>(x), least_exponent<f>(x)) << x; });
  EXPECT_EQ(ceil_exponent<f>(0.f), kLeastExponent);
}

TYPED_TEST(Exponents, FloorIsTheOcpRule) {
  static constexpr MiniFloat f = TypeParam::kFormat;
  const int emax = std::ilogb(decode<f>(f.largest));
  for_magnitudes<f>([emax](float x) { ASSERT_EQ(floor_exponent<f>(x), std::max(std::ilogb(x) - emax, kLeastExponent)) << x; });
  EXPECT_EQ(floor_exponent<f>(0.f), kLeastExponent);
}

// Control: the floor rule must be caught by the definition of ceil, and one exponent too many too.
TYPED_TEST(Exponents, ControlOtherRulesAreCaught) {
  static constexpr MiniFloat f = TypeParam::kFormat;
  int floor_differs = 0, more_differs = 0;
  for_magnitudes<f>([&](float x) {
    floor_differs += floor_exponent<f>(x) != least_exponent<f>(x);
    more_differs += ceil_exponent<f>(x) + 1 != least_exponent<f>(x);
  });
  EXPECT_GT(floor_differs, 100);
  EXPECT_GT(more_differs, 100000);
}

TYPED_TEST(Exponents, EveryElementFitsAtTheCeilExponent) {
  static constexpr MiniFloat f = TypeParam::kFormat;
  for_magnitudes<f>([](float x) {
    const int e = ceil_exponent<f>(x);
    const float scaled = mul(x, pow2(-e));
    ASSERT_LE(scaled, decode<f>(f.largest)) << x;
    if (e > kLeastExponent) {
      ASSERT_GT(2.f * scaled, decode<f>(f.largest)) << x;
    }
  });
}

TEST(PowersOfTwo, AreExact) {
  for (int e = -149; e <= 127; ++e) EXPECT_EQ(static_cast<double>(pow2(e)), std::ldexp(1.0, e)) << e;
}

TEST(PowersOfTwo, TwoFactorsRoundAsOne) {
  std::mt19937 bits(5);
  for (int i = 0; i < 200000; ++i) {
    const float x = float_of(static_cast<std::uint32_t>(bits()));
    const int e = static_cast<int>(bits() % 505) - 252;
    if (!is_finite(x)) continue;
    const double exact = std::ldexp(static_cast<double>(x), e);
    const float once = static_cast<float>(exact), scaled = scale_pow2(x, e);
    // one rounding unless the result is subnormal; there a second one may add half a unit
    if (std::fabs(exact) >= 0x1p-126) {
      ASSERT_EQ(bits_of(scaled), bits_of(once)) << x << " * 2^" << e;
    } else {
      ASSERT_LE(std::fabs(static_cast<double>(scaled) - exact), 0x1p-149) << x << " * 2^" << e;
    }
  }
}

TEST(Ue8m0, BytesAreExponents) {
  for (int e = -127; e <= 127; ++e) EXPECT_EQ(decode_ue8m0(encode_ue8m0(e)), e);
  EXPECT_EQ(encode_ue8m0(0), 127);
  EXPECT_EQ(decode_ue8m0(kFlagged), 0);
}

TEST(Nvfp4Scale, RoundsAndGuardsZero) {
  EXPECT_EQ(decode<kE4M3>(nvfp4_scale(6.f, 6.f, 1.f)), 1.f);
  EXPECT_EQ(decode<kE4M3>(nvfp4_scale(6.f, 4.f, 1.f)), 1.5f);
  EXPECT_EQ(decode<kE4M3>(nvfp4_scale(6.f, 6.f, 0.25f)), 4.f);
  EXPECT_EQ(nvfp4_scale(0.f, 6.f, 1.f), 0u);
  EXPECT_EQ(nvfp4_scale(6e-4f, 6.f, 1.f), 0u);  // 2^-13.3: below half of the least subnormal 2^-9
  EXPECT_EQ(decode<kE4M3>(nvfp4_scale(1e9f, 6.f, 1.f)), 448.f);
}

}  // namespace
}  // namespace flamia::numerics
