// SPDX-License-Identifier: Apache-2.0
#include "numerics/exp2.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace flamia::numerics {
namespace {

/// Calls check(x) for floats from -126 to 128, evenly (a prime step in units of 2^-20) and around the integers and the ends.
template <class Check>
void sweep(Check check) {
  for (std::int64_t i = -126ll << 20; i < 128ll << 20; i += 97) check(static_cast<float>(i) * 0x1p-20f);
  for (int n = -125; n < 128; ++n)
    for (const float x : {static_cast<float>(n), static_cast<float>(n) - 0.5f})
      for (const float y : {std::nextafter(x, -1e9f), x, std::nextafter(x, 1e9f)}) check(y);
  for (int e = -149; e < -20; ++e) check(std::ldexp(1.f, e)), check(-std::ldexp(1.f, e));
}

double units_in_last_place(float y, double exact) { return std::fabs(y - exact) / std::ldexp(1.0, std::ilogb(exact) - 23); }

template <class Function>
double greatest_relative_error(Function f) {
  double greatest = 0;
  sweep([&](float x) { greatest = std::max(greatest, std::fabs(f(x) / std::exp2(static_cast<double>(x)) - 1)); });
  return greatest;
}

TEST(Exp2, ReferenceIsWithinOneUnit) {
  double greatest = 0;
  sweep([&](float x) {
    if (x > -126.f && x < 128.f)
      greatest = std::max(greatest, units_in_last_place(exp2_reference(x), std::exp2(static_cast<double>(x))));
  });
  EXPECT_LE(greatest, 1.0);
  EXPECT_GT(greatest, 0.4);  // the measure itself sees rounding
}

TEST(Exp2, ReferenceIsExactAtIntegers) {
  for (int n = -125; n < 128; ++n) EXPECT_EQ(exp2_reference(static_cast<float>(n)), std::ldexp(1.f, n));
}

TEST(Exp2, PolynomialsKeepTheirBounds) {
  const auto within = [](double error, float bound) {
    EXPECT_LE(error, static_cast<double>(bound));
    EXPECT_GT(error, static_cast<double>(bound) * 0.8);  // and the bound is no wide one: 20 % less fails
  };
  const auto inside = [](auto f) {
    return [f](float x) { return x >= -125.f && x < 128.f ? f(x) : static_cast<float>(std::exp2(static_cast<double>(x))); };
  };
  within(greatest_relative_error(inside([](float x) { return exp2_polynomial<2>(x); })), kExp2PolynomialBound<2>);
  within(greatest_relative_error(inside([](float x) { return exp2_polynomial<3>(x); })), kExp2PolynomialBound<3>);
  within(greatest_relative_error(inside([](float x) { return exp2_polynomial<4>(x); })), kExp2PolynomialBound<4>);
}

TEST(Exp2, ApproximationsFromTheBits) {
  double mitchell_low = 1, mitchell_high = -1, schraudolph_low = 1, schraudolph_high = -1;
  for (float x = -100.f; x < 100.f; x += 0x1p-9f) {
    const double exact = std::exp2(static_cast<double>(x));
    mitchell_low = std::min(mitchell_low, exp2_mitchell(x) / exact - 1);
    mitchell_high = std::max(mitchell_high, exp2_mitchell(x) / exact - 1);
    schraudolph_low = std::min(schraudolph_low, exp2_schraudolph(x) / exact - 1);
    schraudolph_high = std::max(schraudolph_high, exp2_schraudolph(x) / exact - 1);
  }
  EXPECT_GE(mitchell_low, -1e-6);  // never below
  EXPECT_NEAR(mitchell_high, 0.0615, 0.0001);
  EXPECT_NEAR(schraudolph_low, -0.0294, 0.0002);
  EXPECT_NEAR(schraudolph_high, 0.0303, 0.0002);
  for (int n = -120; n < 120; ++n) EXPECT_EQ(exp2_mitchell(static_cast<float>(n)), std::ldexp(1.f, n));
}

TEST(Exp2, EveryKindHasTheSameEnds) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const Exp2Kind kind : {Exp2Kind::hardware, Exp2Kind::polynomial, Exp2Kind::mitchell, Exp2Kind::schraudolph})
    for (const int degree : {2, 3, 4}) {
      const auto f = [&](float x) { return exp2_of(kind, degree, 16, 0, x); };
      for (const float x : {-126.f, -127.f, -500.f, -1e30f, -inf}) EXPECT_EQ(bits_of(f(x)), 0u) << x;
      for (const float x : {128.f, 1000.f, inf}) EXPECT_EQ(f(x), inf) << x;
      EXPECT_TRUE(is_nan(f(nan)));
      EXPECT_GT(f(-125.5f), 0.f);
    }
}

TEST(Exp2, ThePolynomialsShareOfTheKeys) {
  for (int share = 0; share <= 16; ++share) {
    int covered = 0;
    for (int key = 0; key < 128; ++key) covered += uses_polynomial(key, share);
    EXPECT_EQ(covered, share * 8);
  }
  const float x = -0.3f;  // where both differ
  EXPECT_NE(exp2_reference(x), exp2_polynomial<2>(x));
  for (int key = 0; key < 128; ++key)
    EXPECT_EQ(exp2_of(Exp2Kind::polynomial, 2, 4, key, x), uses_polynomial(key, 4) ? exp2_polynomial<2>(x) : exp2_reference(x));
}

}  // namespace
}  // namespace flamia::numerics
