// SPDX-License-Identifier: Apache-2.0
#include "accuracy.hpp"

#include <algorithm>
#include <cmath>

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

Status measure_accuracy(const Inputs& inputs, const Recipe& recipe, const CallOptions& options, const cpu::OracleResult& oracle,
                        Accuracy* accuracy, cpu::Probe* probe) {
  CallResult result;
  if (Status s = attend(inputs, recipe, options, &result, probe); !s.ok()) return s;
  const Problem& p = inputs.problem;
  const std::vector<float> o = output_f32(result);
  const std::array<const std::vector<float>*, 4> got{&o, &result.d_q, &result.d_k, &result.d_v};
  const std::array<const std::vector<double>*, 4> want{&oracle.o, &oracle.d_q, &oracle.d_k, &oracle.d_v};
  *accuracy = {};
  accuracy->counts = probe->counts;
  for (int output = kO; output <= (options.backward ? kDv : kO); ++output) {
    const int heads = output <= kDq ? p.query_heads : p.key_heads;
    for (int head = 0; head < heads; ++head)
      accuracy->heads[output].push_back(
          deviation(*got[output], *want[output], inputs.documents.covered(), heads, p.head_dim, head));
  }
  return {};
}

Table accuracy_table() {
  std::vector<Column> columns{{"recipe", ""}, {"head", ""}};
  for (const char* output : kOutputNames) {
    columns.push_back({std::string(output) + "_cosine", "{:.5f}"});
    columns.push_back({std::string(output) + "_rel_l2", "{:.4f}"});
    columns.push_back({std::string(output) + "_worst", "{:.3f}"});
  }
  for (const char* share : {"p_zero", "p_saturated", "ds_zero_q", "ds_zero_k", "ds_lost_q", "ds_lost_k", "ds_sat_q", "ds_sat_k"})
    columns.push_back({share, "{:.1e}"});
  return Table(std::move(columns));
}

namespace {

Cell share(double part, double whole) { return whole > 0 ? Cell(part / whole) : Cell(0.0); }

void add_deviation(const Deviation& d, std::vector<Cell>* row) { row->insert(row->end(), {d.cosine, d.relative_l2, d.worst_row}); }

}  // namespace

void add_accuracy_rows(const std::string& recipe, const Accuracy& accuracy, bool every_head, Table* table) {
  const auto blank = [](std::vector<Cell>* row, int cells) { row->insert(row->end(), static_cast<std::size_t>(cells), Cell()); };
  const std::size_t heads = every_head ? accuracy.heads[kO].size() : 0;
  for (std::size_t head = 0; head < heads; ++head) {
    std::vector<Cell> row{recipe, std::to_string(head)};
    for (const std::vector<Deviation>& output : accuracy.heads) {
      if (head < output.size()) {
        add_deviation(output[head], &row);
      } else {
        blank(&row, 3);
      }
    }
    blank(&row, 8);
    table->add(std::move(row));
  }
  std::vector<Cell> row{recipe, std::string("all")};
  for (int output = kO; output <= kDv; ++output) {
    if (accuracy.heads[output].empty()) {
      blank(&row, 3);
    } else {
      add_deviation(accuracy.mean(static_cast<Output>(output)), &row);
    }
  }
  const cpu::ProbeCounts& c = accuracy.counts;
  const auto number = [](std::int64_t n) { return static_cast<double>(n); };
  row.insert(row.end(), {share(number(c.p_zero), number(c.pairs)), share(number(c.p_saturated), number(c.pairs))});
  if (accuracy.heads[kDq].empty()) {
    blank(&row, 6);
  } else {
    row.insert(row.end(),
               {share(number(c.ds_zero_q), number(c.ds_pairs)), share(number(c.ds_zero_k), number(c.ds_pairs)),
                share(c.ds_lost_q, c.ds_mass), share(c.ds_lost_k, c.ds_mass), share(number(c.ds_saturated_q), number(c.ds_pairs)),
                share(number(c.ds_saturated_k), number(c.ds_pairs))});
  }
  table->add(std::move(row));
}

}  // namespace flamia::cli
