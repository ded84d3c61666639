// SPDX-License-Identifier: Apache-2.0
// Training with a smoothed Q: the mean of a tile's queries meets what K's codes stand for in both passes, and dK has the mean's part.
#include "kernels/recipe_accuracy.hpp"

namespace flamia::test {
namespace {

/// One channel of all queries is large: it takes the range of their codes, and its mean gives it back.
void add_bias(Input& in, float size) {
  for (std::size_t i = 3; i < in.q.size(); i += static_cast<std::size_t>(in.problem.head_dim))
    in.q[i] = numerics::round_bf16(in.q[i] + size);
}

/// D of the scores, so that what other operands cost a few rows does not hide it.
TEST(SmoothQ, SagebwdTrainsWithIt) {
  Input in =
      normal_input({.lengths = {300, 1, 140}, .query_heads = 4, .key_heads = 2, .head_dim = 80, .tail = 3}, fresh_seed() + 600);
  add_bias(in, 20.f);
  const cpu::OracleResult t = truth(in);
  const Measured with = measure(in, recipe("sagebwd d=scores smooth-q=on"), t),
                 without = measure(in, recipe("sagebwd d=scores"), t);
  print(with, "Q biased, sagebwd d=scores smooth-q=on");
  print(without, "Q biased, sagebwd d=scores");
  for (const auto& [on, off] : {std::pair{with.o, without.o}, {with.d_q, without.d_q}, {with.d_k, without.d_k}})
    EXPECT_LT(1 - on, .6 * (1 - off));
  EXPECT_GT(with.d_v, without.d_v);
}

/// The codes' part of Q in BF16: what is left is FP32's rounding of the mean's part. Means of another document's tokens are the control.
TEST(SmoothQ, TheMeanIsGivenBackToScoresAndDk) {
  Input in = normal_input({.lengths = {300, 45}, .query_heads = 2, .key_heads = 1, .head_dim = 64}, fresh_seed() + 601);
  for (float& x : in.q) x = numerics::round_bf16(x + 1.f);
  const cpu::OracleResult t = truth(in);
  for (const char* text : {"bf16 smooth-q=on", "bf16 smooth-q=on smooth-k=on", "bf16 smooth-q=on tile=32x128",
                           "bf16 smooth-q=on rotate=on d=scores"}) {
    const Result r = run(in, recipe(text));
    EXPECT_LT(relative_l2(r.o, t.o), 6e-3) << text;
    EXPECT_LT(relative_l2(r.d_q, t.d_q), 1e-2) << text;
    EXPECT_LT(relative_l2(r.d_k, t.d_k), 1e-2) << text;
    EXPECT_LT(relative_l2(r.d_v, t.d_v), 6e-3) << text;
  }
  Input wrong = in;
  wrong.cu_seqlens[1] += 40;
  EXPECT_GT(relative_l2(run(wrong, recipe("bf16 smooth-q=on")).d_k, t.d_k), 5e-2);
}

/// The part of dK that the means of tiles of 32 queries have, in double: one document, one head, causal.
std::vector<double> mean_part(Input in) {
  const int n = static_cast<int>(in.problem.tokens), d = in.problem.head_dim;
  const double scale = 1 / std::sqrt(static_cast<double>(d));
  const auto dot = [d](const float* a, const float* b) {
    double sum = 0;
    for (int c = 0; c < d; ++c) sum += static_cast<double>(a[c]) * static_cast<double>(b[c]);
    return sum;
  };
  std::vector<double> made(in.k.size());
  for (int begin = 0; begin < n; begin += 32) {
    const int end = std::min(begin + 32, n);
    std::vector<double> mean(static_cast<std::size_t>(d)), column(static_cast<std::size_t>(n));  // column: sums of dS
    for (int i = begin; i < end; ++i) {
      double l = 0, mean_d_p = 0;
      std::vector<double> p(static_cast<std::size_t>(i) + 1);
      for (int j = 0; j <= i; ++j) l += p[static_cast<std::size_t>(j)] = std::exp(scale * dot(in.q_row(i, 0), in.k_row(j, 0)));
      for (int j = 0; j <= i; ++j) mean_d_p += p[static_cast<std::size_t>(j)] / l * dot(in.d_o_row(i, 0), in.v_row(j, 0));
      for (int j = 0; j <= i; ++j)
        column[static_cast<std::size_t>(j)] +=
            p[static_cast<std::size_t>(j)] / l * (dot(in.d_o_row(i, 0), in.v_row(j, 0)) - mean_d_p);
      for (int c = 0; c < d; ++c) mean[static_cast<std::size_t>(c)] += static_cast<double>(in.q_row(i, 0)[c]) / (end - begin);
    }
    for (std::size_t j = 0; j < column.size(); ++j)
      for (std::size_t c = 0; c < mean.size(); ++c) made[j * mean.size() + c] += scale * column[j] * mean[c];
  }
  return made;
}

double loss(const Input& in, const Recipe& r) {
  const Result got = run(in, r, {.backward = false});
  double sum = 0;
  for (std::size_t i = 0; i < got.o.size(); ++i) sum += static_cast<double>(got.o[i]) * static_cast<double>(in.d_o[i]);
  return sum;
}

/// A step along a random direction of K or Q changes the loss by the gradient's share of it; without the mean's part of dK it would not.
TEST(SmoothQ, FiniteDifferences) {
  Input in = normal_input({.lengths = {40}, .head_dim = 16}, fresh_seed() + 602);
  for (float& x : in.q) x = numerics::round_bf16(x + 3.f);
  const Recipe r = recipe("bf16 smooth-q=on smooth-k=on tile=32x128");
  const Result got = run(in, r);
  const double step = .06;  // large beside the steps of BF16, in which the loss moves
  const std::vector<double> of_means = mean_part(in);
  for (const bool of_k : {true, false}) {
    double found = 0, difference = 0, without = 0;
    for (std::uint32_t direction = 0; direction < 8; ++direction) {
      const Input u = normal_input({.lengths = {40}, .head_dim = 16}, fresh_seed() + 610 + direction);
      const auto moved = [&](double by) {
        Input at = in;
        std::vector<float>& x = of_k ? at.k : at.q;
        for (std::size_t i = 0; i < x.size(); ++i) x[i] += static_cast<float>(by) * u.k[i];
        return loss(at, r);
      };
      const double slope = (moved(step) - moved(-step)) / (2 * step);
      double told = 0, of_mean = 0;
      const std::vector<float>& gradient = of_k ? got.d_k : got.d_q;
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        told += static_cast<double>(gradient[i]) * static_cast<double>(u.k[i]);
        of_mean += of_means[i] * static_cast<double>(u.k[i]);
      }
      found += slope * slope;
      difference += (slope - told) * (slope - told);
      without += (slope - told + of_mean) * (slope - told + of_mean);
    }
    std::cout << "[ measured ] " << (of_k ? "dK " : "dQ ") << std::sqrt(difference / found) << ", without the mean's part of dK "
              << std::sqrt(without / found) << std::endl;
    EXPECT_LT(std::sqrt(difference / found), .2);
    if (of_k) {
      EXPECT_GT(std::sqrt(without / found), .4) << "control";
    }
  }
}

}  // namespace
}  // namespace flamia::test
