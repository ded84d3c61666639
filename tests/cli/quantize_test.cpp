// SPDX-License-Identifier: Apache-2.0
// `flamia quantize`: names, dtypes, shapes, metadata, and that codes times scales are the tensors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "files.hpp"
#include "program.hpp"

namespace flamia::test {
namespace {

using Shape = std::vector<std::uint64_t>;

class Quantize : public testing::Test {
 protected:
  void SetUp() override { sample.write(folder / "in"); }
  void quantize(const std::string& recipe) {
    const Outcome outcome = run({"quantize", folder / "in", "--recipe", recipe, "--out", folder / "out"});
    ASSERT_EQ(outcome.code, 0) << outcome.err;
  }
  std::string metadata(const std::string& key) {
    cli::SafetensorsFile file;
    if (!cli::SafetensorsFile::open(folder / "out", &file).ok()) return "no file";
    const auto found = file.metadata().find(key);
    return found == file.metadata().end() ? "none" : found->second;
  }
  bool has(const std::string& name) {
    cli::SafetensorsFile file;
    return cli::SafetensorsFile::open(folder / "out", &file).ok() && file.find(name) != nullptr;
  }
  void expect(const std::string& name, const std::string& dtype, const Shape& shape) {
    const cli::TensorInfo info = read(folder / "out", name).info;
    EXPECT_EQ(info.dtype, dtype) << name;
    EXPECT_EQ(info.shape, shape) << name;
  }
  Sample sample;  // 150 tokens, documents of 40, 1, 99 (2 + 1 + 4 blocks of 32), 2 heads, 1 key head, 64 channels
  Folder folder;
};

TEST_F(Quantize, TokenBlocks) {
  quantize("mxfp8");
  expect("q.codes", "F8_E4M3", {150, 2, 64});
  expect("q.scales", "F8_E8M0", {7, 2});
  expect("k.codes", "F8_E4M3", {150, 1, 64});
  expect("v.scales", "F8_E8M0", {7, 1});
  expect("dout.scales", "F8_E8M0", {7, 2});
  EXPECT_FALSE(has("q.codes2"));  // one copy serves both products
  EXPECT_EQ(metadata("q.rule"), "ceil");
  EXPECT_EQ(metadata("q.contraction"), "channels, queries");
  EXPECT_THAT(metadata("q.granularity"), testing::HasSubstr("32 tokens"));
  EXPECT_EQ(metadata("recipe"), "mxfp8");
}

TEST_F(Quantize, PerToken) {
  quantize("mxfp8-exact");
  expect("q.scales", "F8_E8M0", {150, 2});
  expect("k.scales", "F8_E8M0", {150, 1});
  EXPECT_THAT(metadata("k.granularity"), testing::HasSubstr("sticky"));
  EXPECT_THAT(metadata("q.granularity"), testing::Not(testing::HasSubstr("sticky")));
}

TEST_F(Quantize, PerTensor) {
  quantize("fp8-tensor");
  EXPECT_EQ(read(folder / "out", "q.scales").info.shape, Shape{1});
}

TEST_F(Quantize, SecondCopies) {
  quantize("mxfp8-floor");
  for (const char* name : {"q.codes2", "q.scales2", "k.codes2", "v.codes2", "dout.codes2"}) EXPECT_TRUE(has(name)) << name;
  expect("q.scales", "F8_E8M0", {150, 2, 2});  // 1 x 32 along 64 channels
  EXPECT_EQ(metadata("q.contraction"), "channels");
  EXPECT_EQ(metadata("q.contraction2"), "queries");
  EXPECT_EQ(metadata("q.rule"), "floor");
}

TEST_F(Quantize, FourBits) {
  quantize("nvfp4");
  expect("q.codes", "U8", {150, 2, 32});
  expect("q.scales", "F8_E4M3", {150, 2, 4});
  EXPECT_TRUE(has("q.codes2"));  // dK takes Q in 8 bits
}

TEST_F(Quantize, TwoLevels) {
  quantize("nvfp4-full");
  expect("v.codes", "U8", {150, 1, 32});
  EXPECT_EQ(read(folder / "out", "dout.scales").info.dtype, "F8_E4M3");
  EXPECT_EQ(read(folder / "out", "dout.scales2").info.dtype, "F8_E4M3");
  expect("dout.tile_scales", "F32", {3, 2});
  EXPECT_FALSE(has("q.tile_scales"));
}

TEST_F(Quantize, EightBitIntegers) {
  quantize("sagebwd");
  expect("q.codes", "I8", {150, 2, 64});
  EXPECT_EQ(read(folder / "out", "q.scales").info.dtype, "F32");
  EXPECT_THAT(metadata("k.smoothing"), testing::HasSubstr("mean"));
  EXPECT_EQ(metadata("v.smoothing"), "none");
}

TEST_F(Quantize, NoQuantisation) {
  quantize("bf16");
  expect("q.codes", "BF16", {150, 2, 64});
  EXPECT_FALSE(has("q.scales"));
  const std::vector<std::uint8_t> q = read(folder / "in", "q").bytes, codes = read(folder / "out", "q.codes").bytes;
  const std::ptrdiff_t documents = 140 * 2 * 64 * 2;  // the tokens after them have code 0
  EXPECT_TRUE(std::equal(q.begin(), q.begin() + documents, codes.begin()));
  EXPECT_TRUE(std::all_of(codes.begin() + documents, codes.end(), [](std::uint8_t byte) { return byte == 0; }));
}

/// Codes times scales; E4M3 keeps 3 mantissa bits, so a block's values are off by at most 2^-4 of themselves or half the least subnormal.
TEST_F(Quantize, CodesTimesScalesAreTheTensor) {
  quantize("mxfp8-exact");
  const std::vector<std::uint8_t> codes = read(folder / "out", "v.codes").bytes, scales = read(folder / "out", "v.scales").bytes;
  const std::vector<float> v = sample.values(150 * 64, 3);
  double control = 0;
  for (std::size_t i = 0; i < 140 * 64; ++i) {
    const float value = numerics::decode<numerics::kE4M3>(codes[i]);
    const float scale = std::ldexp(1.f, scales[i / 64] - 127);
    EXPECT_LE(std::abs(value * scale - v[i]), std::max(std::abs(v[i]) / 16, scale * 0x1p-10f)) << i;
    control = std::max<double>(control, std::abs(value * scale * 2 - v[i]) / std::max(std::abs(v[i]) / 16, scale * 0x1p-10f));
  }
  EXPECT_GT(control, 1);  // a scale that is off by one would be seen
  for (std::size_t i = 140 * 64; i < codes.size(); ++i) EXPECT_EQ(codes[i] & 0x7f, 0);
}

TEST_F(Quantize, Json) {
  const Outcome outcome = run({"quantize", folder / "in", "--recipe", "mxfp8", "--out", folder / "out", "--json"});
  ASSERT_EQ(outcome.code, 0);
  const nlohmann::json report = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(report["tensors"]["q.scales"]["shape"], (nlohmann::json{7, 2}));
}

TEST_F(Quantize, WithoutGradient) {
  sample.with_gradient = false;
  sample.write(folder / "in");
  quantize("mxfp8");
  EXPECT_FALSE(has("dout.codes"));
}

}  // namespace
}  // namespace flamia::test
