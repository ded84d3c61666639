// SPDX-License-Identifier: Apache-2.0
// Every variant that the rules allow computes attention; the controls among them are as bad as the study says.
#include "kernels/attention_case.hpp"

namespace flamia::test {
namespace {

Recipe with_ds(Quantisation form) {
  Recipe r = recipe("mxfp8");
  r.one_ds_payload = true;
  r.d_s.first = r.d_s.second = form;
  return r;
}

Recipe constant_ds() { return with_ds({Element::e4m3, {Group::Kind::constant}}); }
Recipe tensor_ds() { return with_ds({Element::e4m3, {Group::Kind::tensor}, ScaleType::ue8m0, ScaleRule::ceil}); }
Recipe tile_ds() { return with_ds({Element::e4m3, {Group::Kind::blocks, 0, 0}, ScaleType::ue8m0, ScaleRule::ceil}); }

TEST(Variants, AllStayClose) {
  const Input in = normal_input({.lengths = {260, 90}, .query_heads = 2, .key_heads = 1}, fresh_seed() + 90);
  const cpu::OracleResult t = truth(in);
  const auto check = [&](const Recipe& r, double o, double gradient, const std::string& what) {
    const Result got = run(in, r);
    EXPECT_GE(cosine(got.o, t.o), o) << what;
    EXPECT_GE(cosine(got.d_q, t.d_q), gradient) << what;
    EXPECT_GE(cosine(got.d_k, t.d_k), gradient) << what;
    EXPECT_GE(cosine(got.d_v, t.d_v), o) << what;
  };
  for (const char* text :
       {"mxfp8 ds=32x32",        "mxfp8 ds=row32",         "mxfp8 dk=64x32",          "mxfp8 dk=key128",
        "mxfp8 sticky=on",       "mxfp8-exact sticky=off", "mxfp8 ref=phase32",       "mxfp8 dq=f32",
        "mxfp8 p-in-ds=codes",   "mxfp8 rotate=off",       "mxfp8 prescale=sequence", "mxfp8 promote=32:32",
        "mxfp8 promote=64:128",  "mxfp8 promote=0:0",      "mxfp8 fold-v=on",         "mxfp8 fold-k=on",
        "mxfp8 exp2=poly3:8/16", "mxfp8 exp2=poly4:16/16", "mxfp8-exact ds=row32",    "mxfp8 ref=phase32 l=unrounded",
        "mxfp8 ds=e4m3",         "mxfp8-exact ds=e4m3",    "fp8-tensor ds=bf16"})
    check(recipe(text), .9985, .996, text);
  check(tensor_ds(), .9985, .996, "one scale of dS");
  check(tile_ds(), .9985, .996, "one scale of dS per tile");
  for (const char* text : {"mxfp8 exp2=mitchell", "mxfp8 exp2=schraudolph"}) check(recipe(text), .997, .99, text);
  check(recipe("mxfp8 rule=floor"), .996, .994, "floor");
  check(recipe("mxfp8-floor"), .996, .994, "mxfp8-floor");
  check(recipe("fp8-tensor"), .998, .996, "fp8-tensor");
}

/// dS * 2^8 vanishes below the codes for a gradient of ordinary size (numerics.md §1): all of it is lost, and the probe says so.
TEST(Variants, AConstantScaleOfDsLosesSmallGradients) {
  Input in = normal_input({.lengths = {300}}, fresh_seed() + 91);
  for (float& x : in.d_o) x = numerics::round_bf16(x * 1e-6f);
  const cpu::OracleResult t = truth(in);
  cpu::Probe constant, payloads;
  EXPECT_LT(cosine(run(in, constant_ds(), {.probe = &constant}).d_q, t.d_q), .9);
  EXPECT_GE(cosine(run(in, recipe("mxfp8"), {.probe = &payloads}).d_q, t.d_q), .996);
  EXPECT_GT(constant.counts.ds_lost_q, 0.9 * constant.counts.ds_mass);
  EXPECT_LT(payloads.counts.ds_lost_q, 1e-4 * payloads.counts.ds_mass);
  EXPECT_EQ(payloads.counts.ds_saturated_q + payloads.counts.ds_saturated_k, 0);
  EXPECT_EQ(payloads.counts.p_saturated, 0);
  EXPECT_EQ(payloads.counts.pairs, 300 * 301 / 2);
}

TEST(Variants, TheFloorRuleSaturates) {
  const Input in = normal_input({.lengths = {300}}, fresh_seed() + 92);
  cpu::Probe probe;
  run(in, recipe("mxfp8-floor"), {.probe = &probe});
  EXPECT_GT(probe.counts.ds_saturated_q, 0);
  EXPECT_GT(probe.counts.p_saturated, 0);
}

/// The 13-bit accumulator truncates: near the FP32 result, not equal to it, and better with promotion than without.
TEST(Variants, HopperAccumulator) {
  const Input in = normal_input({.lengths = {200}, .head_dim = 64}, fresh_seed() + 93);
  const Result exact = run(in, recipe("mxfp8-exact")), model = run(in, recipe("mxfp8-exact acc=hopper13"));
  EXPECT_GT(relative_l2(model.o, exact.o), 1e-6);
  EXPECT_LT(relative_l2(model.o, exact.o), 8e-3);  // .004 to .006: what the accumulator loses flips a code of P now and then
  EXPECT_LT(relative_l2(model.d_q, exact.d_q), 2e-2);
  Input one_sign = normal_input({.lengths = {500}, .head_dim = 64, .mask = {false, -1, -1}}, fresh_seed() + 95);
  for (float& x : one_sign.d_o) x = numerics::round_bf16(x + 1.f);  // terms of one sign: what is cut off adds up
  const auto d_v = [&](const char* text) { return run(one_sign, recipe(text)).d_v; };
  const std::vector<float> right = d_v("mxfp8-exact");
  EXPECT_GT(relative_l2(d_v("mxfp8-exact acc=hopper13 promote=0:0"), right),
            1.5 * relative_l2(d_v("mxfp8-exact acc=hopper13"), right));
}

/// V per key on the diagonal tile: other codes there, the same elsewhere.
TEST(Variants, DiagonalFoldChangesTheDiagonalAlone) {
  Input in = normal_input({.lengths = {256}, .mask = {false, -1, -1}}, fresh_seed() + 94);
  // small tokens beside large ones: with the block's exponent they fall into E4M3's subnormal range, with their own they do not
  for (std::int64_t token = 0; token < 256; token += 2)
    for (int c = 0; c < 128; ++c) in.k_row(token, 0)[c] *= 1.f / 16384, in.v_row(token, 0)[c] *= 1.f / 16384;
  EXPECT_EQ(different_bits(run(in, recipe("mxfp8")).o, run(in, recipe("mxfp8 fold-v=on")).o), 0u)
      << "no diagonal without a right edge";
  Input causal = in;
  causal.problem.mask.causal = true;
  EXPECT_GT(different_bits(run(causal, recipe("mxfp8")).o, run(causal, recipe("mxfp8 fold-v=on")).o), 0u);
  EXPECT_GT(different_bits(run(causal, recipe("mxfp8")).d_q, run(causal, recipe("mxfp8 fold-k=on")).d_q), 0u);
  EXPECT_EQ(different_bits(run(causal, recipe("mxfp8-exact")).d_q, run(causal, recipe("mxfp8-exact fold-v=on fold-k=on")).d_q), 0u)
      << "per token already";
}

}  // namespace
}  // namespace flamia::test
