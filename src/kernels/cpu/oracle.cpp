// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/oracle.hpp"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <string>

#include "kernels/cpu/dense.hpp"
#include "kernels/cpu/oracle_product.hpp"
#include "schedule/mask.hpp"

namespace flamia::cpu {
namespace {

constexpr std::int64_t kRows = 64;  // queries that are worked on together

/// One (document, key head): its keys and values in both orders, and the gradients that its queries add to.
class DocumentHead {
 public:
  DocumentHead(const Problem& problem, const ForwardTensors& in, const TensorView* d_o, OracleResult& result)
      : problem_(problem), in_(in), d_o_(d_o), result_(result), dim_(problem.head_dim) {
    reach_ = schedule::reach_of(problem.mask.causal, problem.mask.left, problem.mask.right);
    scale_ = problem.scale != 0.f ? static_cast<double>(problem.scale) : 1.0 / std::sqrt(static_cast<double>(dim_));
  }

  void run(const schedule::DocumentRange& document, int key_head) {
    range_ = document;
    padded_ = (range_.length + 15) / 16 * 16;
    key_head_ = key_head;
    load(in_.k, k_, k_t_);
    load(in_.v, v_, v_t_);
    d_k_.assign(static_cast<std::size_t>(padded_ * dim_), 0.0);
    d_v_ = d_k_;
    const int group = problem_.query_heads / problem_.key_heads;
    for (int h = key_head * group; h < (key_head + 1) * group; ++h)
      for (std::int64_t q0 = 0; q0 < range_.length; q0 += kRows) attend(h, q0, std::min(q0 + kRows, range_.length));
    if (!d_o_) return;
    for (std::int64_t j = 0; j < range_.length; ++j)
      for (int c = 0; c < dim_; ++c) {
        const std::size_t to = index(j, key_head, problem_.key_heads, c), from = static_cast<std::size_t>(j * dim_ + c);
        result_.d_k[to] = scale_ * d_k_[from];
        result_.d_v[to] = d_v_[from];
      }
  }

 private:
  using Matrix = std::vector<double>;

  std::size_t index(std::int64_t position, int head, int heads, int c) const {
    return static_cast<std::size_t>(((range_.start + position) * heads + head) * dim_ + c);
  }

  void load(const TensorView& tensor, Matrix& rows, Matrix& columns) const {
    rows.assign(static_cast<std::size_t>(padded_ * dim_), 0.0);
    columns = rows;
    std::vector<float> row(static_cast<std::size_t>(dim_));
    for (std::int64_t j = 0; j < range_.length; ++j) {
      read_row(tensor, range_.start + j, key_head_, problem_.key_heads, dim_, row.data());
      for (int c = 0; c < dim_; ++c)
        rows[static_cast<std::size_t>(j * dim_ + c)] = columns[static_cast<std::size_t>(c * padded_ + j)] =
            row[static_cast<std::size_t>(c)];
    }
  }

  void load_queries(const TensorView& tensor, int head, std::int64_t q0, std::int64_t q1, Matrix& rows) const {
    rows.assign(static_cast<std::size_t>(kRows * dim_), 0.0);
    std::vector<float> row(static_cast<std::size_t>(dim_));
    for (std::int64_t i = q0; i < q1; ++i) {
      read_row(tensor, range_.start + i, head, problem_.query_heads, dim_, row.data());
      std::copy(row.begin(), row.end(), rows.begin() + (i - q0) * dim_);
    }
  }

  void attend(int head, std::int64_t q0, std::int64_t q1) {
    // the keys that any of these queries sees, widened to whole groups of 8 for the product
    const std::int64_t first = schedule::visible_keys(reach_, q0, range_.length).begin / 8 * 8;
    const std::int64_t last = schedule::visible_keys(reach_, q1 - 1, range_.length).end;
    const std::int64_t keys = std::max<std::int64_t>(0, (last - first + 7) / 8 * 8), rows = q1 - q0;
    load_queries(in_.q, head, q0, q1, q_);
    p_.assign(static_cast<std::size_t>(kRows * keys), 0.0);
    double_product(q_.data(), dim_, 1, k_t_.data() + first, padded_, p_.data(), keys, rows, keys, dim_);
    for (std::int64_t r = 0; r < rows; ++r) softmax(head, q0 + r, first, keys, p_.data() + r * keys);
    o_.assign(static_cast<std::size_t>(kRows * dim_), 0.0);
    double_product(p_.data(), keys, 1, v_.data() + first * dim_, dim_, o_.data(), dim_, rows, dim_, keys);
    for (std::int64_t r = 0; r < rows; ++r)
      std::copy_n(o_.begin() + r * dim_, dim_,
                  result_.o.begin() + static_cast<std::ptrdiff_t>(index(q0 + r, head, problem_.query_heads, 0)));
    if (d_o_) differentiate(head, q0, q1, first, keys);
  }

  /// Scores of one row to probabilities, in place; keys the row does not see get 0.
  void softmax(int head, std::int64_t i, std::int64_t first, std::int64_t keys, double* row) {
    const schedule::Interval seen = schedule::visible_keys(reach_, i, range_.length);
    double top = -std::numeric_limits<double>::infinity(), sum = 0;
    for (std::int64_t j = seen.begin; j < seen.end; ++j) top = std::max(top, scale_ * row[j - first]);
    for (std::int64_t j = 0; j < keys; ++j) {
      row[j] = seen.contains(first + j) ? std::exp(scale_ * row[j] - top) : 0.0;
      sum += row[j];
    }
    for (std::int64_t j = 0; j < keys && sum != 0; ++j) row[j] /= sum;
    if (!seen.empty()) result_.lse[static_cast<std::size_t>(head * problem_.tokens + range_.start + i)] = top + std::log(sum);
  }

  void differentiate(int head, std::int64_t q0, std::int64_t q1, std::int64_t first, std::int64_t keys) {
    const std::int64_t rows = q1 - q0;
    load_queries(*d_o_, head, q0, q1, g_);
    ds_.assign(static_cast<std::size_t>(kRows * keys), 0.0);
    double_product(g_.data(), dim_, 1, v_t_.data() + first, padded_, ds_.data(), keys, rows, keys, dim_);
    for (std::int64_t r = 0; r < rows; ++r) {
      double d = 0;
      for (int c = 0; c < dim_; ++c) d += g_[static_cast<std::size_t>(r * dim_ + c)] * o_[static_cast<std::size_t>(r * dim_ + c)];
      for (std::int64_t j = 0; j < keys; ++j) {
        const auto at = static_cast<std::size_t>(r * keys + j);
        ds_[at] = p_[at] == 0.0 ? 0.0 : p_[at] * (ds_[at] - d);
      }
    }
    dq_.assign(static_cast<std::size_t>(kRows * dim_), 0.0);
    double_product(ds_.data(), keys, 1, k_.data() + first * dim_, dim_, dq_.data(), dim_, rows, dim_, keys);
    for (std::int64_t r = 0; r < rows; ++r)
      for (int c = 0; c < dim_; ++c)
        result_.d_q[index(q0 + r, head, problem_.query_heads, c)] = scale_ * dq_[static_cast<std::size_t>(r * dim_ + c)];
    double_product(ds_.data(), 1, keys, q_.data(), dim_, d_k_.data() + first * dim_, dim_, keys, dim_, rows);
    double_product(p_.data(), 1, keys, g_.data(), dim_, d_v_.data() + first * dim_, dim_, keys, dim_, rows);
  }

  const Problem& problem_;
  const ForwardTensors& in_;
  const TensorView* d_o_;
  OracleResult& result_;
  int dim_;
  double scale_;
  schedule::MaskReach reach_;
  schedule::DocumentRange range_{};
  std::int64_t padded_ = 0;
  int key_head_ = 0;
  Matrix k_, k_t_, v_, v_t_, d_k_, d_v_;  // [padded, dim] and [dim, padded]
  Matrix q_, g_, o_, dq_, p_, ds_;        // [kRows, dim], [kRows, keys]
};

}  // namespace

Status oracle(const Problem& problem, const schedule::Documents& documents, const ForwardTensors& inputs, const TensorView* d_o,
              int threads, OracleResult* result) {
  if (problem.query_heads <= 0 || problem.key_heads <= 0 || problem.query_heads % problem.key_heads != 0)
    return Status::invalid("query_heads = " + std::to_string(problem.query_heads) +
                           " must be a multiple of key_heads = " + std::to_string(problem.key_heads));
  if (problem.head_dim <= 0 || problem.head_dim % 8 != 0)
    return Status::invalid("head_dim = " + std::to_string(problem.head_dim) + " must be a multiple of 8");
  const std::size_t query_size =
      static_cast<std::size_t>(problem.tokens) * static_cast<std::size_t>(problem.query_heads * problem.head_dim);
  const std::size_t key_size =
      static_cast<std::size_t>(problem.tokens) * static_cast<std::size_t>(problem.key_heads * problem.head_dim);
  bool exhausted = false;
  try {
    *result = {};
    result->o.assign(query_size, 0.0);
    result->lse.assign(static_cast<std::size_t>(problem.query_heads * problem.tokens), std::numeric_limits<double>::infinity());
    if (d_o) {
      result->d_q.assign(query_size, 0.0);
      result->d_k.assign(key_size, 0.0);
      result->d_v.assign(key_size, 0.0);
    }
  } catch (const std::bad_alloc&) {
    exhausted = true;
  }
  const std::int64_t items = exhausted ? 0 : static_cast<std::int64_t>(documents.ranges().size()) * problem.key_heads;
#pragma omp parallel num_threads(threads > 0 ? threads : omp_get_num_procs()) reduction(|| : exhausted)
  {
    DocumentHead worker(problem, inputs, d_o, *result);
#pragma omp for schedule(dynamic)
    for (std::int64_t item = 0; item < items; ++item) {
      try {
        const schedule::DocumentRange& range = documents.ranges()[static_cast<std::size_t>(item / problem.key_heads)];
        if (range.length > 0) worker.run(range, static_cast<int>(item % problem.key_heads));
      } catch (const std::bad_alloc&) {
        exhausted = true;
      }
    }
  }
  if (exhausted)
    return {StatusCode::out_of_memory, "the float64 oracle keeps about 100 bytes an element of q; use fewer tokens or heads"};
  return {};
}

}  // namespace flamia::cpu
