// SPDX-License-Identifier: Apache-2.0
// The float64 oracle against sums written out over pairs, and its gradients against finite differences.
#include "kernels/attention_case.hpp"

namespace flamia::test {
namespace {

/// Attention of one row by definition.
std::vector<double> naive_row(Input& in, std::int64_t start, std::int64_t length, std::int64_t i, int head, double* lse) {
  const Problem& p = in.problem;
  const int key_head = head / (p.query_heads / p.key_heads);
  std::vector<double> out(static_cast<std::size_t>(p.head_dim), 0.0);
  double sum = 0;
  for (std::int64_t j = 0; j < length; ++j) {
    const bool seen =
        (!p.mask.causal || j <= i) && (p.mask.left < 0 || j >= i - p.mask.left) && (p.mask.right < 0 || j <= i + p.mask.right);
    if (!seen) continue;
    double score = 0;
    for (int c = 0; c < p.head_dim; ++c)
      score += static_cast<double>(in.q_row(start + i, head)[c]) * static_cast<double>(in.k_row(start + j, key_head)[c]);
    const double weight = std::exp(score * static_cast<double>(p.scale));
    sum += weight;
    for (int c = 0; c < p.head_dim; ++c)
      out[static_cast<std::size_t>(c)] += weight * static_cast<double>(in.v_row(start + j, key_head)[c]);
  }
  for (double& x : out) x /= sum;
  *lse = std::log(sum);
  return out;
}

TEST(Oracle, EqualsTheDefinition) {
  for (const Mask mask : {Mask{true, -1, -1}, Mask{false, -1, -1}, Mask{true, 5, -1}, Mask{false, 7, 3}}) {
    Shape shape{.lengths = {70, 0, 1, 33}, .query_heads = 4, .key_heads = 2, .head_dim = 16, .mask = mask, .tail = 3};
    Input in = normal_input(shape, fresh_seed());
    in.problem.scale = 0.3f;
    const cpu::OracleResult result = truth(in, false);
    double greatest = 0;
    for (std::size_t b = 0; b + 1 < in.cu_seqlens.size(); ++b) {
      const std::int64_t start = in.cu_seqlens[b], length = in.cu_seqlens[b + 1] - start;
      for (std::int64_t i = 0; i < length; ++i)
        for (int head = 0; head < 4; ++head) {
          double lse = 0;
          const std::vector<double> row = naive_row(in, start, length, i, head, &lse);
          for (int c = 0; c < 16; ++c)
            greatest = std::max(greatest, std::abs(row[static_cast<std::size_t>(c)] -
                                                   result.o[static_cast<std::size_t>(((start + i) * 4 + head) * 16 + c)]));
          greatest = std::max(greatest, std::abs(lse - result.lse[static_cast<std::size_t>(head * in.problem.tokens + start + i)]));
        }
    }
    EXPECT_LT(greatest, 1e-12);
    EXPECT_EQ(result.lse.back(), INFINITY);
    EXPECT_EQ(result.o.back(), 0.0);
  }
}

/// Loss = sum of dO o O, whose gradients the backward pass claims to give.
double loss(const Input& in) {
  const cpu::OracleResult result = truth(in, false);
  double sum = 0;
  for (std::size_t i = 0; i < result.o.size(); ++i) sum += result.o[i] * static_cast<double>(in.d_o[i]);
  return sum;
}

TEST(Oracle, GradientsEqualFiniteDifferences) {
  for (const Mask mask : {Mask{true, -1, -1}, Mask{false, -1, -1}, Mask{false, 4, 2}}) {
    Shape shape{.lengths = {9, 5}, .query_heads = 2, .key_heads = 1, .head_dim = 16, .mask = mask};
    Input in = normal_input(shape, fresh_seed() + 1);
    const cpu::OracleResult result = truth(in);
    const float step = 1.f / 1024;
    double error = 0, control = 0, norm = 0;
    const auto compare = [&](std::vector<float>& x, const std::vector<double>& gradient) {
      for (std::size_t i = 0; i < x.size(); i += 3) {
        const float kept = x[i];
        x[i] = kept + step;
        const double above = loss(in), up = static_cast<double>(x[i]);
        x[i] = kept - step;
        const double below = loss(in), down = static_cast<double>(x[i]);
        x[i] = kept;
        const double slope = (above - below) / (up - down);
        error = std::max(error, std::abs(slope - gradient[i]));
        control = std::max(control, std::abs(slope - 1.02 * gradient[i]));
        norm = std::max(norm, std::abs(slope));
      }
    };
    compare(in.q, result.d_q);
    compare(in.k, result.d_k);
    compare(in.v, result.d_v);
    EXPECT_LT(error, 1e-4 * norm);
    EXPECT_GT(control, 1e-4 * norm) << "a gradient that is 2 % wrong must show";
  }
}

TEST(Oracle, DoesNotDependOnThreads) {
  Shape shape{.lengths = {200, 77}, .query_heads = 4, .key_heads = 2, .head_dim = 32};
  const Input in = normal_input(shape, fresh_seed() + 2);
  ForwardTensors tensors{view(in.q), view(in.k), view(in.v), in.cu_seqlens.data(), {}, nullptr};
  const TensorView d_o = view(in.d_o);
  cpu::OracleResult one, five;
  ASSERT_TRUE(cpu::oracle(in.problem, in.documents(), tensors, &d_o, 1, &one).ok());
  ASSERT_TRUE(cpu::oracle(in.problem, in.documents(), tensors, &d_o, 5, &five).ok());
  EXPECT_EQ(one.o, five.o);
  EXPECT_EQ(one.lse, five.lse);
  EXPECT_EQ(one.d_q, five.d_q);
  EXPECT_EQ(one.d_k, five.d_k);
  EXPECT_EQ(one.d_v, five.d_v);
}

}  // namespace
}  // namespace flamia::test
