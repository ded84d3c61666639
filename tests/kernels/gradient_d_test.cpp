// SPDX-License-Identifier: Apache-2.0
// D of dS = P o (dP - D) from O, or as the mean of dP under P (field d). They part where dP knows another copy of V than O.
#include "kernels/recipe_accuracy.hpp"

namespace flamia::test {
namespace {

/// All values of a document share a large component, as those of trained models do: dP is nearly the same for all keys of a row.
Input values_alike(std::uint32_t offset, float spread = .2f) {
  Input in = normal_input({.lengths = {300, 45, 170}, .query_heads = 2, .key_heads = 2}, fresh_seed() + offset);
  const Input common = normal_input({.lengths = {1}, .query_heads = 2, .key_heads = 2}, fresh_seed() + offset + 1);
  for (std::size_t i = 0; i < in.v.size(); ++i) in.v[i] = numerics::round_bf16(common.v[i % common.v.size()] + spread * in.v[i]);
  return in;
}

/// Channel 0 of K is a constant, so channel 0 of dQ is the row sum of dS, which nothing in exact attention makes other than 0.
/// BF16 payload, so that the rounding of dS is small beside what D leaves. Returns the norm of channel 0 of dQ over that of channel 1.
double row_sum_of_ds(const std::string& fields) {
  Input in = values_alike(500);
  for (std::int64_t token = 0; token < in.problem.tokens; ++token)
    for (int head = 0; head < 2; ++head) in.k_row(token, head)[0] = 1.f, in.q_row(token, head)[0] = 0.f;
  const Result r = run(in, recipe(fields));
  double sum = 0, other = 0;
  for (std::size_t i = 0; i < r.d_q.size(); i += 128) {
    sum += static_cast<double>(r.d_q[i]) * static_cast<double>(r.d_q[i]);
    other += static_cast<double>(r.d_q[i + 1]) * static_cast<double>(r.d_q[i + 1]);
  }
  std::cout << "[ measured ] " << fields << ": row sum of dS " << std::sqrt(sum / other) << std::endl;
  return std::sqrt(sum / other);
}

TEST(GradientD, RowsOfDsSumToZeroWhateverCopyOfVDpTakes) {
  const std::string two_copies = "nvfp4-full ds=bf16 dq=f32 rotate=off", one_copy = "mxfp8 dq=f32 rotate=off";
  for (const std::string& fields :
       {two_copies, two_copies + " fold-v=on", one_copy + " d=scores", one_copy + " p-in-ds=codes d=scores",
        std::string("bf16 d=scores"), std::string("sagebwd smooth-k=off ds=bf16 q2=bf16 k2=bf16 v2=bf16 d=scores")})
    EXPECT_LT(row_sum_of_ds(fields), .01) << fields;
  EXPECT_GT(row_sum_of_ds(two_copies + " d=output"), .5) << "control: D of the other copy";
}

TEST(GradientD, TwoCopiesOfVNeedIt) {
  const Input in = values_alike(502, .1f);
  const cpu::OracleResult t = truth(in);
  const Measured own = measure(in, recipe("nvfp4-full"), t), of_o = measure(in, recipe("nvfp4-full d=output"), t);
  print(own, "values alike, nvfp4-full");
  print(of_o, "values alike, nvfp4-full d=output");
  EXPECT_LT(1 - own.d_q, .85 * (1 - of_o.d_q));
  EXPECT_LT(1 - own.d_k, .85 * (1 - of_o.d_k));
  EXPECT_EQ(own.o, of_o.o);
  EXPECT_EQ(own.d_v, of_o.d_v);
}

/// Where dP takes the V that O was made of, both say nearly the same, and only dQ and dK can differ.
TEST(GradientD, OneCopyOfVNeedsItLittle) {
  const Input in = normal_input({.lengths = {300, 1, 90}, .query_heads = 4, .key_heads = 2}, fresh_seed() + 504);
  const cpu::OracleResult t = truth(in);
  for (const std::string text : {"bf16", "mxfp8", "mxfp8-exact", "fp8-tensor", "nvfp4", "sagebwd"}) {
    const Result of_o = run(in, recipe(text)), own = run(in, recipe(text + " d=scores"));
    EXPECT_EQ(different_bits(of_o.o, own.o) + different_bits(of_o.lse, own.lse) + different_bits(of_o.d_v, own.d_v), 0u) << text;
    EXPECT_GT(different_bits(of_o.d_q, own.d_q), 0u) << text;
    const Measured a = measure(in, of_o, t), b = measure(in, own, t);
    EXPECT_GE(b.d_q, a.d_q - 3e-4) << text;
    EXPECT_GE(b.d_k, a.d_k - 3e-4) << text;
  }
}

/// dP of V itself beside an O of INT8 V is what the published form of sagebwd has: with channels of other sizes D from O costs all of dQ.
TEST(GradientD, MendsThePublishedSageBwd) {
  const Input in = outlier_channels(fresh_seed() + 505);
  const cpu::OracleResult t = truth(in);
  const Measured of_o = measure(in, recipe("sagebwd v2=bf16"), t), own = measure(in, recipe("sagebwd v2=bf16 d=scores"), t);
  print(of_o, "outlier channels, sagebwd v2=bf16");
  print(own, "outlier channels, sagebwd v2=bf16 d=scores");
  EXPECT_LT(1 - own.d_q, .5 * (1 - of_o.d_q));
}

}  // namespace
}  // namespace flamia::test
