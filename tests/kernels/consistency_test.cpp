// SPDX-License-Identifier: Apache-2.0
// The backward pass sees the codes of the forward pass: unfolded codes of P compared pair by pair (numerics.md §3).
#include "kernels/attention_case.hpp"

namespace flamia::test {
namespace {

struct CodeDifferences {
  std::size_t live = 0, normal = 0, subnormal = 0;
  std::size_t large = 0;       // more than the step of the subnormal range: FP32 rounding of t - m at a border between codes
  std::size_t many_steps = 0;  // more than one code apart
};

CodeDifferences compare_codes(const Input& in, const Recipe& r) {
  cpu::Probe probe;
  probe.record_codes = true;
  run(in, r, {.probe = &probe});
  CodeDifferences d;
  for (std::size_t i = 0; i < probe.forward_codes.size(); ++i) {
    const float f = probe.forward_codes[i], b = probe.backward_codes[i];
    d.live += f > 0.f || b > 0.f;
    if (f == b) continue;
    ++(b >= 1.f / 64 ? d.normal : d.subnormal);
    const float difference = std::abs(f - b), subnormal_step = 1.f / 512;
    d.large += difference > subnormal_step;
    d.many_steps += difference > std::max(subnormal_step, std::max(f, b) / 8);
  }
  return d;
}

TEST(Consistency, UnfoldedCodesAgreeOnNormalInput) {
  for (const char* text : {"mxfp8", "mxfp8-exact", "mxfp8-exact ref=phase32", "nvfp4", "mxfp8 smooth-q=on"}) {
    const Input in = normal_input({.lengths = {700, 60}, .query_heads = 2, .key_heads = 1}, fresh_seed() + 30);
    const CodeDifferences d = compare_codes(in, recipe(text));
    const double live = static_cast<double>(d.live);
    EXPECT_GT(live, 400000.0);
    // tilesum: r rises by six steps after the tile that shows a row to be flat, so the smallest codes of the first two tiles were made in
    // smaller steps than the backward pass makes them; what differs is at most a subnormal step (`large` below) all the same
    const bool rises = recipe(text).softmax.reference == RowReferenceRule::tilesum;
    EXPECT_LE(static_cast<double>(d.normal) / live, rises ? 3e-3 : 2e-5) << text;
    EXPECT_LE(static_cast<double>(d.subnormal) / live, rises ? 2e-2 : 2e-5) << text;
    EXPECT_LE(static_cast<double>(d.large), 3 + 4e-6 * live) << text;
    EXPECT_EQ(d.many_steps, 0u) << text;
  }
}

/// Sharp heads (scores of many binades) put codes into the subnormal range, where the reference of the moment may cost one subnormal step.
TEST(Consistency, SharpHeadsDifferByASubnormalStepAtMost) {
  Input in = normal_input({.lengths = {600}}, fresh_seed() + 31);
  for (float& x : in.q) x = numerics::round_bf16(x * 4.f);
  const CodeDifferences d = compare_codes(in, recipe("mxfp8"));
  EXPECT_LE(static_cast<double>(d.normal) / static_cast<double>(d.live), 2e-3);  // all at the border 2^-6
  EXPECT_LE(d.large, 6u);
  EXPECT_EQ(d.many_steps, 0u);
}

/// Control: a backward pass with another exp2, another tile order or another rotation sees other codes; here, another exp2.
TEST(Consistency, AnotherExp2Shows) {
  const Input in = normal_input({.lengths = {300}}, fresh_seed() + 32);
  cpu::Probe reference, other;
  reference.record_codes = other.record_codes = true;
  run(in, recipe("mxfp8"), {.probe = &reference, .backward = false});
  Recipe mitchell = recipe("mxfp8");
  mitchell.softmax.exp2 = Exp2::mitchell;
  run(in, mitchell, {.probe = &other, .backward = false});
  std::size_t different = 0, live = 0;
  for (std::size_t i = 0; i < reference.forward_codes.size(); ++i) {
    live += reference.forward_codes[i] > 0.f;
    different += reference.forward_codes[i] != other.forward_codes[i];
  }
  EXPECT_GT(static_cast<double>(different), 0.2 * static_cast<double>(live));
}

/// One visible key: P = 1, O = V^ and dS = 0 whatever the scale.
TEST(Consistency, OneKeyGivesZeroGradientOfScores) {
  const Input in = normal_input({.lengths = {1, 1, 1, 1, 1}, .head_dim = 64}, fresh_seed() + 33);
  const Result r = run(in, recipe("mxfp8-exact"));
  const cpu::OracleResult t = truth(in);
  EXPECT_LT(relative_l2(r.o, t.o), 0.04);
  double d_q = 0, d_v = 0;
  for (const float x : r.d_q) d_q = std::max(d_q, std::abs(static_cast<double>(x)));
  for (const float x : r.d_v) d_v = std::max(d_v, std::abs(static_cast<double>(x)));
  EXPECT_LT(d_q, 0.03 * d_v);
}

}  // namespace
}  // namespace flamia::test
