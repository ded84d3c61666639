// SPDX-License-Identifier: Apache-2.0
// SageAttention3 (sage3, sage3-exact): bars, published orders, smoothing and what it owes to the scores.
#include "kernels/attention_case.hpp"
#include "kernels/recipe_accuracy.hpp"

namespace flamia::test {
namespace {

constexpr const char* kDirectP = "sage3 p1=e2m1/1x16/e4m3/amax";
constexpr const char* kReleasedP = "sage3 p1=e2m1/1x16/e4m3/amax/x0.00037202382";  // first level 1 / 2688
constexpr const char* kMxfp4 =
    "sage3 q1=e2m1/1x32/ue8m0/floor k1=e2m1/1x32/ue8m0/floor v1=e2m1/32x1/ue8m0/floor p1=e2m1/1x32/ue8m0/floor";

Input packed_normal(std::uint32_t offset, bool causal, int group = 1) {
  Shape shape{.lengths = {300, 45, 513, 1, 160}, .query_heads = 4, .key_heads = 4 / group, .mask = {causal, -1, -1}};
  return normal_input(shape, fresh_seed() + offset);
}

/// Row 0 of every document draws much of every query's attention: a key in the direction of the queries' common part, whose value is small.
void add_sink(Input& in, float strength) {
  for (std::size_t b = 0; b + 1 < in.cu_seqlens.size(); ++b)
    for (int head = 0; head < in.problem.key_heads; ++head)
      for (int c = 0; c < in.problem.head_dim; ++c) {
        in.k_row(in.cu_seqlens[b], head)[c] = c < 16 ? strength : 0.f;
        in.v_row(in.cu_seqlens[b], head)[c] *= 1.f / 64;
      }
  for (std::int64_t token = 0; token < in.problem.tokens; ++token)
    for (int head = 0; head < in.problem.query_heads; ++head)
      for (int c = 0; c < 16; ++c) in.q_row(token, head)[c] = numerics::round_bf16(in.q_row(token, head)[c] + 2.f);
  for (std::vector<float>* x : {&in.k, &in.v})
    for (float& value : *x) value = numerics::round_bf16(value);
}

TEST(Sage3, BarsOnShortPackedDocuments) {
  constexpr Bars kBars{.98, 0, 0, 0};
  for (const bool causal : {true, false})
    for (const int group : {1, 2}) {
      const Input in = packed_normal(400, causal, group);
      const cpu::OracleResult t = truth(in, false);
      for (const char* text : {"sage3", "sage3-exact", kReleasedP}) expect_bars(in, recipe(text), t, kBars);
      expect_missed(in, recipe(kMxfp4), t, kBars);
      const Measured per_group = measure(in, recipe("sage3"), t);
      const Measured per_tensor =
          measure(in, recipe("sage3 q1=e2m1/tensor/f32/amax k1=e2m1/tensor/f32/amax v1=e2m1/allx1/e4m3/amax"), t);
      EXPECT_LT(per_tensor.o, per_group.o - .002) << "one scale for all tokens";
      const Result r = run(in, recipe("sage3"));
      double worst = 0;
      for (std::size_t i = 0; i < t.lse.size(); ++i) worst = std::max(worst, std::abs(static_cast<double>(r.lse[i]) - t.lse[i]));
      EXPECT_LT(worst, 1.0) << "LSE";
    }
}

TEST(Sage3, PublishedOrdersHold) {
  Input in = packed_normal(401, false);
  add_sink(in, 3.f);
  const cpu::OracleResult t = truth(in, false);
  const auto o = [&](const char* text) {
    const Measured m = measure(in, recipe(text), t);
    print(m, std::string("sink, ") + text);
    return m.o;
  };
  const double two_level = o("sage3"), direct = o(kDirectP), released = o(kReleasedP), mxfp4 = o(kMxfp4);
  EXPECT_GT(two_level, direct) << "two levels against one, with a strong sink";
  EXPECT_GT(released, direct);
  EXPECT_GT(two_level, mxfp4) << "NVFP4 against MXFP4";
}

/// Components that all keys or all queries of a tile share take the codes' range; smoothing gives it back, LSE stays the true one.
TEST(Sage3, SmoothingTakesAwayWhatTokensShare) {
  Input in = packed_normal(402, true);
  for (std::int64_t token = 0; token < in.problem.tokens; ++token)
    for (int head = 0; head < 4; ++head)
      for (int c = 0; c < 128; c += 5) {
        in.k_row(token, head)[c] = numerics::round_bf16(in.k_row(token, head)[c] + 8.f);
        in.q_row(token, head)[c + 1] = numerics::round_bf16(in.q_row(token, head)[c + 1] - 6.f);
      }
  const cpu::OracleResult t = truth(in, false);
  const auto o = [&](const char* text) {
    const Measured m = measure(in, recipe(text), t);
    print(m, std::string("bias, ") + text);
    return m.o;
  };
  const double both = o("sage3"), keys = o("sage3 smooth-q=off"), queries = o("sage3 smooth-k=off"),
               none = o("sage3 smooth-q=off smooth-k=off");
  EXPECT_GT(both, .97);
  EXPECT_GT(both, keys);
  EXPECT_GT(keys, none);
  EXPECT_GT(both, queries);
  EXPECT_LT(none, .97);
  const Result r = run(in, recipe("sage3"));
  double worst = 0, largest = 0;
  for (std::size_t i = 0; i < t.lse.size(); ++i) {
    worst = std::max(worst, std::abs(static_cast<double>(r.lse[i]) - t.lse[i]));
    largest = std::max(largest, std::abs(t.lse[i]));
  }
  EXPECT_LT(worst, 1.5);
  EXPECT_GT(largest, 20.0) << "what smoothing takes from the scores is large, and LSE has it back";
}

/// With Q in BF16 less its mean, the rank-one correction must restore the scores to FP32 rounding.
TEST(Sage3, TheRankOneCorrectionRestoresTheScores) {
  Input in = packed_normal(403, true, 2);
  for (float& x : in.q) x = numerics::round_bf16(x + 1.f);
  const cpu::OracleResult t = truth(in, false);
  const Recipe smoothed = recipe("bf16 trains=off smooth-q=on smooth-k=on");
  EXPECT_LT(relative_l2(run(in, smoothed).o, t.o), 6e-3);
  EXPECT_LT(relative_l2(run(in, smoothed).lse, t.lse), 1e-3);
  Input wrong = in;  // control: a mean of another tile, here of another document's tokens
  wrong.cu_seqlens[1] += 40;
  EXPECT_GT(relative_l2(run(wrong, smoothed).o, t.o), 5e-2);
}

/// Means of 64 queries follow what 64 queries share, and the correction is each one's own; those of 128 do not.
TEST(Sage3, TilesOfQueries) {
  Input in = packed_normal(404, true, 2);
  for (std::size_t b = 0; b + 1 < in.cu_seqlens.size(); ++b)
    for (std::int64_t token = in.cu_seqlens[b]; token < in.cu_seqlens[b + 1]; ++token)
      for (int head = 0; head < 4; ++head)
        for (int c = 0; c < 128; c += 5) {
          float& x = in.q_row(token, head)[c];
          x = numerics::round_bf16(x + ((token - in.cu_seqlens[b]) / 64 % 2 == 0 ? 8.f : -8.f));
        }
  const cpu::OracleResult t = truth(in, false);
  EXPECT_LT(relative_l2(run(in, recipe("bf16 trains=off smooth-q=on smooth-k=on tile=64x128")).o, t.o), 6e-3);
  EXPECT_LT(relative_l2(run(in, recipe("bf16 trains=off smooth-q=on smooth-k=on tile=32x128")).lse, t.lse), 1e-3);
  const double whole = relative_l2(run(in, recipe("sage3")).o, t.o),
               half = relative_l2(run(in, recipe("sage3 tile=64x128")).o, t.o);
  EXPECT_LT(half, .8 * whole);
  EXPECT_NEAR(relative_l2(run(in, recipe("sage3 tile=32x128")).o, t.o), half, .1 * half);
}

/// 64 keys that have 2^-20 of the others' attention and all of the values: below the first level of the others E4M3 has no scale for them.
TEST(Sage3, TilesOfKeys) {
  Input in = normal_input({.lengths = {128, 100}, .mask = {false, -1, -1}}, fresh_seed() + 405);
  for (std::int64_t token = 0; token < in.problem.tokens; ++token) {
    const bool faint = (token < 128 ? token : token - 128) >= 64;
    for (int c = 0; c < 128; ++c) {
      in.q_row(token, 0)[c] = c == 0 ? 8.f : 0.f;
      in.k_row(token, 0)[c] = c == 0 && faint ? -20.f : 0.f;
      if (!faint) in.v_row(token, 0)[c] = 0.f;
    }
  }
  in.problem.scale = 0.0866433976f;  // ln 2 / 8: a key's first channel is its attention's power of two
  const cpu::OracleResult t = truth(in, false);
  for (const std::string codes : {"sage3 smooth-k=off", "sage3 smooth-k=off exp2=mitchell"}) {
    for (const char* tile : {" tile=128x64", " tile=128x32"})
      EXPECT_LT(relative_l2(run(in, recipe(codes + tile)).o, t.o), .2) << codes << tile;
    EXPECT_GT(relative_l2(run(in, recipe(codes)).o, t.o), .9) << codes;
  }
}

TEST(Sage3, WindowsAreRefusedWithWhatHasThem) {
  Problem p;
  p.tokens = 64, p.head_dim = 64, p.query_heads = p.key_heads = 1;
  p.mask = {true, 20, -1};
  const Status status = cpu::check(p, recipe("sage3"));
  EXPECT_EQ(status.code(), StatusCode::unsupported);
  EXPECT_NE(status.message().find("use \"sage3 smooth-q=off smooth-k=off\""), std::string::npos) << status.message();
  EXPECT_TRUE(cpu::check(p, recipe("sage3-exact")).ok());
}

// ---- codes of P from the bits of the scores ----

double equal_codes(const Input& in, const std::string& text) {
  cpu::Probe probe;
  run(in, recipe(text), {.probe = &probe});
  const double share = static_cast<double>(probe.counts.p_equal) / static_cast<double>(probe.counts.p_compared);
  std::cout << "[ measured ] " << text << ": equal codes " << share << std::endl;
  return share;
}

TEST(LogCodes, ShareOfEqualCodes) {
  const Input in = packed_normal(404, false);
  for (const char* base : {"hwfp4-direct", "sage3"}) {
    const std::string text(base);
    const double direct = equal_codes(in, text + (text == "sage3" ? " exp2=direct" : ""));
    EXPECT_GT(direct, .55);
    EXPECT_LT(direct, .70);
    EXPECT_GT(equal_codes(in, text + " exp2=mitchell"), .98);
    EXPECT_LT(equal_codes(in, text + " exp2=schraudolph"), .98);
  }
}

TEST(LogCodes, AccuracyFollowsTheCodes) {
  const Input in = packed_normal(405, true);
  const cpu::OracleResult t = truth(in, false);
  const auto o = [&](const char* text) {
    const Measured m = measure(in, recipe(text), t);
    print(m, text);
    return m.o;
  };
  const double exact = o("sage3"), mitchell = o("sage3 exp2=mitchell"), direct = o("sage3 exp2=direct");
  EXPECT_GT(mitchell, exact - 5e-4);
  EXPECT_LT(direct, exact - 5e-3);
  EXPECT_GT(o("hwfp4-direct"), .85);
}

}  // namespace
}  // namespace flamia::test
