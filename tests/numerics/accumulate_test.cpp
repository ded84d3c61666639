// SPDX-License-Identifier: Apache-2.0
// The accumulator model against a plain re-implementation of its published rule in double precision: significands as doubles, no bits.
#include "numerics/accumulate.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace flamia::numerics {
namespace {

struct Parts {
  double significand;
  int exponent;
};

/// x = significand * 2^exponent with 1 <= |significand| < 2, or less at the least exponent; zero counts in no maximum.
Parts parts_of(double x, int least) {
  if (x == 0) return {0, -999};
  int e = 0;
  double s = std::frexp(x, &e) * 2;
  --e;
  if (e < least) s = std::ldexp(s, e - least), e = least;
  return {s, e};
}

double model(double c, const std::vector<float>& a, const std::vector<float>& b, int fraction_bits = 13, int output_bits = 13) {
  std::vector<Parts> terms{parts_of(c, -126)};
  for (std::size_t k = 0; k < a.size(); ++k) {
    const Parts x = parts_of(a[k], -6), y = parts_of(b[k], -6);
    const double product = x.significand * y.significand;
    terms.push_back({product, product == 0 ? -999 : x.exponent + y.exponent});
  }
  int top = -999;
  for (const Parts& term : terms) top = std::max(top, term.exponent);
  if (top == -999) return 0;
  double sum = 0;
  for (const Parts& term : terms) sum += std::trunc(std::ldexp(term.significand, fraction_bits + term.exponent - top));
  const double total = std::ldexp(sum, top - fraction_bits);
  if (total == 0) return 0;
  const Parts rounded = parts_of(total, -126);
  return std::ldexp(std::trunc(std::ldexp(rounded.significand, output_bits)), rounded.exponent - output_bits);
}

/// Values of E4M3 codes: normal draws of a random size, so that subnormals and large values occur.
std::vector<float> codes(std::mt19937& bits, int n) {
  std::normal_distribution<float> normal;
  const float size = std::exp2(static_cast<float>(static_cast<int>(bits() % 18)) - 9.f);
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& v : x) v = bits() % 8 == 0 ? 0.f : round_e4m3(size * normal(bits));
  return x;
}

TEST(HopperAccumulator, IsThePublishedRule) {
  std::mt19937 bits(1);
  for (int i = 0; i < 50000; ++i) {
    const int n = 1 + static_cast<int>(bits() % 32);
    const std::vector<float> a = codes(bits, n), b = codes(bits, n);
    const float c = bits() % 4 == 0 ? 0.f : static_cast<float>(model(0, codes(bits, 32), codes(bits, 32)));
    ASSERT_EQ(hopper_dot(c, a.data(), 1, b.data(), 1, n), model(c, a, b)) << i;
  }
}

TEST(HopperAccumulator, ChainsAsTheRuleDoes) {
  std::mt19937 bits(2);
  for (int i = 0; i < 500; ++i) {
    float ours = 0.f;
    double theirs = 0;
    for (int step = 0; step < 16; ++step) {
      const std::vector<float> a = codes(bits, 32), b = codes(bits, 32);
      ours = hopper_dot(ours, a.data(), 1, b.data(), 1, 32);
      theirs = model(theirs, a, b);
      ASSERT_EQ(ours, theirs);
    }
  }
}

// Controls: FP32 addition and one fraction bit more are told apart.
TEST(HopperAccumulator, ControlOtherAccumulatorsAreCaught) {
  std::mt19937 bits(3);
  int fp32_differs = 0, bit_differs = 0;
  for (int i = 0; i < 1000; ++i) {
    const std::vector<float> a = codes(bits, 32), b = codes(bits, 32);
    const float ours = hopper_dot(0.f, a.data(), 1, b.data(), 1, 32);
    float plain = 0.f;
    for (std::size_t k = 0; k < 32; ++k) plain = fma(a[k], b[k], plain);
    fp32_differs += plain != ours;
    bit_differs += model(0, a, b, 14, 14) != ours;
  }
  EXPECT_GT(fp32_differs, 100);
  EXPECT_GT(bit_differs, 100);
}

TEST(HopperAccumulator, AZeroProductDoesNotRaiseTheExponent) {
  std::mt19937 bits(4);
  int control_differs = 0;
  for (int i = 0; i < 2000; ++i) {
    std::vector<float> a = codes(bits, 32), b = codes(bits, 32);
    for (std::size_t k = 0; k < 16; ++k) a[k] = 0.f;
    std::vector<float> with_large = b;
    for (std::size_t k = 0; k < 16; ++k) with_large[k] = 448.f;
    const float sum = hopper_dot(0.f, a.data(), 1, b.data(), 1, 32);
    ASSERT_EQ(bits_of(hopper_dot(0.f, a.data(), 1, with_large.data(), 1, 32)), bits_of(sum));
    a[0] = 0x1p-9f;  // control: the least code instead of zero
    control_differs += hopper_dot(0.f, a.data(), 1, with_large.data(), 1, 32) != sum;
  }
  EXPECT_GT(control_differs, 500);
}

TEST(HopperAccumulator, Strides) {
  std::mt19937 bits(5);
  const std::vector<float> a = codes(bits, 64), b = codes(bits, 96);
  std::vector<float> dense_a, dense_b;
  for (std::size_t k = 0; k < 32; ++k) dense_a.push_back(a[2 * k]), dense_b.push_back(b[3 * k]);
  EXPECT_EQ(hopper_dot(1.5f, a.data(), 2, b.data(), 3, 32), hopper_dot(1.5f, dense_a.data(), 1, dense_b.data(), 1, 32));
}

}  // namespace
}  // namespace flamia::numerics
