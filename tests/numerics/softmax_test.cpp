// SPDX-License-Identifier: Apache-2.0
// The row reference: properties that numerics.md §8 and §9 promise, on random rows taken tile by tile.
#include "numerics/softmax.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "numerics/format.hpp"

namespace flamia::numerics {
namespace {

constexpr float kRoundedMost = 448.f;

/// Sum of the row's codes at reference r and base B; exact.
float code_sum(const std::vector<float>& t, float r, int base) {
  float sum = 0.f;
  for (const float x : t) sum += round_e4m3(exp2_reference(x - r + static_cast<float>(base)));
  return sum;
}
float greatest(const std::vector<float>& t) { return *std::max_element(t.begin(), t.end()); }
int excess(const std::vector<float>& t) { return tilesum_excess(code_sum(t, phase32_first(greatest(t)), 8)); }

/// A row of one tile: from flat to peaked, at a random level.
std::vector<float> random_tile(std::mt19937& bits, int seen) {
  std::uniform_real_distribution<float> level(-40.f, 40.f), spread_log(-6.f, 5.f);
  std::normal_distribution<float> normal;
  const float centre = level(bits), spread = std::exp2(spread_log(bits));
  std::vector<float> t(static_cast<std::size_t>(seen));
  for (float& x : t) x = centre + spread * normal(bits);
  return t;
}
int random_count(std::mt19937& bits) { return 1 + static_cast<int>(bits() % 128); }

TEST(Phase32, TheFirstReferenceIsTheMaximumOnTheGrid) {
  std::mt19937 bits(1);
  for (int i = 0; i < 10000; ++i) {
    const float x = greatest(random_tile(bits, random_count(bits)));
    const float m = phase32_first(x);
    EXPECT_EQ(m, std::ceil(static_cast<double>(x) * 32) / 32);
    EXPECT_GE(m, x);
    EXPECT_LT(m - x, 1.f / 32 + 1e-5f);
  }
  EXPECT_EQ(phase32_first(70000.3f), 70000.3f);  // no 1/32 left up there
}

TEST(Phase32, LaterMovesAreWholeStepsUpwardsAndOnlyWhenNeeded) {
  std::mt19937 bits(2);
  for (int i = 0; i < 2000; ++i) {
    float m = phase32_first(greatest(random_tile(bits, 128)));
    for (int tile = 0; tile < 10; ++tile) {
      const float x = greatest(random_tile(bits, 128));
      const float next = phase32_next(m, x);
      EXPECT_EQ(std::fmod(static_cast<double>(next) - m, 1.0), 0.0);
      EXPECT_GE(next, x);
      if (x <= m) {
        EXPECT_EQ(next, m);
      } else {
        EXPECT_LT(next - x, 1.f);
      }
      m = next;
    }
  }
  EXPECT_EQ(phase32_next(0.f, 70000.5f), 70000.5f);
  EXPECT_EQ(phase32_next(80000.f, 70000.f), 80000.f);
}

TEST(Phase32, CodesStayInRange) {
  std::mt19937 bits(3);
  for (int i = 0; i < 5000; ++i) {
    const std::vector<float> t = random_tile(bits, random_count(bits));
    const float m = phase32_first(greatest(t));
    EXPECT_LE(exp2_reference(greatest(t) - m + 8.f), 256.f);
    EXPECT_GE(exp2_reference(greatest(t) - m + 8.f), 250.f);  // 2^(8 - 1/32) = 250.5
  }
}

TEST(Phase32, RescalingIsExact) {
  for (float step = 0.f; step < 100.f; step += 1.f)
    EXPECT_EQ(rescale(3.f + 5.f / 32, 3.f + 5.f / 32 + step, false), std::exp2(-step));
  EXPECT_EQ(rescale(1.f, 2.f, true), 0.f);
}

TEST(TileSum, AFirstTileIsNeverRejected) {
  std::mt19937 bits(4);
  for (int i = 0; i < 20000; ++i) {
    const int seen = random_count(bits);
    const std::vector<float> t = random_tile(bits, seen);
    for (const bool more : {false, true}) {
      const float r = tilesum_first(greatest(t), excess(t), seen, more);
      EXPECT_LT(code_sum(t, r, 7), 150.f);
      EXPECT_GE(r, greatest(t));
      EXPECT_EQ(std::fmod(static_cast<double>(r) - phase32_first(greatest(t)), 1.0), 0.0);
    }
  }
}

TEST(TileSum, AfterARaiseTheSumIsBelow150AndTheStepIsWhole) {
  std::mt19937 bits(5);
  int raised = 0, most_below = 0;
  for (int i = 0; i < 20000; ++i) {
    const std::vector<float> first = random_tile(bits, 128), later = random_tile(bits, random_count(bits));
    const float r = tilesum_first(greatest(first), excess(first), 128, true);
    if (code_sum(later, r, 7) < kTileSumLimit) continue;
    ++raised;
    const float next = tilesum_next(r, greatest(later), excess(later));
    EXPECT_EQ(std::fmod(static_cast<double>(next) - r, 1.0), 0.0);
    EXPECT_GE(next - r, 2.f);
    EXPECT_LT(code_sum(later, next, 7), 150.f) << "row of " << later.size();
    most_below += code_sum(later, next, 7) < 20.f;
  }
  EXPECT_GT(raised, 1000);
  EXPECT_LT(most_below, raised / 2);  // the range is not thrown away either
}

TEST(TileSum, AnAcceptedTileDidNotSaturate) {
  std::mt19937 bits(6);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    const std::vector<float> first = random_tile(bits, 128), later = random_tile(bits, random_count(bits));
    const float r = tilesum_first(greatest(first), excess(first), 128, true);
    if (code_sum(later, r, 7) >= kTileSumLimit) continue;
    ++accepted;
    EXPECT_LT(exp2_reference(greatest(later) - r + 7.f), kRoundedMost);
  }
  EXPECT_GT(accepted, 1000);
}

// Control: without the excess z a flat row's sum passes the bound.
TEST(TileSum, ControlWithoutTheExcessTheBoundFails) {
  const std::vector<float> flat(128, 3.f);
  EXPECT_EQ(excess(flat), 7);
  EXPECT_GE(code_sum(flat, tilesum_first(3.f, 0, 128, false), 7), 150.f);
  EXPECT_LT(code_sum(flat, tilesum_first(3.f, excess(flat), 128, false), 7), 150.f);
}

TEST(TileSum, SumsAndRoom) {
  for (int n = 1; n < 40000; ++n)
    EXPECT_EQ(ceil_log2(static_cast<float>(n)), static_cast<int>(std::ceil(std::log2(static_cast<double>(n))))) << n;
  EXPECT_EQ(tilesum_excess(0.f), 0);
  EXPECT_EQ(tilesum_excess(256.f), 0);
  EXPECT_EQ(tilesum_excess(257.f), 1);
  for (int seen = 1; seen <= 128; ++seen) EXPECT_EQ(tilesum_first(0.f, 0, seen, true), std::ceil(std::log2(128.0 / seen))) << seen;
  EXPECT_EQ(tilesum_first(0.f, 0, 1, false), 0.f);
}

TEST(Lse, IsNatural) {
  for (float m = -50.f; m < 50.f; m += 0.7f)
    for (float log2_l = -10.f; log2_l < 20.f; log2_l += 1.3f)
      EXPECT_NEAR(natural_lse(m, log2_l), (static_cast<double>(m) + log2_l) * 0.6931471805599453, 1e-5);
  EXPECT_GT(std::fabs(natural_lse(10.f, 0.f) - 10.f), 1.f);  // control: not in base 2
}

}  // namespace
}  // namespace flamia::numerics
