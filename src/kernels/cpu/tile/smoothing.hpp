// SPDX-License-Identifier: Apache-2.0
// What smoothing owes to the scores and to dK. With q' the mean of the query's tile and k' the mean of the document's keys
// (quantize/means.hpp):
//
//   q_i . k_j = (q_i - q') . (k_j - k') + q' . (k_j - k') + q_i . k'
//
// The first term is the quantised product, the second is added in FP32, the third is the same for all keys of a row: the softmax does not
// see it, LSE gets it back. A recipe that trains takes what K's codes stand for in the second term too: then the query that acts is the mean
// plus what its codes stand for, the backward pass has the same scores without K itself, and dK is dS times that query.
#pragma once
#include "kernels/cpu/dense.hpp"
#include "kernels/cpu/tile/scores.hpp"
#include "numerics/hadamard.hpp"

namespace flamia::cpu::FLAMIA_ISA {

namespace detail {

/// A caller's row as it is quantised: rotated if the recipe does that.
static void read_rotated(const Settings& s, const TensorView& tensor, std::int64_t token, int head, int heads, float* out) {
  read_row(tensor, token, head, heads, s.head_dim, out);
  if (s.rotate && s.head_dim == 64) numerics::rotate<64>(out);
  if (s.rotate && s.head_dim == 128) numerics::rotate<128>(out);
}

static const float* mean_row(const Settings& s, const Means& means, const Document& document, std::int64_t position, int head,
                             int heads) {
  const std::int64_t block = document.blocks_before[means.block_size] + position / means.rows;
  return means.values + (block * heads + head) * s.head_dim;
}

static float dot(const float* a, const float* b, int n) {
  float sum = 0.f;
  for (int c = 0; c < n; ++c) sum = numerics::fma(a[c], b[c], sum);
  return sum;
}

/// y[j][i] = y * (the rest of the score's factors) + q' . k_j * factor: the score itself. key(j) is where k_j lies, and its factor.
template <class Key>
static void add_mean_scores(const Settings& s, const Means& q_means, const Document& document, int head, const TileShape& t,
                            const Buffers& b, Key key) {
  TileRows& rows = *b.rows;
  const float unit = numerics::mul(rows.q_factor, rows.k_factor);
  for (int i = 0; i < t.width; ++i)
    rows.lane[i] = i < t.queries ? times_pow2(numerics::mul(unit, rows.q_scale[i]), rows.q_exponent[i]) : 0.f;
  for (int j = 0; j < t.keys; ++j) {
    if (rows.k_flagged[j]) continue;  // its pairs are NaN already
    const auto [k, factor] = key(j);
    float* y = b.scores + j * kTile;
    for (int begin = 0; begin < t.queries; begin += s.q_mean_rows) {
      const int end = numerics::min_of(begin + s.q_mean_rows, t.width);
      const float* mean = mean_row(s, q_means, document, t.q0 + begin, head, s.query_heads);
      const float score = numerics::mul(dot(mean, k, s.head_dim), factor);
      for (int i = begin; i < end; ++i) y[i] = numerics::fma(y[i], rows.lane[i], score);
    }
  }
}

struct KeyRow {
  const float* values;
  float factor;
};

}  // namespace detail

/// The mean's part of the scores, of what K's codes in b.k stand for: the same bits in both passes.
static void add_mean_scores_of_codes(const Settings& s, const Means& q_means, const Document& document, int head,
                                     const TileShape& t, const Buffers& b) {
  const TileRows& rows = *b.rows;
  detail::add_mean_scores(s, q_means, document, head, t, b, [&](int j) {
    return detail::KeyRow{b.k + j * s.head_dim, times_pow2(numerics::mul(rows.k_factor, rows.k_scale[j]), rows.k_exponent[j])};
  });
}

/// The same of K itself, in FP32, less its mean: for inference.
static void add_mean_scores_of_keys(const ForwardCall& call, const Item& item, int key_head, const TileShape& t, const Buffers& b) {
  const Settings& s = *call.settings;
  const Document& document = item.document;
  const float* k_mean = s.smooth_k ? detail::mean_row(s, call.k_means, document, t.k0, key_head, s.key_heads) : nullptr;
  detail::add_mean_scores(s, call.q_means, document, item.head, t, b, [&](int j) {
    float* key = b.part;
    detail::read_rotated(s, call.k_rows, document.start + t.k0 + j, key_head, s.key_heads, key);
    for (int c = 0; c < s.head_dim && k_mean; ++c) key[c] = numerics::add(key[c], -k_mean[c]);
    return detail::KeyRow{key, 1.f};
  });
}

/// b.sum2[j] += the sum of dS over the queries that share a mean, times that mean: the mean's part of dK, in units of dO's factor. dS before it is
/// rounded: the sum takes one FP32 number a key, and the mean may be far greater than what is left of Q.
static void add_mean_gradients(const BackwardCall& call, const Document& document, int head, const TileShape& t, const Buffers& b) {
  const Settings& s = *call.settings;
  const TileRows& rows = *b.rows;
  for (int j = 0; j < t.keys; ++j)
    for (int begin = 0; begin < t.queries; begin += s.q_mean_rows) {
      const int first = numerics::max_of(begin, rows.first[j]),
                last = numerics::min_of(numerics::min_of(begin + s.q_mean_rows, t.queries), rows.last[j]);
      if (first >= last) continue;
      float sum = 0.f;
      for (int i = first; i < last; ++i)
        sum = numerics::add(sum, numerics::mul(times_pow2(b.ds[j * kTile + i], rows.g_exponent[i]), rows.g_scale[i]));
      const float* mean = detail::mean_row(s, call.q_means, document, t.q0 + begin, head, s.query_heads);
      float* out = b.sum2 + j * s.head_dim;
      for (int c = 0; c < s.head_dim; ++c) out[c] = numerics::fma(sum, mean[c], out[c]);
    }
}

/// c * (q_i . k'), the part of a row's scores that smoothing K takes away.
static float mean_key_score(const ForwardCall& call, const Item& item, std::int64_t position, const Buffers& b) {
  const Settings& s = *call.settings;
  const int key_head = item.head / (s.query_heads / s.key_heads);
  detail::read_rotated(s, call.q_rows, item.document.start + position, item.head, s.query_heads, b.k);
  const float* k_mean = detail::mean_row(s, call.k_means, item.document, position, key_head, s.key_heads);
  return numerics::mul(s.scale, detail::dot(b.k, k_mean, s.head_dim));
}

}  // namespace flamia::cpu::FLAMIA_ISA
