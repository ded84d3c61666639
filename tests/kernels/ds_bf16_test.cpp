// SPDX-License-Identifier: Apache-2.0
// dS in BF16: rounded once, no scale; K and Q enter dQ and dK as the values of their codes.
#include "kernels/attention_case.hpp"

namespace flamia::test {
namespace {

double wrong(const std::vector<float>& got, const std::vector<double>& right) { return 1 - cosine(got, right); }

/// What two E4M3 payloads add to the error of dQ and dK (a fifth of it, numerics.md §0) is gone; O and dV are the same bits.
TEST(DsBf16, LeavesTheErrorOfTheOperands) {
  const Input in = normal_input({.lengths = {700}, .query_heads = 2, .key_heads = 1}, fresh_seed() + 110);
  const cpu::OracleResult t = truth(in);
  for (const std::string name : {"mxfp8", "mxfp8-exact"}) {
    const Result codes = run(in, recipe(name + " ds=e4m3")), bf16 = run(in, recipe(name + " ds=bf16"));
    std::cout << "[ measured ] " << name << " 1 - cosine of dQ " << wrong(codes.d_q, t.d_q) << " -> " << wrong(bf16.d_q, t.d_q)
              << ", dK " << wrong(codes.d_k, t.d_k) << " -> " << wrong(bf16.d_k, t.d_k) << std::endl;
    EXPECT_LT(wrong(bf16.d_q, t.d_q), .92 * wrong(codes.d_q, t.d_q)) << name;
    EXPECT_LT(wrong(bf16.d_k, t.d_k), .92 * wrong(codes.d_k, t.d_k)) << name;
    EXPECT_GE(wrong(codes.d_q, t.d_q), 1e-3) << name;  // not a comparison of nothing
    EXPECT_EQ(different_bits(codes.o, bf16.o) + different_bits(codes.d_v, bf16.d_v), 0u) << name;
    EXPECT_GT(different_bits(codes.d_q, bf16.d_q), 0u) << name;
  }
}

/// Heads so sharp that E4M3 payloads lose a part of dS, and a gradient of any size: BF16 has FP32's range and rounds nothing to zero.
TEST(DsBf16, NothingIsRoundedToZero) {
  Input in = normal_input({.lengths = {400}, .head_dim = 64}, fresh_seed() + 111);
  for (float& x : in.q) x = numerics::round_bf16(x * 6.f);
  for (float& x : in.d_o) x = numerics::round_bf16(x * 1e-4f);
  cpu::Probe codes, bf16;
  run(in, recipe("mxfp8 ds=e4m3"), {.probe = &codes});
  run(in, recipe("mxfp8 ds=bf16"), {.probe = &bf16});
  EXPECT_GT(codes.counts.ds_zero_q, codes.counts.ds_pairs / 20);
  // short of what BF16 itself cannot hold: exp2 ends at 2^-126, and BF16's subnormals below that
  EXPECT_LT(static_cast<double>(bf16.counts.ds_zero_q), 1e-4 * static_cast<double>(bf16.counts.ds_pairs));
  EXPECT_EQ(bf16.counts.ds_zero_q, bf16.counts.ds_zero_k);
  EXPECT_EQ(bf16.counts.ds_saturated_q + bf16.counts.ds_saturated_k, 0);
  EXPECT_LT(bf16.counts.ds_lost_q, 1e-12 * bf16.counts.ds_mass);
}

/// Powers of two move through exactly: K, Q and dO scaled by them give gradients scaled by them, whatever the exponents.
TEST(DsBf16, ScalesAreInTheValuesExactly) {
  const Input in = normal_input({.lengths = {130}, .query_heads = 2, .key_heads = 1, .head_dim = 64}, fresh_seed() + 112);
  for (const char* text : {"mxfp8 ds=bf16 dq=f32", "mxfp8-exact ds=bf16 dq=f32", "fp8-tensor ds=bf16 dq=f32"}) {
    const Result plain = run(in, recipe(text));
    Input scaled = in;  // the scores stay as they are
    for (float& x : scaled.q) x *= 0x1p30f;
    for (float& x : scaled.k) x *= 0x1p-30f;
    for (float& x : scaled.d_o) x *= 0x1p-9f;
    Result got = run(scaled, recipe(text));
    for (float& x : got.d_q) x *= 0x1p39f;
    for (float& x : got.d_k) x *= 0x1p-21f;
    EXPECT_EQ(different_bits(plain.d_q, got.d_q), 0u) << text;
    EXPECT_EQ(different_bits(plain.d_k, got.d_k), 0u) << text;
  }
}

/// The greatest finite numbers in a key that earlier rows do not see, or in a query that later keys do not: their codes times scale are
/// beyond FP32, the values in BF16 are finite, and 0 times them is 0.
TEST(DsBf16, LargestNumbersBehindTheMaskDoNotMatter) {
  const Input in = normal_input({.lengths = {200}, .head_dim = 64}, fresh_seed() + 113);
  Input key = in, query = in;
  for (int c = 0; c < 64; ++c) key.k_row(150, 0)[c] = query.q_row(150, 0)[c] = c % 2 ? 3.38e38f : -3.38e38f;
  const auto part = [](const std::vector<float>& x, std::ptrdiff_t begin, std::ptrdiff_t end) {
    return std::vector<float>(x.begin() + begin * 64, x.begin() + end * 64);
  };
  for (const char* text : {"mxfp8-exact ds=bf16", "mxfp8-exact ds=bf16 rotate=off"}) {
    const Result before = run(in, recipe(text)), large_key = run(key, recipe(text)), large_query = run(query, recipe(text));
    EXPECT_EQ(different_bits(part(before.d_q, 0, 150), part(large_key.d_q, 0, 150)), 0u) << text;
    EXPECT_EQ(different_bits(part(before.d_k, 151, 200), part(large_query.d_k, 151, 200)), 0u) << text;
    EXPECT_GT(different_bits(part(before.d_q, 150, 151), part(large_key.d_q, 150, 151)), 0u) << text;  // it was there
  }
}

/// With the model of the 13-bit accumulator the products of dS stay in FP32: dK differs less from the FP32 result than with E4M3 dS.
TEST(DsBf16, ItsProductsDoNotUseTheFp8Accumulator) {
  Input in = normal_input({.lengths = {500}, .head_dim = 64, .mask = {false, -1, -1}}, fresh_seed() + 114);
  const auto loss = [&](const std::string& text) {
    return relative_l2(run(in, recipe(text + " acc=hopper13 promote=128:0")).d_k, run(in, recipe(text)).d_k);
  };
  EXPECT_LT(loss("mxfp8-exact ds=bf16"), loss("mxfp8-exact ds=e4m3"));
}

}  // namespace
}  // namespace flamia::test
