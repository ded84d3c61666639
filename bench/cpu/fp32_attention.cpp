// SPDX-License-Identifier: Apache-2.0
#include "fp32_attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#define FLAMIA_ISA native
#include "kernels/cpu/tile/product.hpp"
#include "numerics/exp2.hpp"

namespace flamia::bench {
namespace {

using cpu::native::product;
constexpr int kTile = 128;
constexpr auto kModel = numerics::Accumulator::fp32;

std::int64_t round_up(std::int64_t x, std::int64_t n) { return (x + n - 1) / n * n; }

/// [dim][kTile] from rows [.., dim]; the lanes after `rows` are 0.
void transpose(const float* x, int rows, int dim, float* out) {
  for (int c0 = 0; c0 < dim; c0 += 16)
    for (int r0 = 0; r0 < kTile; r0 += 16)
      for (int c = c0; c < c0 + 16; ++c)
        for (int r = r0; r < r0 + 16; ++r) out[c * kTile + r] = r < rows ? x[r * dim + c] : 0.f;
}

struct Scratch {
  explicit Scratch(int dim) : q_t(static_cast<std::size_t>(dim * kTile)), g_t(q_t), part(q_t), scores(kTile * kTile), ds(scores) {}
  std::vector<float> q_t, g_t, part, scores, ds;
};

/// y[key][query] = 2^(score - reference of the query), 0 behind the diagonal.
void probabilities(float* y, const float* reference, float scale, std::int64_t q0, std::int64_t k0, int keys) {
  for (int j = 0; j < keys; ++j) {
    float* row = y + j * kTile;
    for (int i = 0; i < kTile; ++i) row[i] = numerics::exp2_polynomial<4>(numerics::fma(row[i], scale, -reference[i]));
    const auto first = static_cast<int>(std::min<std::int64_t>(std::max<std::int64_t>(k0 + j - q0, 0), kTile));
    std::fill(row, row + first, 0.f);
  }
}

void forward_tile(const Fp32Problem& p, Fp32Tensors& t, int head, std::int64_t q0, Scratch& s) {
  const std::int64_t base = head * p.tokens;
  const auto queries = static_cast<int>(std::min<std::int64_t>(kTile, p.tokens - q0));
  const float scale = 1.44269504f / std::sqrt(static_cast<float>(p.dim));
  float* o = t.o.data() + (base + q0) * p.dim;
  std::fill(o, o + queries * p.dim, 0.f);
  alignas(64) float m[kTile], next[kTile], l[kTile], factor[kTile];
  std::fill(m, m + kTile, -std::numeric_limits<float>::infinity());
  std::fill(l, l + kTile, 0.f);
  transpose(t.q.data() + (base + q0) * p.dim, queries, p.dim, s.q_t.data());
  for (std::int64_t k0 = 0; k0 <= q0; k0 += kTile) {
    const auto keys = static_cast<int>(std::min<std::int64_t>(kTile, p.tokens - k0));
    float* y = s.scores.data();
    product(kModel, {t.k.data() + (base + k0) * p.dim, p.dim, 1}, {s.q_t.data(), kTile}, y, kTile, keys, kTile, p.dim);
    std::copy(m, m + kTile, next);
    for (int j = 0; j < keys; ++j)
      for (int i = 0; i < kTile; ++i) {
        const float x = k0 + j <= q0 + i ? y[j * kTile + i] * scale : next[i];
        next[i] = x > next[i] ? x : next[i];
      }
    for (int i = 0; i < kTile; ++i) factor[i] = numerics::exp2_polynomial<4>(m[i] - next[i]), m[i] = next[i], l[i] *= factor[i];
    probabilities(y, m, scale, q0, k0, keys);
    for (int j = 0; j < keys; ++j)
      for (int i = 0; i < kTile; ++i) l[i] += y[j * kTile + i];
    product(kModel, {y, 1, kTile}, {t.v.data() + (base + k0) * p.dim, p.dim}, s.part.data(), p.dim, queries, p.dim, keys);
    for (int i = 0; i < queries; ++i)
      for (int c = 0; c < p.dim; ++c)
        o[i * p.dim + c] = numerics::fma(o[i * p.dim + c], factor[i], s.part[static_cast<std::size_t>(i * p.dim + c)]);
  }
  for (int i = 0; i < queries; ++i) {
    for (int c = 0; c < p.dim; ++c) o[i * p.dim + c] /= l[i];
    t.lse[static_cast<std::size_t>(base + q0 + i)] = m[i] + std::log2(l[i]);
  }
}

void backward_head(const Fp32Problem& p, Fp32Tensors& t, int head, Scratch& s) {
  const std::int64_t base = head * p.tokens;
  const float c_scale = 1.f / std::sqrt(static_cast<float>(p.dim)), scale = 1.44269504f * c_scale;
  const auto at = [&](std::vector<float>& x, std::int64_t token) { return x.data() + (base + token) * p.dim; };
  for (std::vector<float>* x : {&t.d_q, &t.d_k, &t.d_v}) std::fill(at(*x, 0), at(*x, 0) + p.tokens * p.dim, 0.f);
  std::vector<float> d(static_cast<std::size_t>(p.tokens));
  for (std::int64_t i = 0; i < p.tokens; ++i)
    for (int c = 0; c < p.dim; ++c) d[static_cast<std::size_t>(i)] += at(t.o, i)[c] * at(t.d_o, i)[c];
  alignas(64) float reference[kTile] = {}, row_d[kTile] = {};
  for (std::int64_t k0 = 0; k0 < p.tokens; k0 += kTile) {
    const auto keys = static_cast<int>(std::min<std::int64_t>(kTile, p.tokens - k0));
    for (std::int64_t q0 = k0; q0 < p.tokens; q0 += kTile) {
      const auto queries = static_cast<int>(std::min<std::int64_t>(kTile, p.tokens - q0));
      transpose(at(t.q, q0), queries, p.dim, s.q_t.data());
      transpose(at(t.d_o, q0), queries, p.dim, s.g_t.data());
      for (int i = 0; i < queries; ++i)
        reference[i] = t.lse[static_cast<std::size_t>(base + q0 + i)], row_d[i] = d[static_cast<std::size_t>(q0 + i)];
      float *y = s.scores.data(), *ds = s.ds.data();
      product(kModel, {at(t.k, k0), p.dim, 1}, {s.q_t.data(), kTile}, y, kTile, keys, kTile, p.dim);
      probabilities(y, reference, scale, q0, k0, keys);
      product(kModel, {y, kTile, 1}, {at(t.d_o, q0), p.dim}, at(t.d_v, k0), p.dim, keys, p.dim, queries, true);
      product(kModel, {at(t.v, k0), p.dim, 1}, {s.g_t.data(), kTile}, ds, kTile, keys, kTile, p.dim);
      for (int x = 0; x < keys * kTile; ++x) ds[x] = y[x] * (ds[x] - row_d[x % kTile]) * c_scale;
      product(kModel, {ds, kTile, 1}, {at(t.q, q0), p.dim}, at(t.d_k, k0), p.dim, keys, p.dim, queries, true);
      product(kModel, {ds, 1, kTile}, {at(t.k, k0), p.dim}, at(t.d_q, q0), p.dim, queries, p.dim, keys, true);
    }
  }
}

}  // namespace

Fp32Tensors::Fp32Tensors(const Fp32Problem& problem) {
  const auto size = static_cast<std::size_t>(round_up(problem.tokens * problem.heads * problem.dim, 16));
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  for (std::vector<float>* x : {&q, &k, &v, &d_o}) {
    x->resize(size);
    for (float& value : *x) value = normal(generator);
  }
  for (std::vector<float>* x : {&o, &d_q, &d_k, &d_v}) x->resize(size);
  lse.resize(static_cast<std::size_t>(problem.tokens * problem.heads));
}

void fp32_forward(const Fp32Problem& problem, Fp32Tensors& tensors, int threads) {
  const std::int64_t tiles = (problem.tokens + kTile - 1) / kTile, items = tiles * problem.heads;
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch(problem.dim);
#pragma omp for schedule(dynamic)
    for (std::int64_t i = 0; i < items; ++i) {
      const std::int64_t item = items - 1 - i;
      forward_tile(problem, tensors, static_cast<int>(item % problem.heads), item / problem.heads * kTile, scratch);
    }
  }
}

void fp32_backward(const Fp32Problem& problem, Fp32Tensors& tensors, int threads) {
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch(problem.dim);
#pragma omp for schedule(dynamic)
    for (int head = 0; head < problem.heads; ++head) backward_head(problem, tensors, head, scratch);
  }
}

}  // namespace flamia::bench
