// SPDX-License-Identifier: Apache-2.0
// Two-level scales, means over tokens and their subtraction, against the words of quantize/encode.hpp and means.hpp.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "quantize/encode.hpp"
#include "quantize/means.hpp"
#include "reference.hpp"

namespace flamia::quantize {
namespace {

using namespace testing_reference;

constexpr std::int64_t kTokens = 431;
constexpr int kHeads = 3, kDim = 64;

schedule::Documents documents() {
  schedule::Documents made;
  EXPECT_TRUE(schedule::Documents::create(std::vector<std::int32_t>{0, 1, 1, 300, 429}, kTokens, &made).ok());
  return made;
}

std::vector<float> f32_of(const Input& in) {
  std::vector<float> x;
  for (const std::uint16_t code : in.bf16) x.push_back(numerics::decode_bf16(code));
  return x;
}

std::size_t at(std::int64_t token, int head, int c) { return static_cast<std::size_t>((token * kHeads + head) * kDim + c); }

/// Every tile of 128 tokens is quantised with its own first level as the tensor scale.
TEST(TwoLevel, EveryTileIsQuantisedWithItsFirstLevel) {
  Input in(kTokens, kHeads, kDim, 21);
  in.at(20, 1, 5) = 0x7fc0;  // NaN: its group is flagged, and it does not count in the tile's maximum
  const schedule::Documents docs = documents();
  const std::vector<float> x = f32_of(in);
  for (const Group group : {Group{Group::Kind::blocks, 1, 16}, {Group::Kind::blocks, 16, 1}, {Group::Kind::blocks, 1, 0}}) {
    const Quantisation form{Element::e2m1, group, ScaleType::e4m3, ScaleRule::two_level};
    QuantisedTensor got;
    ASSERT_TRUE(quantise(in.view(), docs, form, 2, &got).ok());
    const std::vector<float> values = dequantise(got, docs);
    std::size_t tile = 0, compared = 0;
    for (const schedule::DocumentRange& range : docs.ranges())
      for (std::int64_t begin = 0; begin < range.length; begin += 128, ++tile) {
        const std::int64_t first = range.start + begin, rows = std::min<std::int64_t>(128, range.length - begin);
        for (int head = 0; head < kHeads; ++head) {
          float amax = 0.f;
          std::vector<float> part;
          for (std::int64_t i = first; i < first + rows; ++i) {
            float row = 0.f;
            for (int c = 0; c < kDim; ++c) part.push_back(x[at(i, head, c)]), row = std::max(row, std::fabs(x[at(i, head, c)]));
            bool finite = true;
            for (int c = 0; c < kDim; ++c) finite = finite && std::isfinite(x[at(i, head, c)]);
            if (finite) amax = std::max(amax, row);
          }
          const float level = amax == 0.f ? 1.f : amax / 2688.f;
          ASSERT_EQ(got.first_levels[tile * kHeads + static_cast<std::size_t>(head)], level);
          Quantisation plain = form;
          plain.rule = ScaleRule::amax;
          plain.tensor_scale = level;
          QuantisedTensor alone;
          const schedule::Documents one = schedule::Documents::single(rows);
          ASSERT_TRUE(quantise({{part.data(), DType::f32, 0, 0}, 1, kDim}, one, plain, 1, &alone).ok());
          const std::vector<float> want = dequantise(alone, one);
          for (std::int64_t i = 0; i < rows; ++i)
            for (int c = 0; c < kDim; ++c, ++compared) {
              const float a = values[at(first + i, head, c)], b = want[static_cast<std::size_t>(i * kDim + c)];
              ASSERT_TRUE(numerics::bits_of(a) == numerics::bits_of(b) || (std::isnan(a) && std::isnan(b)));
            }
        }
      }
    EXPECT_EQ(compared, static_cast<std::size_t>(429 * kHeads * kDim));
  }
}

TEST(TwoLevel, IsRefusedWhereItHasNoMeaning) {
  const Quantisation form{Element::e2m1, {Group::Kind::blocks, 48, 1}, ScaleType::e4m3, ScaleRule::two_level};
  EXPECT_NE(check_form(form, 64).message().find("rows divide 128"), std::string::npos);
  const Quantisation eight{Element::e4m3, {Group::Kind::blocks, 1, 16}, ScaleType::ue8m0, ScaleRule::two_level};
  EXPECT_FALSE(check_form(eight, 64).ok());
}

TEST(Means, OfTilesAndDocuments) {
  Input in(kTokens, kHeads, kDim, 22);
  in.at(140, 1, 5) = 0x7f80;  // a token that is left out
  const schedule::Documents docs = documents();
  const std::vector<float> x = f32_of(in);
  for (const std::int64_t rows : {std::int64_t{128}, kWholeDocument}) {
    std::vector<float> got(static_cast<std::size_t>(docs.blocks(rows) * kHeads * kDim), NAN);
    ASSERT_TRUE(means(in.view(), docs, rows, 3, got).ok());
    std::vector<float> one(got.size());
    ASSERT_TRUE(means(in.view(), docs, rows, 1, one).ok());
    EXPECT_EQ(got, one);
    std::size_t block = 0;
    for (const schedule::DocumentRange& range : docs.ranges())
      for (std::int64_t begin = 0; begin < range.length; begin += rows, ++block)
        for (int head = 0; head < kHeads; ++head)
          for (int c = 0; c < kDim; ++c) {
            double sum = 0;
            int count = 0;
            for (std::int64_t i = begin; i < std::min(begin + rows, range.length); ++i) {
              if (range.start + i == 140 && head == 1) continue;
              sum += static_cast<double>(x[at(range.start + i, head, c)]), ++count;
            }
            EXPECT_EQ(got[(block * kHeads + static_cast<std::size_t>(head)) * kDim + static_cast<std::size_t>(c)],
                      static_cast<float>(sum / count));
          }
  }
  std::vector<float> small(3);
  EXPECT_FALSE(means(in.view(), docs, 128, 1, small).ok());
}

/// Quantising with means is quantising the tensor less its means.
TEST(Means, AreSubtractedBeforeTheScalesAreTaken) {
  const Input in(kTokens, kHeads, kDim, 23);
  const schedule::Documents docs = documents();
  for (const std::int64_t rows : {std::int64_t{128}, kWholeDocument})
    for (const Quantisation& form : {Quantisation{Element::e2m1, {Group::Kind::blocks, 1, 16}, ScaleType::e4m3, ScaleRule::amax},
                                     {Element::int8, {Group::Kind::blocks, 64, 0}, ScaleType::f32, ScaleRule::amax}}) {
      std::vector<float> values(static_cast<std::size_t>(docs.blocks(rows) * kHeads * kDim));
      ASSERT_TRUE(means(in.view(), docs, rows, 1, values).ok());
      QuantiseInput smoothed = in.view();
      smoothed.subtract = values.data();
      smoothed.subtract_rows = rows;
      QuantisedTensor got, want, plain;
      ASSERT_TRUE(quantise(smoothed, docs, form, 2, &got).ok());
      std::vector<float> x = f32_of(in);
      std::int64_t before = 0;
      for (const schedule::DocumentRange& range : docs.ranges()) {
        for (std::int64_t i = 0; i < range.length; ++i)
          for (int head = 0; head < kHeads; ++head)
            for (int c = 0; c < kDim; ++c)
              x[at(range.start + i, head, c)] -= values[static_cast<std::size_t>(((before + i / rows) * kHeads + head) * kDim + c)];
        before += (range.length + rows - 1) / rows;
      }
      ASSERT_TRUE(quantise({{x.data(), DType::f32, 0, 0}, kHeads, kDim}, docs, form, 1, &want).ok());
      EXPECT_EQ(got.codes, want.codes);
      EXPECT_EQ(got.scales, want.scales);
      std::vector<float> less;
      ASSERT_TRUE(less_means(in.view(), docs, rows, 1, &less).ok());
      for (std::size_t i = 0; i < at(429, 0, 0); ++i) ASSERT_EQ(less[i], x[i]);
      ASSERT_TRUE(quantise(in.view(), docs, form, 1, &plain).ok());
      EXPECT_NE(got.codes, plain.codes);
    }
}

}  // namespace
}  // namespace flamia::quantize
