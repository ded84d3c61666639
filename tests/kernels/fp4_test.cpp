// SPDX-License-Identifier: Apache-2.0
// Recipes with 4-bit operands: bars on N(0, 1), what their operands stand for, and controls that must miss.
#include "kernels/attention_case.hpp"
#include "kernels/cpu/block_scaled.hpp"
#include "kernels/recipe_accuracy.hpp"
#include "quantize/quantize.hpp"

namespace flamia::test {
namespace {

Input packed_normal(std::uint32_t offset) {
  return normal_input({.lengths = {300, 45, 513, 1, 160}, .query_heads = 4, .key_heads = 4}, fresh_seed() + offset);
}

TEST(Nvfp4, BarsOnShortPackedDocuments) {
  const Input in = packed_normal(200);
  const cpu::OracleResult t = truth(in);
  constexpr Bars kBars{.992, .990, .990, .992};
  for (const char* text : {"nvfp4", "nvfp4-exact"}) expect_bars(in, recipe(text), t, kBars);
  // scales that all round to the same few codes, no scale along the channels, and a row of one query missing
  expect_missed(in, recipe("nvfp4 nvfp4=amax q1=e2m1/1x16/e4m3/amax/x0.00012207031"), t, kBars);
  expect_missed(in, recipe("nvfp4 q1=e2m1/tensor/f32/amax k1=e2m1/tensor/f32/amax"), t, kBars);
  Result damaged = run(in, recipe("nvfp4"));
  EXPECT_LT(worst_row(damaged.o, t.o, 128), 0.9);
  std::fill_n(damaged.o.begin() + 400 * 4 * 128, 128, 0.f);
  EXPECT_GT(worst_row(damaged.o, t.o, 128), 0.9) << "one zeroed row must show";
}

TEST(AccuracyLong, Nvfp4At4096) {
  Shape shape{.lengths = {4096}, .query_heads = 4, .key_heads = 4};
  const Input in = normal_input(shape, fresh_seed() + 201);
  const cpu::OracleResult t = truth(in);
  constexpr Bars kSeed{.9920, .9906, .9906, .9920};
  for (const char* text : {"nvfp4", "nvfp4-exact"}) expect_bars(in, recipe(text), t, kSeed);
  expect_missed(in, recipe("nvfp4 q1=e2m1/tensor/f32/amax k1=e2m1/tensor/f32/amax"), t, kSeed);
}

/// E2M1 times E4M3 has at most 6 significant bits, so the dequantised Q and K are BF16 numbers: attention over them in BF16 scores is
/// the same computation, and must give the same bits.
TEST(Nvfp4, ScoresAreThoseOfTheDequantisedOperands) {
  Input in =
      normal_input({.lengths = {150, 7, 260}, .query_heads = 2, .key_heads = 1, .head_dim = 48, .tail = 2}, fresh_seed() + 202);
  const Recipe fp4 = recipe("nvfp4-exact rotate=off");
  const Result got = run(in, fp4, {.backward = false});
  const schedule::Documents documents = in.documents();
  const auto replace = [&](std::vector<float>& x, int heads, const Quantisation& form) {
    quantize::QuantisedTensor made;
    const Status status = quantize::quantise({view(x), heads, in.problem.head_dim, false, nullptr}, documents, form, 1, &made);
    ASSERT_TRUE(status.ok()) << status.message();
    x = quantize::dequantise(made, documents);
  };
  Input exact = in;
  replace(exact.q, 2, fp4.q.first);
  replace(exact.k, 1, fp4.k.first);
  Recipe bf16_scores = fp4;
  bf16_scores.q.first = bf16_scores.k.first = Quantisation{};
  const Result want = run(exact, bf16_scores, {.backward = false});
  EXPECT_EQ(different_bits(got.o, want.o), 0u);
  EXPECT_EQ(different_bits(got.lse, want.lse), 0u);
  EXPECT_GT(different_bits(got.o, run(in, bf16_scores, {.backward = false}).o), 0u) << "the unquantised operands differ";
}

/// The tensor scale from the maximum of each tile of 128 tokens instead of the constant 1: the same accuracy, and it leaks.
TEST(Nvfp4, AScaleFromTheDataGainsNothing) {
  Input in = packed_normal(209);
  const cpu::OracleResult t = truth(in);
  const Measured constant = measure(in, recipe("nvfp4-exact nvfp4=amax"), t);
  const Measured current = measure(in, recipe("nvfp4-exact q1=e2m1/1x16/e4m3/two_level k1=e2m1/1x16/e4m3/two_level"), t);
  print(constant, "tensor scale 1");
  print(current, "tensor scale from the tile");
  EXPECT_NEAR(current.o, constant.o, 5e-4);
  EXPECT_NEAR(current.d_q, constant.d_q, 5e-4);
  for (float& x : in.k) x *= 0x1p-16f;  // but the constant has a range: keys of 2^-16 leave it
  for (float& x : in.q) x *= 0x1p+16f;
  EXPECT_GT(measure(in, recipe("nvfp4-exact q1=e2m1/1x16/e4m3/two_level k1=e2m1/1x16/e4m3/two_level"), t).o, .99);
  EXPECT_LT(measure(in, recipe("nvfp4-exact"), t).o, .9);
}

/// amax / 6 or amax / 4 by the smaller error (numerics.md §7): better in both scores and gradients than amax / 6 alone.
TEST(Nvfp4, TheBetterOfTwoScalesIsBetter) {
  const Input in = packed_normal(203);
  const cpu::OracleResult t = truth(in);
  const Measured chosen = measure(in, run(in, recipe("nvfp4")), t), six = measure(in, run(in, recipe("nvfp4 nvfp4=amax")), t);
  EXPECT_GT(chosen.o, six.o);
  EXPECT_GT(chosen.d_q, six.d_q);
}

TEST(Nvfp4Full, BarsOnShortPackedDocuments) {
  Input in = packed_normal(204);
  const cpu::OracleResult t = truth(in);
  constexpr Bars kBars{.98, .965, .965, .97};
  for (const char* text : {"nvfp4-full", "nvfp4-full fold-v=on fold-k=on"}) expect_bars(in, recipe(text), t, kBars);
  // MXFP4 in the forward pass, and one payload of dS
  const std::string mxfp4 = "q1=e2m1/1x32/ue8m0/floor k1=e2m1/1x32/ue8m0/floor v1=e2m1/32x1/ue8m0/floor p1=e2m1/1x32/ue8m0/floor";
  EXPECT_LT(measure(in, recipe("nvfp4-full " + mxfp4), t).o, kBars.o);
  const Measured one = measure(in, recipe("nvfp4-full ds=32x32"), t);
  print(one, "one payload of dS");
  EXPECT_LT(one.d_q, kBars.d_q);
  EXPECT_GT(one.d_q, .93);
}

/// Gradients of any size: the first level of dO's and dS's scales takes it. A constant does not.
TEST(Nvfp4Full, SmallGradientsKeepTheirCodes) {
  Input in = packed_normal(205);
  const Result before = run(in, recipe("nvfp4-full"));
  for (float& x : in.d_o) x *= 0x1p-24f;
  const Result after = run(in, recipe("nvfp4-full"));
  for (std::size_t i = 0; i < after.d_q.size(); ++i) EXPECT_EQ(after.d_q[i] * 0x1p24f, before.d_q[i]);
  const cpu::OracleResult t = truth(in);
  EXPECT_LT(measure(in, recipe("nvfp4-full do1=e2m1/1x16/e4m3/amax do2=e2m1/16x1/e4m3/amax"), t).d_q, .5);
}

/// Sums that are nearly 0 must not become a first level of 0, and that a NaN: no gradient is so small that it has no scale.
TEST(Nvfp4Full, VanishingGradientsStayFinite) {
  const auto finite = [](const std::vector<float>& x) {
    return std::all_of(x.begin(), x.end(), [](float value) { return std::isfinite(value); });
  };
  for (const char* text : {"nvfp4-full", "nvfp4-full fold-v=on fold-k=on"})
    for (const bool of_v : {false, true})
      for (const float factor : {0x1p-12f, 0x1p-100f, 0x1p-126f}) {
        Input in = packed_normal(206);
        for (float& x : of_v ? in.v : in.d_o) x *= factor;
        const Result got = run(in, recipe(text));
        EXPECT_TRUE(finite(got.d_q) && finite(got.d_k) && finite(got.d_v)) << text << (of_v ? " V x" : " dO x") << factor;
        EXPECT_TRUE(of_v || factor < 0x1p-100f || std::any_of(got.d_q.begin(), got.d_q.end(), [](float x) { return x != 0.f; }))
            << text;
      }
}

// ---- the block-scaled product by itself ----

struct Packed {
  std::vector<std::uint8_t> codes, scales;
  cpu::BlockScaledMatrix matrix(std::int64_t rows, ScaleType type, int group) const { return {codes, scales, rows, type, group}; }
};

Packed random_matrix(std::int64_t rows, int k, ScaleType type, int group, std::mt19937& bits) {
  Packed made;
  for (std::int64_t i = 0; i < rows * k / 2; ++i) made.codes.push_back(static_cast<std::uint8_t>(bits()));
  for (std::int64_t i = 0; i < rows * k / group; ++i)
    made.scales.push_back(static_cast<std::uint8_t>(type == ScaleType::e4m3 ? bits() % 0x7f : 110 + bits() % 30));
  return made;
}

double value_of(const Packed& x, std::int64_t row, int column, int k, ScaleType type, int group) {
  const std::uint8_t byte = x.codes[static_cast<std::size_t>((row * k + column) / 2)];
  const double code = static_cast<double>(numerics::decode<numerics::kE2M1>(column % 2 == 0 ? byte & 15u : byte >> 4));
  const std::uint8_t scale = x.scales[static_cast<std::size_t>((row * k + column) / group)];
  return code *
         (type == ScaleType::e4m3 ? static_cast<double>(numerics::decode<numerics::kE4M3>(scale)) : std::ldexp(1.0, scale - 127));
}

TEST(BlockScaledProduct, IsTheSumOfCodesTimesScales) {
  std::mt19937 bits(fresh_seed() + 206);
  for (const auto& [type, group] : {std::pair{ScaleType::e4m3, 16}, {ScaleType::ue8m0, 32}, {ScaleType::e4m3, 32}}) {
    constexpr int kDepth = 96, kRows = 150, kColumns = 133;
    const Packed a = random_matrix(kRows, kDepth, type, group, bits), b = random_matrix(kColumns, kDepth, type, group, bits);
    std::vector<float> c(kRows * kColumns);
    const auto multiply = [&, type = type, group = group](const Packed& x, std::vector<float>& out, cpu::Isa isa) {
      return cpu::block_scaled_product(x.matrix(kRows, type, group), b.matrix(kColumns, type, group), kDepth, out, isa);
    };
    const Status status = multiply(a, c, cpu::Isa::best);
    ASSERT_TRUE(status.ok()) << status.message();
    Packed swapped = a;  // control: the nibbles of one byte
    swapped.codes[5] = static_cast<std::uint8_t>(0x12), swapped.codes[5 + kDepth / 2] = 0x21;
    double worst = 0, control = 0;
    std::vector<float> other(c.size());
    ASSERT_TRUE(multiply(swapped, other, cpu::Isa::best).ok());
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kColumns; ++j) {
        double sum = 0, size = 0;
        for (int x = 0; x < kDepth; ++x) {
          const double term = value_of(a, i, x, kDepth, type, group) * value_of(b, j, x, kDepth, type, group);
          sum += term, size += std::abs(term);
        }
        const auto at = static_cast<std::size_t>(i * kColumns + j);
        worst = std::max(worst, std::abs(static_cast<double>(c[at]) - sum) / std::max(size, 1e-30));
        control = std::max(control, std::abs(static_cast<double>(other[at]) - sum) / std::max(size, 1e-30));
      }
    EXPECT_LT(worst, 1e-6);
    EXPECT_GT(control, 1e-4);
    for (const cpu::Isa isa : {cpu::Isa::baseline, cpu::Isa::avx2, cpu::Isa::avx512})
      if (cpu::tile_code(isa)) {
        ASSERT_TRUE(multiply(a, other, isa).ok());
        EXPECT_EQ(different_bits(c, other), 0u);
      }
  }
}

TEST(BlockScaledProduct, FlaggedRowsAndBadArguments) {
  std::mt19937 bits(fresh_seed() + 207);
  Packed a = random_matrix(3, 32, ScaleType::e4m3, 16, bits), b = random_matrix(2, 32, ScaleType::e4m3, 16, bits);
  a.scales[2] = 0x7f;  // NaN: row 1
  std::vector<float> c(6);
  ASSERT_TRUE(cpu::block_scaled_product(a.matrix(3, ScaleType::e4m3, 16), b.matrix(2, ScaleType::e4m3, 16), 32, c).ok());
  for (int i = 0; i < 6; ++i) EXPECT_EQ(std::isnan(c[static_cast<std::size_t>(i)]), i / 2 == 1);
  const auto message = [&](const cpu::BlockScaledMatrix& left, int k) {
    return cpu::block_scaled_product(left, b.matrix(2, ScaleType::e4m3, 16), k, c).message();
  };
  EXPECT_NE(message(a.matrix(3, ScaleType::e4m3, 16), 40).find("multiple of 16"), std::string::npos);
  EXPECT_NE(message(a.matrix(3, ScaleType::e4m3, 12), 32).find("a.group = 12"), std::string::npos);
  EXPECT_NE(message(a.matrix(4, ScaleType::e4m3, 16), 32).find("fewer bytes"), std::string::npos);
  EXPECT_NE(message(a.matrix(3, ScaleType::f32, 16), 32).find("e4m3 (NVFP4)"), std::string::npos);
}

/// The scores of nvfp4: the operator on the codes that the quantiser writes.
TEST(BlockScaledProduct, TakesTheQuantisersCodes) {
  const Input in = normal_input({.lengths = {140}, .head_dim = 64}, fresh_seed() + 208);
  const schedule::Documents documents = in.documents();
  const Quantisation form = recipe("nvfp4").q.first;
  quantize::QuantisedTensor q, k;
  ASSERT_TRUE(quantize::quantise({view(in.q), 1, 64}, documents, form, 1, &q).ok());
  ASSERT_TRUE(quantize::quantise({view(in.k), 1, 64}, documents, form, 1, &k).ok());
  std::vector<float> c(140 * 140);
  ASSERT_TRUE(cpu::block_scaled_product({q.codes, q.scales, 140}, {k.codes, k.scales, 140}, 64, c).ok());
  const std::vector<float> x = quantize::dequantise(q, documents), y = quantize::dequantise(k, documents);
  std::vector<float> want(c.size());
  for (std::size_t i = 0; i < 140; ++i)
    for (std::size_t j = 0; j < 140; ++j)
      for (std::size_t d = 0; d < 64; ++d) want[i * 140 + j] = numerics::fma(x[i * 64 + d], y[j * 64 + d], want[i * 140 + j]);
  EXPECT_EQ(different_bits(c, want), 0u);
}

}  // namespace
}  // namespace flamia::test
