// SPDX-License-Identifier: Apache-2.0
// Gradients on the GPU against double precision on the unquantised input, at sizes where promotion and the row sums matter.
#include <iostream>

#include "support/float64.cuh"

namespace flamia::test {
namespace {

class GpuGradientsAccuracy : public GpuTest {};

struct Means {
  double d_q = 0, d_k = 0, d_v = 0, worst_d_q = 0;
};
Means means(const Input& in, const Result& got, const Gradients64& want) {
  const Problem& p = in.problem;
  Means m;
  for (int head = 0; head < p.query_heads; ++head) {
    const auto a = head_of(got.d_q, head, p.query_heads, p.head_dim), b = head_of(want.d_q, head, p.query_heads, p.head_dim);
    m.d_q += cosine(a, b) / p.query_heads;
    m.worst_d_q = std::max(m.worst_d_q, worst_row(a, b, p.head_dim));
  }
  for (int head = 0; head < p.key_heads; ++head) {
    m.d_k +=
        cosine(head_of(got.d_k, head, p.key_heads, p.head_dim), head_of(want.d_k, head, p.key_heads, p.head_dim)) / p.key_heads;
    m.d_v +=
        cosine(head_of(got.d_v, head, p.key_heads, p.head_dim), head_of(want.d_v, head, p.key_heads, p.head_dim)) / p.key_heads;
  }
  return m;
}
std::ostream& operator<<(std::ostream& out, const Means& m) {
  return out << "cosine dQ " << m.d_q << ", dK " << m.d_k << ", dV " << m.d_v << "; worst row of dQ " << m.worst_d_q;
}

/// The GPU's oracle is checked against the CPU's before anything is measured with it.
TEST_F(GpuGradientsAccuracy, TheOracleIsTheOracle) {
  for (const Mask mask : {Mask{true, -1, -1}, Mask{false, -1, -1}, Mask{false, 100, 40}}) {
    const Input in = normal_input({{1500, 0, 70}, 4, 2, 64, mask, 3}, fresh_seed());
    const cpu::OracleResult cpu = truth(in);
    const Gradients64 gpu = gradients64(in);
    EXPECT_LT(relative_l2(gpu.d_q, cpu.d_q), 1e-12);
    EXPECT_LT(relative_l2(gpu.d_k, cpu.d_k), 1e-12);
    EXPECT_LT(relative_l2(gpu.d_v, cpu.d_v), 1e-12);
  }
}

/// The bar of the recipes: mean over heads of the cosine of dQ at least .9976 (scores from NVFP4: .9906), causal, 4 documents of 4096 tokens, 16 heads
/// of 128 channels.
/// The worst row is reported: it is one of the first of a document, where dQ is what the 13-bit accumulator leaves of a difference.
TEST_F(GpuGradientsAccuracy, FourTimes4096) {
  constexpr double kBar = .9976, kNvfp4Bar = .9906;
  Input in = normal_input({{4096, 4096, 4096, 4096}, 16, 16, 128, {true, -1, -1}, 0}, fresh_seed());
  const Gradients64 exact = gradients64(in);
  for (const char* name : {"mxfp8", "mxfp8-exact", "mxfp8 ds=e4m3", "mxfp8-exact ds=e4m3"}) {
    const Means m = means(in, gpu_training(in, recipe(name), {false, DType::bf16}), exact);
    std::cout << "[ float64  ] " << name << ": " << m << std::endl;
    EXPECT_GE(m.d_q, kBar) << name;
    EXPECT_GE(m.d_k, kBar) << name;
    EXPECT_GE(m.d_v, .9985) << name;
  }
  for (const char* name : {"nvfp4", "nvfp4-exact"}) {
    const Means m = means(in, gpu_training(in, recipe(name), {false, DType::bf16}), exact);
    std::cout << "[ float64  ] " << name << ": " << m << std::endl;
    EXPECT_GE(m.d_q, kNvfp4Bar) << name;
    EXPECT_GE(m.d_k, kNvfp4Bar) << name;
    EXPECT_GE(m.d_v, kNvfp4Bar) << name;
    EXPECT_LT(m.d_q, kBar) << name;  // control: scores in 8 bits pass it
  }
  in.problem.scale = 1.1f / std::sqrt(128.f);  // control: a softmax scale that is a tenth off misses the bar
  EXPECT_LT(means(in, gpu_training(in, recipe("mxfp8"), {false, DType::bf16}), exact).d_q, kBar);
}

/// 65,536 queries see every key, and dO has the mean 1: dV is a sum of 65,536 terms of one sign, which the tensor core's accumulator alone
/// would lose (docs/numerics.md, section 11).
TEST_F(GpuGradientsAccuracy, PromotionAt65536Queries) {
  constexpr double kBar = 0.01;
  const auto make = [](std::int64_t length) {
    Input in = normal_input({{length}, 1, 1, 128, {false, -1, -1}, 0}, fresh_seed());
    for (float& x : in.d_o) x = numerics::round_bf16(x + 1.f);
    return in;
  };
  const Input in = make(65536);
  const Gradients64 exact = gradients64(in);
  for (const char* name : {"mxfp8", "mxfp8-exact", "mxfp8 ds=e4m3"}) {
    const Result got = gpu_training(in, recipe(name), {false, DType::f32});
    const Means m = means(in, got, exact);
    std::cout << "[ float64  ] " << name << ", 65,536 queries: relative L2 of dV " << relative_l2(got.d_v, exact.d_v) << "; " << m
              << std::endl;
    EXPECT_LT(relative_l2(got.d_v, exact.d_v), kBar) << name;
    EXPECT_GE(m.d_q, .9965) << name;
    EXPECT_GE(m.d_k, .9965) << name;
  }
  const Input few = make(4096);  // control: without promotion a sixteenth of the queries is enough to miss it
  const Gradients64 few_exact = gradients64(few);
  RunOptions options;
  options.threads = 16;
  EXPECT_GT(relative_l2(run(few, recipe("mxfp8 acc=hopper13 promote=128:0"), options).d_v, few_exact.d_v), kBar);
}

}  // namespace
}  // namespace flamia::test
