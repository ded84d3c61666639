// SPDX-License-Identifier: Apache-2.0
#include "measures.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "table.hpp"

namespace flamia::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(Deviation, ByHand) {
  // two tokens, two heads, two channels; head 1 is (3, 4) and (0, 1)
  const std::vector<double> want{9, 9, 3, 4, 9, 9, 0, 1};
  const std::vector<float> got{0, 0, 3, 4.5f, 0, 0, 0, 0.5f};
  const cli::Deviation d = cli::deviation(got, want, 2, 2, 2, 1);
  EXPECT_NEAR(d.cosine, (9 + 18 + 0.5) / std::sqrt((9 + 20.25 + 0.25) * 26.0), 1e-12);
  EXPECT_NEAR(d.relative_l2, std::sqrt(0.5 / 26), 1e-12);
  EXPECT_NEAR(d.worst_row, 0.5, 1e-12);  // the second row's error is half its norm
}

TEST(Deviation, SmallRowsAreMeasuredAgainstATenthOfTheMean) {
  const std::vector<double> want{10, 0.001};
  const std::vector<float> got{10, 0.101f};
  const cli::Deviation d = cli::deviation(got, want, 2, 1, 1, 0);
  EXPECT_NEAR(d.worst_row, 0.1 / (0.1 * std::sqrt((100 + 1e-6) / 2)), 1e-6);
}

TEST(Deviation, AZeroedRowShows) {
  // One row of a thousand is gone: the cosine hardly moves, the worst row is 1.
  std::vector<double> want(1000 * 8, 1.0);
  std::vector<float> got(want.begin(), want.end());
  EXPECT_EQ(cli::deviation(got, want, 1000, 1, 8, 0).worst_row, 0);
  for (int c = 0; c < 8; ++c) got[4000 + static_cast<std::size_t>(c)] = 0;
  const cli::Deviation d = cli::deviation(got, want, 1000, 1, 8, 0);
  EXPECT_GT(d.cosine, 0.999);
  EXPECT_NEAR(d.worst_row, 1, 1e-9);
}

TEST(Deviation, ZeroAndNotANumber) {
  const std::vector<double> zero{0, 0};
  EXPECT_EQ(cli::deviation(std::vector<float>{0, 0}, zero, 2, 1, 1, 0).cosine, 1);
  EXPECT_EQ(cli::deviation(std::vector<float>{0, 1}, zero, 2, 1, 1, 0).cosine, 0);
  EXPECT_TRUE(std::isnan(cli::deviation(std::vector<float>{0, kNan}, zero, 2, 1, 1, 0).cosine));
  EXPECT_TRUE(std::isnan(cli::deviation(std::vector<float>{0, kNan}, zero, 2, 1, 1, 0).worst_row));
}

TEST(Change, CountsBits) {
  cli::Change change;
  change.add(1.f, 1.f);
  change.add(kNan, kNan);
  EXPECT_EQ(change.elements, 0);
  change.add(0.f, -0.f);  // equal as numbers, not as bits
  EXPECT_EQ(change.elements, 1);
  EXPECT_EQ(change.greatest, 0);
  change.add(1.f, 3.f);
  change.add(1.f, 2.f);
  EXPECT_EQ(change.greatest, 2);
  change.add(1.f, kNan);
  change.add(0.f, 9.f);
  EXPECT_TRUE(std::isnan(change.greatest));
  EXPECT_EQ(change.elements, 5);
}

TEST(Table, TextCsvJson) {
  cli::Table table({{"name", ""}, {"count", "{}"}, {"value", "{:.2e}"}});
  table.add({std::string("a,\"b\""), std::int64_t{3}, 0.0});
  table.add({std::string("c"), cli::Cell(), 1.0 / 3});
  table.add({std::string("d"), std::int64_t{-1}, std::nan("")});
  EXPECT_EQ(table.csv(), "name,count,value\n\"a,\"\"b\"\"\",3,0\nc,,0.3333333333333333\nd,-1,nan\n");
  EXPECT_EQ(table.text(), "name   count     value\na,\"b\"      3         0\nc          -  3.33e-01\nd         -1       nan\n");
  EXPECT_THAT(table.json(), testing::HasSubstr("\"count\": null"));
  EXPECT_THAT(table.json(), testing::HasSubstr("\"value\": null"));  // not a number
}

}  // namespace
}  // namespace flamia::test
