// SPDX-License-Identifier: Apache-2.0
// Cosines of a recipe's results and the bars that they must reach, or as a control must miss.
#pragma once
#include "kernels/attention_case.hpp"

namespace flamia::test {

/// N(0, 1), but a channel of Q and K eight times as large and one of V sixteen times: D and dP must then agree about V.
inline Input outlier_channels(std::uint32_t seed) {
  Input in = normal_input({.lengths = {300, 140}, .query_heads = 2, .key_heads = 2}, seed);
  for (std::int64_t token = 0; token < in.problem.tokens; ++token)
    for (int head = 0; head < 2; ++head)
      in.q_row(token, head)[5] *= 8, in.k_row(token, head)[5] *= 8, in.v_row(token, head)[5] *= 16;
  return in;
}

struct Bars {
  double o, d_q, d_k, d_v;
};

struct Measured {
  double o = 0, d_q = 0, d_k = 0, d_v = 0;  // mean cosine over the heads
  std::vector<double> worst_d_q;            // per head
};

inline Measured measure(const Input& in, const Result& r, const cpu::OracleResult& t) {
  const Problem& p = in.problem;
  Measured m;
  for (int h = 0; h < p.query_heads; ++h) {
    m.o += cosine(head_of(r.o, h, p.query_heads, p.head_dim), head_of(t.o, h, p.query_heads, p.head_dim)) / p.query_heads;
    if (r.d_q.empty()) continue;
    const auto d_q = head_of(r.d_q, h, p.query_heads, p.head_dim), true_d_q = head_of(t.d_q, h, p.query_heads, p.head_dim);
    m.d_q += cosine(d_q, true_d_q) / p.query_heads;
    m.worst_d_q.push_back(worst_row(d_q, true_d_q, p.head_dim));
  }
  for (int h = 0; h < p.key_heads && !r.d_k.empty(); ++h) {
    m.d_k += cosine(head_of(r.d_k, h, p.key_heads, p.head_dim), head_of(t.d_k, h, p.key_heads, p.head_dim)) / p.key_heads;
    m.d_v += cosine(head_of(r.d_v, h, p.key_heads, p.head_dim), head_of(t.d_v, h, p.key_heads, p.head_dim)) / p.key_heads;
  }
  return m;
}

inline void print(const Measured& m, const std::string& what) {
  std::cout << "[ measured ] " << what << " O " << m.o << " dQ " << m.d_q << " dK " << m.d_k << " dV " << m.d_v << " w";
  for (const double w : m.worst_d_q) std::cout << " " << w;
  std::cout << std::endl;
}

inline void expect_bars(const Measured& m, const Bars& bars, const std::string& what) {
  print(m, what);
  EXPECT_GE(m.o, bars.o) << what;
  EXPECT_GE(m.d_q, bars.d_q) << what;
  EXPECT_GE(m.d_k, bars.d_k) << what;
  EXPECT_GE(m.d_v, bars.d_v) << what;
}

inline Measured measure(const Input& in, const Recipe& r, const cpu::OracleResult& t) { return measure(in, run(in, r), t); }

/// Gradients count for recipes that train.
inline void expect_bars(const Input& in, const Recipe& r, const cpu::OracleResult& t, const Bars& bars) {
  expect_bars(measure(in, r, t), r.trains ? bars : Bars{bars.o, 0, 0, 0}, r.name());
}

/// A control: O, and the gradients if there are any, fall short of the bars.
inline void expect_missed(const Input& in, const Recipe& r, const cpu::OracleResult& t, const Bars& bars) {
  const Measured m = measure(in, r, t);
  print(m, "control: " + r.name());
  EXPECT_LT(m.o, bars.o) << r.name();
  if (r.trains) {
    EXPECT_LT(m.d_q, bars.d_q) << r.name();
  }
}

}  // namespace flamia::test
