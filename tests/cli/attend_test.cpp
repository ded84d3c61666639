// SPDX-License-Identifier: Apache-2.0
// `flamia attend`: the file contract, and the numbers against attention written out in a few lines of double precision.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "files.hpp"
#include "program.hpp"

namespace flamia::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// What `attend` should write, straight from the definition. Window counts as FlashAttention's: keys i - left ... i + right.
struct Reference {
  std::vector<double> out, lse;
};

Reference reference(const Sample& s, bool causal, std::int64_t left, std::int64_t right, double scale) {
  const auto q = s.values(s.tokens * s.heads * s.dim, 1), k = s.values(s.tokens * s.key_heads * s.dim, 2),
             v = s.values(s.tokens * s.key_heads * s.dim, 3);
  const auto tokens = static_cast<std::int64_t>(s.tokens), heads = static_cast<std::int64_t>(s.heads),
             key_heads = static_cast<std::int64_t>(s.key_heads), dim = static_cast<std::int64_t>(s.dim);
  Reference r{std::vector<double>(q.size(), 0.0), std::vector<double>(s.heads * s.tokens, kInfinity)};
  std::vector<std::int32_t> offsets = s.cu_seqlens;
  if (!s.with_documents) offsets = {0, static_cast<std::int32_t>(s.tokens)};
  for (std::size_t b = 1; b < offsets.size(); ++b)
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t i = offsets[b - 1]; i < offsets[b]; ++i) {
        const std::int64_t kh = h / (heads / key_heads);
        double sum = 0, top = -kInfinity;
        std::vector<double> scores(static_cast<std::size_t>(tokens), -kInfinity);
        for (std::int64_t j = offsets[b - 1]; j < offsets[b]; ++j) {
          if ((causal && j > i) || (left >= 0 && j < i - left) || (right >= 0 && j > i + right)) continue;
          double dot = 0;
          for (std::int64_t c = 0; c < dim; ++c)
            dot += double{q[static_cast<std::size_t>((i * heads + h) * dim + c)]} *
                   k[static_cast<std::size_t>((j * key_heads + kh) * dim + c)];
          scores[static_cast<std::size_t>(j)] = scale * dot;
          top = std::max(top, scale * dot);
        }
        if (top == -kInfinity) continue;
        for (double score : scores) sum += std::exp(score - top);
        r.lse[static_cast<std::size_t>(h * tokens + i)] = top + std::log(sum);
        for (std::int64_t j = offsets[b - 1]; j < offsets[b]; ++j)
          for (std::int64_t c = 0; c < dim; ++c)
            r.out[static_cast<std::size_t>((i * heads + h) * dim + c)] +=
                std::exp(scores[static_cast<std::size_t>(j)] - top) / sum *
                v[static_cast<std::size_t>((j * key_heads + kh) * dim + c)];
      }
  return r;
}

double distance(const std::vector<float>& got, const std::vector<double>& want) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < want.size(); ++i) error += (got[i] - want[i]) * (got[i] - want[i]), size += want[i] * want[i];
  return std::sqrt(error / size);
}

class Attend : public testing::Test {
 protected:
  void SetUp() override { sample.write(folder / "in"); }
  void attend(std::vector<std::string> more, const std::string& out = "out") {
    more.insert(more.begin(), {"attend", folder / "in", "--out", folder / out});
    const Outcome outcome = run(more);
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_EQ(outcome.err, "");
  }
  /// BF16's rounding of P and of the inputs' products: 2^-9 each, so 1 % leaves room; the control must be farther away.
  void expect_reference(const Reference& right, const Reference& control) {
    const std::vector<float> out = read(folder / "out", "out").f32(), lse = read(folder / "out", "lse").f32();
    EXPECT_LT(distance(out, right.out), 0.01);
    EXPECT_GT(distance(out, control.out), 0.01);
    for (std::size_t i = 0; i < lse.size(); ++i) {
      if (std::isinf(right.lse[i])) {
        EXPECT_EQ(lse[i], std::numeric_limits<float>::infinity());
      } else {
        EXPECT_NEAR(lse[i], right.lse[i], 0.01) << i;
      }
    }
  }
  Sample sample;
  Folder folder;
};

TEST_F(Attend, CausalIsTheDefault) {
  attend({"--recipe", "bf16"});
  expect_reference(reference(sample, true, -1, -1, 0.125), reference(sample, false, -1, -1, 0.125));
  const std::string by_default = contents(folder / "out");
  attend({"--recipe", "bf16", "--causal"});
  EXPECT_EQ(contents(folder / "out"), by_default);
}

TEST_F(Attend, Full) {
  attend({"--recipe", "bf16", "--full"});
  expect_reference(reference(sample, false, -1, -1, 0.125), reference(sample, true, -1, -1, 0.125));
}

TEST_F(Attend, WindowAndScale) {
  attend({"--recipe", "bf16", "--window", "7,0", "--scale", "0.3"});
  expect_reference(reference(sample, true, 7, 0, 0.3), reference(sample, true, 6, 0, 0.3));
  attend({"--recipe", "bf16", "--full", "--window", "-1,3"});
  expect_reference(reference(sample, false, -1, 3, 0.125), reference(sample, false, -1, 4, 0.125));
  attend({"--recipe", "bf16", "--full", "--window=5,9"});
  expect_reference(reference(sample, false, 5, 9, 0.125), reference(sample, false, 5, 8, 0.125));
}

TEST_F(Attend, WithoutDocumentsThereIsOne) {
  Sample one = sample;
  one.with_documents = false;
  one.write(folder / "in");
  attend({"--recipe", "bf16"});
  expect_reference(reference(one, true, -1, -1, 0.125), reference(sample, true, -1, -1, 0.125));
}

TEST_F(Attend, ShapesAndDtypes) {
  attend({"--recipe", "mxfp8-exact", "--backward"});
  using Shape = std::vector<std::uint64_t>;
  const std::pair<const char*, Shape> expected[] = {
      {"out", {150, 2, 64}}, {"lse", {2, 150}}, {"dq", {150, 2, 64}}, {"dk", {150, 1, 64}}, {"dv", {150, 1, 64}}};
  for (const auto& [name, shape] : expected) {
    EXPECT_EQ(read(folder / "out", name).info.shape, shape) << name;
    EXPECT_EQ(read(folder / "out", name).info.dtype, "F32") << name;
  }
  for (const char* name : {"out", "dq", "dk", "dv"}) {  // the ten tokens after the last document
    const std::vector<float> values = read(folder / "out", name).f32();
    const std::size_t row = values.size() / 150;
    EXPECT_TRUE(
        std::all_of(values.begin() + static_cast<std::ptrdiff_t>(140 * row), values.end(), [](float x) { return x == 0.f; }));
    EXPECT_TRUE(std::any_of(values.begin(), values.end(), [](float x) { return x != 0.f; }));
  }
}

TEST_F(Attend, GradientsDoNotDependOnTheOutputsDtype) {
  attend({"--recipe", "mxfp8-exact", "--backward"}, "f32");
  attend({"--recipe", "mxfp8-exact", "--backward", "--out-dtype", "bf16"}, "bf16");
  const Read wide = read(folder / "f32", "out"), narrow = read(folder / "bf16", "out");
  EXPECT_EQ(narrow.info.dtype, "BF16");
  const std::vector<std::uint8_t> rounded = Sample::encode(wide.f32(), "BF16");
  EXPECT_EQ(narrow.bytes, rounded);
  for (const char* name : {"lse", "dq", "dk", "dv"})
    EXPECT_EQ(read(folder / "f32", name).bytes, read(folder / "bf16", name).bytes) << name;
}

TEST_F(Attend, ThreadsChangeNothing) {
  attend({"--recipe", "mxfp8", "--backward", "--threads", "1"}, "one");
  attend({"--recipe", "mxfp8", "--backward", "--threads", "3"}, "three");
  EXPECT_EQ(contents(folder / "one"), contents(folder / "three"));
}

TEST_F(Attend, InputDtypes) {
  attend({"--recipe", "mxfp8-exact"}, "bf16");
  for (const char* dtype : {"F32", "F16"}) {  // BF16 values of this size are exact in both
    Sample other = sample;
    other.dtype = dtype;
    other.write(folder / "in");
    attend({"--recipe", "mxfp8-exact"}, dtype);
    EXPECT_LT(distance(read(folder / dtype, "out").f32(), reference(sample, true, -1, -1, 0.125).out), 0.1);
  }
  EXPECT_EQ(read(folder / "F32", "out").bytes, read(folder / "bf16", "out").bytes);
}

TEST_F(Attend, Json) {
  const Outcome outcome =
      run({"attend", folder / "in", "--recipe", "mxfp8", "--backward", "--json", "--progress", "--out", folder / "out"});
  ASSERT_EQ(outcome.code, 0);
  const nlohmann::json report = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(report["recipe"], "mxfp8");
  EXPECT_EQ(report["tokens"], 150);
  EXPECT_EQ(report["documents"], 3);
  EXPECT_EQ(report["causal"], true);
  EXPECT_GT(report["seconds"], 0.0);
  EXPECT_THAT(outcome.err, testing::HasSubstr("attend 2/3: mxfp8"));
}

}  // namespace
}  // namespace flamia::test
