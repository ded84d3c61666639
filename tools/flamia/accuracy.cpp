// SPDX-License-Identifier: Apache-2.0
#include "accuracy.hpp"

#include <algorithm>
#include <cmath>
#include <initializer_list>

namespace flamia::cli {

Deviation Accuracy::mean(Output output) const {
  Deviation mean;
  const std::vector<Deviation>& all = heads[output];
  for (const Deviation& head : all) {
    mean.cosine += head.cosine / static_cast<double>(all.size());
    mean.relative_l2 += head.relative_l2 / static_cast<double>(all.size());
    if (!(head.worst_row <= mean.worst_row)) mean.worst_row = head.worst_row;  // NaN stays
  }
  return mean;
}

Status make_oracle(const Inputs& inputs, const CallOptions& options, cpu::OracleResult* oracle) {
  ForwardTensors tensors;
  tensors.q = inputs.q.view(), tensors.k = inputs.k.view(), tensors.v = inputs.v.view();
  tensors.cu_seqlens = inputs.cu_seqlens.data();
  const TensorView d_o = inputs.d_o ? inputs.d_o->view() : TensorView{};
  return cpu::oracle(with_options(inputs.problem, options), inputs.documents, tensors, options.backward ? &d_o : nullptr,
                     options.threads, oracle);
}

namespace {

bool scales_span_heads(const Recipe& recipe) {
  for (const OperandPolicy* policy : {&recipe.q, &recipe.k, &recipe.v, &recipe.d_out, &recipe.p, &recipe.d_s})
    for (const Quantisation* form : {&policy->first, &policy->second})
      if (form->group.kind == Group::Kind::tensor) return true;
  return false;
}

HostTensor head_of(const HostTensor& tensor, int head, int dim) {
  HostTensor slice{tensor.dtype, 1, {}};
  const std::size_t row = static_cast<std::size_t>(dim) * size_of(tensor.dtype), heads = static_cast<std::size_t>(tensor.heads);
  for (std::size_t at = static_cast<std::size_t>(head) * row; at < tensor.bytes.size(); at += heads * row)
    slice.bytes.insert(slice.bytes.end(), tensor.bytes.begin() + static_cast<std::ptrdiff_t>(at),
                       tensor.bytes.begin() + static_cast<std::ptrdiff_t>(at + row));
  return slice;
}

/// One query head and its key head by themselves: the same numbers, if no scale spans heads.
Status count_head(const Inputs& inputs, const Recipe& recipe, const CallOptions& options, int head, cpu::ProbeCounts* counts) {
  const int dim = inputs.problem.head_dim, key_head = head / (inputs.problem.query_heads / inputs.problem.key_heads);
  Inputs slice;
  slice.problem = inputs.problem;
  slice.problem.query_heads = slice.problem.key_heads = 1;
  slice.q = head_of(inputs.q, head, dim), slice.k = head_of(inputs.k, key_head, dim), slice.v = head_of(inputs.v, key_head, dim);
  if (inputs.d_o) slice.d_o = head_of(*inputs.d_o, head, dim);
  slice.cu_seqlens = inputs.cu_seqlens;
  slice.documents = inputs.documents;
  CallResult ignored;
  cpu::Probe probe;
  Status s = attend(slice, recipe, options, &ignored, &probe);
  *counts = probe.counts;
  return s;
}

}  // namespace

Status measure_accuracy(const Inputs& inputs, const Recipe& recipe, const CallOptions& options, const cpu::OracleResult& oracle,
                        Accuracy* accuracy, cpu::Probe* probe) {
  CallResult result;
  if (Status s = attend(inputs, recipe, options, &result, probe); !s.ok()) return s;
  const Problem& p = inputs.problem;
  const std::vector<float> o = output_f32(result);
  const std::array<const std::vector<float>*, 4> got{&o, &result.d_q, &result.d_k, &result.d_v};
  const std::array<const std::vector<double>*, 4> want{&oracle.o, &oracle.d_q, &oracle.d_k, &oracle.d_v};
  *accuracy = {};
  for (int output = kO; output <= (options.backward ? kDv : kO); ++output) {
    const int heads = output <= kDq ? p.query_heads : p.key_heads;
    for (int head = 0; head < heads; ++head)
      accuracy->heads[output].push_back(
          deviation(*got[output], *want[output], inputs.documents.covered(), heads, p.head_dim, head));
  }
  if (probe == nullptr) return {};
  accuracy->counts = probe->counts;
  if (p.query_heads == 1) accuracy->head_counts = {probe->counts};
  for (int head = 0; p.query_heads > 1 && head < p.query_heads && !scales_span_heads(recipe); ++head)
    if (Status s = count_head(inputs, recipe, options, head, &accuracy->head_counts.emplace_back()); !s.ok()) return s;
  return {};
}

Table accuracy_table(std::vector<Column> columns) {
  columns.push_back({"head", ""});
  for (const char* output : kOutputNames) {
    columns.push_back({std::string(output) + "_cosine", "{:.5f}"});
    columns.push_back({std::string(output) + "_rel_l2", "{:.4f}"});
    columns.push_back({std::string(output) + "_worst", "{:.3f}"});
  }
  for (const char* share : {"p_zero", "p_saturated", "ds_zero_q", "ds_zero_k", "ds_lost_q", "ds_lost_k", "ds_sat_q", "ds_sat_k"})
    columns.push_back({share, "{:.1e}"});
  columns.push_back({"p_equal", "{:.4f}"});
  return Table(std::move(columns));
}

namespace {

double share(double part, double whole) { return whole > 0 ? part / whole : 0.0; }

void add_numbers(std::initializer_list<double> numbers, std::vector<Cell>* row) {
  for (const double number : numbers) row->emplace_back(number);
}
void add_deviation(const Deviation& d, std::vector<Cell>* row) { add_numbers({d.cosine, d.relative_l2, d.worst_row}, row); }
void add_blanks(int cells, std::vector<Cell>* row) { row->resize(row->size() + static_cast<std::size_t>(cells)); }

void add_shares(const cpu::ProbeCounts& c, bool gradients, std::vector<Cell>* row) {
  const auto number = [](std::int64_t n) { return static_cast<double>(n); };
  add_numbers({share(number(c.p_zero), number(c.pairs)), share(number(c.p_saturated), number(c.pairs))}, row);
  if (gradients)
    add_numbers({share(number(c.ds_zero_q), number(c.ds_pairs)), share(number(c.ds_zero_k), number(c.ds_pairs)),
                 share(c.ds_lost_q, c.ds_mass), share(c.ds_lost_k, c.ds_mass), share(number(c.ds_saturated_q), number(c.ds_pairs)),
                 share(number(c.ds_saturated_k), number(c.ds_pairs))},
                row);
  else
    add_blanks(6, row);
  if (c.p_compared > 0)
    row->emplace_back(share(number(c.p_equal), number(c.p_compared)));
  else
    add_blanks(1, row);
}

}  // namespace

void add_accuracy_rows(const std::vector<Cell>& lead, const Accuracy& accuracy, Table* table) {
  const std::size_t heads = accuracy.heads[kO].size();
  for (std::size_t head = 0; head < heads; ++head) {
    std::vector<Cell> row = lead;
    row.emplace_back(std::to_string(head));
    for (const std::vector<Deviation>& output : accuracy.heads) {
      if (head < output.size()) {
        add_deviation(output[head], &row);
      } else {
        add_blanks(3, &row);
      }
    }
    if (accuracy.head_counts.empty()) {
      add_blanks(9, &row);
    } else {
      add_shares(accuracy.head_counts[head], !accuracy.heads[kDq].empty(), &row);
    }
    table->add(std::move(row));
  }
  std::vector<Cell> row = lead;
  row.emplace_back("all");
  for (int output = kO; output <= kDv; ++output) {
    if (accuracy.heads[output].empty()) {
      add_blanks(3, &row);
    } else {
      add_deviation(accuracy.mean(static_cast<Output>(output)), &row);
    }
  }
  if (accuracy.counts) {
    add_shares(*accuracy.counts, !accuracy.heads[kDq].empty(), &row);
  } else {
    add_blanks(9, &row);
  }
  table->add(std::move(row));
}

}  // namespace flamia::cli
