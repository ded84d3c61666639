// SPDX-License-Identifier: Apache-2.0
// Recipes with 4-bit operands: bars on N(0, 1), what their operands stand for, and controls that must miss.
#include "kernels/attention_case.hpp"
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

/// amax / 6 or amax / 4 by the smaller error (numerics.md §7): better in both scores and gradients than amax / 6 alone.
TEST(Nvfp4, TheBetterOfTwoScalesIsBetter) {
  const Input in = packed_normal(203);
  const cpu::OracleResult t = truth(in);
  const Measured chosen = measure(in, run(in, recipe("nvfp4")), t), six = measure(in, run(in, recipe("nvfp4 nvfp4=amax")), t);
  EXPECT_GT(chosen.o, six.o);
  EXPECT_GT(chosen.d_q, six.d_q);
}

}  // namespace
}  // namespace flamia::test
