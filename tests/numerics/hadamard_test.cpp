// SPDX-License-Identifier: Apache-2.0
#include "numerics/hadamard.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace flamia::numerics {
namespace {

template <class D>
class Rotation : public testing::Test {};
using Dims = testing::Types<std::integral_constant<int, 64>, std::integral_constant<int, 128>>;
TYPED_TEST_SUITE(Rotation, Dims);

std::vector<float> random_row(int d, unsigned seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(d));
  for (float& v : x) v = normal(bits);
  return x;
}

/// The definition in numerics.md §5, written out: signs, then stages h; every pair (c, c + h), bit h of c clear.
void negate_by_definition(std::vector<float>& x) {
  static const char kPi[] = "243F6A8885A308D313198A2E03707344";
  for (std::size_t c = 0; c < x.size(); ++c) {
    const int digit = std::stoi(std::string(1, kPi[c / 4]), nullptr, 16);
    if (digit >> (3 - c % 4) & 1) x[c] = -x[c];
  }
}
void add_by_definition(std::vector<float>& x, const std::vector<std::size_t>& stages) {
  for (const std::size_t h : stages)
    for (std::size_t c = 0; c < x.size(); ++c) {
      if (c & h) continue;
      const float a = x[c], b = x[c + h];
      x[c] = a + b;
      x[c + h] = a - b;
    }
  const float norm = x.size() == 128 ? std::bit_cast<float>(0x3DB504F3u) : 0.125f;
  for (float& v : x) v *= norm;
}
/// Stages 1, 2, 4 ... d/2, from the one at `first` on and around.
std::vector<float> rotated_by_definition(std::vector<float> x, std::size_t first = 0) {
  std::vector<std::size_t> stages;
  for (std::size_t h = 1; h < x.size(); h *= 2) stages.push_back(h);
  std::rotate(stages.begin(), stages.begin() + static_cast<std::ptrdiff_t>(first), stages.end());
  negate_by_definition(x);
  add_by_definition(x, stages);
  return x;
}
/// The inverse: stages 1, 8, 16 ... d/2, 2, 4, signs.
std::vector<float> turned_back_by_definition(std::vector<float> x) {
  std::vector<std::size_t> stages{1};
  for (std::size_t h = 8; h < x.size(); h *= 2) stages.push_back(h);
  stages.insert(stages.end(), {2, 4});
  add_by_definition(x, stages);
  negate_by_definition(x);
  return x;
}

TYPED_TEST(Rotation, IsBitForBitTheDefinition) {
  constexpr int d = TypeParam::value;
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::vector<float> x = random_row(d, seed);
    const std::vector<float> expected = rotated_by_definition(x);
    rotate<d>(x.data());
    for (int c = 0; c < d; ++c)
      ASSERT_EQ(bits_of(x[static_cast<std::size_t>(c)]), bits_of(expected[static_cast<std::size_t>(c)])) << c;
  }
}

TYPED_TEST(Rotation, BackIsBitForBitTheDefinition) {
  constexpr int d = TypeParam::value;
  int like_forth = 0;
  for (unsigned seed = 0; seed < 200; ++seed) {
    const std::vector<float> x = random_row(d, seed);
    std::vector<float> back = x, forth = x;
    rotate_back<d>(back.data());
    ASSERT_EQ(back, turned_back_by_definition(x)) << seed;
    butterfly<d>(forth.data());
    negate_by_definition(forth);
    like_forth += back == forth;
  }
  EXPECT_LT(like_forth, 100);  // control: the other order of the stages has other bits
}

// Control: another order of the stages is the same matrix but other bits.
TYPED_TEST(Rotation, ControlAnotherOrderIsCaught) {
  int differing = 0;
  for (unsigned seed = 0; seed < 20; ++seed) {
    const std::vector<float> x = random_row(TypeParam::value, seed);
    differing += rotated_by_definition(x) != rotated_by_definition(x, 1);
  }
  EXPECT_GT(differing, 10);
}

TYPED_TEST(Rotation, IsTheSylvesterMatrixTimesTheSigns) {
  constexpr int d = TypeParam::value;
  for (int c = 0; c < d; ++c) {  // columns: unit vectors are rotated without rounding
    std::vector<float> x(d, 0.f);
    x[static_cast<std::size_t>(c)] = 1.f;
    rotate<d>(x.data());
    const float sign = rotation_sign(c) ? -1.f : 1.f;
    for (int r = 0; r < d; ++r) {
      const bool odd = std::popcount(static_cast<unsigned>(r & c)) % 2 != 0;  // H[r][c] = (-1)^popcount(r & c)
      ASSERT_EQ(x[static_cast<std::size_t>(r)], sign * (odd ? -1.f : 1.f) * rotation_norm(d)) << r << " " << c;
    }
  }
}

TYPED_TEST(Rotation, BackUndoesItAndScoresAreInvariant) {
  constexpr int d = TypeParam::value;
  for (unsigned seed = 0; seed < 50; ++seed) {
    const std::vector<float> q = random_row(d, seed), k = random_row(d, seed + 1000);
    std::vector<float> rotated_q = q, rotated_k = k;
    rotate<d>(rotated_q.data());
    rotate<d>(rotated_k.data());
    const double score = std::inner_product(q.begin(), q.end(), k.begin(), 0.0);
    const double norm =
        std::sqrt(std::inner_product(q.begin(), q.end(), q.begin(), 0.0) * std::inner_product(k.begin(), k.end(), k.begin(), 0.0));
    const double bound = 1e-6 * norm;  // 7 stages and a product of relative 2^-24 each, random signs
    EXPECT_NEAR(std::inner_product(rotated_q.begin(), rotated_q.end(), rotated_k.begin(), 0.0), score, bound);
    // control: one operand rotated, the other not
    EXPECT_GT(std::fabs(std::inner_product(rotated_q.begin(), rotated_q.end(), k.begin(), 0.0) - score), bound);
    rotate_back<d>(rotated_q.data());
    for (int c = 0; c < d; ++c) ASSERT_NEAR(rotated_q[static_cast<std::size_t>(c)], q[static_cast<std::size_t>(c)], 4e-6f);
  }
}

TEST(RotationSigns, AreTheBitsOfPi) {
  // pi - 3 = 0x0.243F6A88 85A308D3 13198A2E 03707344...; the leading 50 bits from the double nearest to pi
  const double fraction = 3.141592653589793 - 3.0;
  for (int c = 0; c < 48; ++c)
    EXPECT_EQ(rotation_sign(c) != 0, (static_cast<std::uint64_t>(std::ldexp(fraction, c + 1)) & 1u) != 0) << c;
  EXPECT_EQ(rotation_norm(64), 0.125f);
  EXPECT_EQ(rotation_norm(128), static_cast<float>(1.0 / std::sqrt(128.0)));
}

}  // namespace
}  // namespace flamia::numerics
