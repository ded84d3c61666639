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

/// Sum of the row's codes at reference m; exact.
float code_sum(const std::vector<float>& t, float m) {
  float sum = 0.f;
  for (const float x : t) sum += round_e4m3(exp2_reference(x - m + static_cast<float>(kCodeExponent)));
  return sum;
}
float greatest(const std::vector<float>& t) { return *std::max_element(t.begin(), t.end()); }

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

/// A row under the rule of tilesum: its tiles in turn.
struct TileSumRow {
  float m = 0.f;
  bool fresh = true, careful = true;
  int rejections = 0;

  /// Sum of the codes that the tile ends with. may_be_freed: the tile is one of those that free rows, and more follow.
  float visit(const std::vector<float>& t, bool may_be_freed, bool settled = false) {
    const float before = m;
    if (!careful && code_sum(t, m) >= kTileSumLimit) careful = true, ++rejections;
    if (careful) m = fresh ? careful_first(greatest(t)) : careful_next(m, greatest(t));
    const float sum = code_sum(t, m);
    total = total * rescale(before, m, fresh) + sum;
    fresh = false;
    greatest_code = exp2_reference(greatest(t) - m + 8.f);
    rise = careful && may_be_freed ? tilesum_rise(m, sum, total, static_cast<int>(t.size()), settled) : 0;
    if (rise > 0) careful = false, m += static_cast<float>(rise), total = std::ldexp(total, -rise);
    return sum;
  }
  float greatest_code = 0.f, total = 0.f;
  int rise = 0;
};

TEST(TileSum, NothingSaturatesAndStepsAreWhole) {
  std::mt19937 bits(4);
  int freed = 0, rejected = 0;
  for (int i = 0; i < 5000; ++i) {
    TileSumRow row;
    row.visit(random_tile(bits, random_count(bits)), true);
    const float first = row.m;
    for (int tile = 0; tile < 8; ++tile) {
      const float before = row.m;
      row.visit(random_tile(bits, 128), tile < 7);
      EXPECT_LT(row.greatest_code, kRoundedMost);
      EXPECT_GE(row.m, before);
      EXPECT_EQ(std::fmod(static_cast<double>(row.m) - first, 1.0), 0.0);
      freed += row.rise > 0;
    }
    rejected += row.rejections;
  }
  EXPECT_GT(freed, 1000);
  EXPECT_GT(rejected, 1000);
}

TEST(TileSum, AFreedRowHasRoomForGreaterKeys) {
  std::mt19937 bits(5);
  int freed = 0;
  for (int i = 0; i < 5000; ++i) {
    const std::vector<float> t = random_tile(bits, 128);
    TileSumRow row;
    if (row.visit(t, true) <= kFlatSum) continue;
    ++freed;
    EXPECT_FALSE(row.careful);
    EXPECT_LT(code_sum(t, row.m), 140.f);  // 2^7 and what rounding adds
    EXPECT_GE(row.m - greatest(t), 7.f);
    EXPECT_LT(row.m - greatest(t), 8.1f);  // and the range is not thrown away
  }
  EXPECT_GT(freed, 1000);
}

TEST(TileSum, FlatRowsAreFreeAndPeakedOnesCareful) {
  std::mt19937 bits(6);
  std::normal_distribution<float> normal;
  const auto free_share = [&](float spread) {
    int free = 0;
    for (int i = 0; i < 1000; ++i) {
      TileSumRow row;
      for (int tile = 0; tile < 3; ++tile) {
        std::vector<float> t(128);
        for (float& x : t) x = spread * normal(bits);
        row.visit(t, true);
      }
      free += !row.careful;
    }
    return free / 1000.0;
  };
  EXPECT_GT(free_share(1.44f), 0.99);  // logits N(0, 1)
  EXPECT_LT(free_share(8.7f), 0.02);   // logits N(0, 6^2)
}

/// Settled rows are free however peaked they are, and a key far above all others makes them careful again.
TEST(TileSum, SettledRowsAreFreeUntilAKeyExceedsTheirRoom) {
  std::mt19937 bits(7);
  std::normal_distribution<float> normal;
  int failed = 0;
  for (int i = 0; i < 200; ++i) {
    TileSumRow row;
    std::vector<float> t(128);
    for (float& x : t) x = 8.7f * normal(bits);
    row.visit(t, false);
    EXPECT_TRUE(row.careful);
    const float top = row.m;
    row.visit(t, true, true);
    EXPECT_FALSE(row.careful);
    EXPECT_GE(row.m - top, 6.f);
    t[5] = row.m + 0.5f;  // the code would be 362
    row.visit(t, false);
    EXPECT_FALSE(row.careful);
    t[5] = row.m + 1.f;  // and 512
    row.visit(t, false);
    EXPECT_TRUE(row.careful);
    failed += row.rejections;
  }
  EXPECT_EQ(failed, 200);
}

TEST(TileSum, RiseAndItsLimits) {
  for (int n = 1; n < 40000; ++n)
    EXPECT_EQ(ceil_log2(static_cast<float>(n)), static_cast<int>(std::ceil(std::log2(static_cast<double>(n))))) << n;
  EXPECT_EQ(tilesum_rise(0.f, 640.f, 640.f, 128, false), 0);
  EXPECT_EQ(tilesum_rise(0.f, 641.f, 641.f, 128, false), 6);
  EXPECT_EQ(tilesum_rise(0.f, 10.f, 641.f, 128, false), 6);  // tiles before count
  EXPECT_EQ(tilesum_rise(0.f, 10.f, 640.f, 128, true), 7);
  EXPECT_EQ(tilesum_rise(0.f, 0.f, 0.f, 128, true), 0);  // nothing seen
  EXPECT_EQ(tilesum_rise(0.f, 8193.f, 8193.f, 128, false), 7);
  EXPECT_EQ(tilesum_rise(0.f, 16384.f, 16384.f, 128, false), 7);
  EXPECT_EQ(tilesum_rise(0.f, 8192.f, 8192.f, 64, false), 7);  // as many keys again may follow
  EXPECT_EQ(tilesum_rise(0.f, 4096.f, 4096.f, 32, false), 7);
  EXPECT_EQ(tilesum_rise(0.f, 641.f, 641.f, 31, false), 0);
  EXPECT_EQ(tilesum_rise(-kGridLimit, 16384.f, 16384.f, 128, true), 0);  // off the grid a row stays careful
  EXPECT_TRUE(may_free(9, 9) && may_free(9, 11) && may_free(8, 30));
  EXPECT_FALSE(may_free(9, 12) || may_free(15, 30));
}

TEST(Lse, IsNatural) {
  for (float m = -50.f; m < 50.f; m += 0.7f)
    for (float log2_l = -10.f; log2_l < 20.f; log2_l += 1.3f)
      EXPECT_NEAR(natural_lse(m, log2_l), (static_cast<double>(m) + log2_l) * 0.6931471805599453, 1e-5);
  EXPECT_GT(std::fabs(natural_lse(10.f, 0.f) - 10.f), 1.f);  // control: not in base 2
}

}  // namespace
}  // namespace flamia::numerics
