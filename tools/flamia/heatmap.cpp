// SPDX-License-Identifier: Apache-2.0
#include "heatmap.hpp"

#include <algorithm>
#include <cmath>

#include "schedule/mask.hpp"

namespace flamia::cli {
namespace {

constexpr std::int64_t kBlock = 32;

struct Cells {
  std::int64_t pairs = 0;
  double error = 0, greatest = 0, p = 0;
};

}  // namespace

Table heatmap_table() {
  return Table({{"input", ""},
                {"recipe", ""},
                {"head", "{}"},
                {"query_block", "{}"},
                {"key_block", "{}"},
                {"pairs", "{}"},
                {"mean_error", "{:.2e}"},
                {"max_error", "{:.2e}"},
                {"mean_p", "{:.2e}"}});
}

void add_heatmap_rows(const std::string& input_name, const std::string& recipe, const Inputs& inputs, const CallOptions& options,
                      const cpu::OracleResult& oracle, const std::vector<float>& codes, int head, Table* table) {
  const Problem& p = inputs.problem;
  const schedule::MaskReach reach = schedule::reach_of(options.mask.causal, options.mask.left, options.mask.right);
  const double scale = options.scale > 0 ? options.scale : 1 / std::sqrt(static_cast<double>(p.head_dim));
  const std::vector<float> q = to_f32(inputs.q), k = to_f32(inputs.k);
  const int key_head = head / (p.query_heads / p.key_heads);
  const std::int64_t blocks = (p.tokens + kBlock - 1) / kBlock;
  std::vector<Cells> cells(static_cast<std::size_t>(blocks * blocks));
  for (const schedule::DocumentRange& document : inputs.documents.ranges())
    for (std::int64_t i = 0; i < document.length; ++i) {
      const std::int64_t row = document.start + i;
      const schedule::Interval keys = schedule::visible_keys(reach, i, document.length);
      const float* row_codes = codes.data() + (head * p.tokens + row) * p.tokens;
      double sum = 0;
      for (std::int64_t j = keys.begin; j < keys.end; ++j) sum += row_codes[document.start + j];
      const double lse = oracle.lse[static_cast<std::size_t>(head * p.tokens + row)];
      for (std::int64_t j = keys.begin; j < keys.end; ++j) {
        const std::int64_t column = document.start + j;
        const float* a = q.data() + (row * p.query_heads + head) * p.head_dim;
        const float* b = k.data() + (column * p.key_heads + key_head) * p.head_dim;
        double dot = 0;
        for (int c = 0; c < p.head_dim; ++c) dot += static_cast<double>(a[c]) * b[c];
        const double exact = std::exp(scale * dot - lse), error = std::abs((sum > 0 ? row_codes[column] / sum : 0.0) - exact);
        Cells& cell = cells[static_cast<std::size_t>(row / kBlock * blocks + column / kBlock)];
        ++cell.pairs, cell.error += error, cell.p += exact, cell.greatest = std::max(cell.greatest, error);
      }
    }
  for (std::int64_t i = 0; i < blocks * blocks; ++i) {
    const Cells& cell = cells[static_cast<std::size_t>(i)];
    if (cell.pairs == 0) continue;
    const auto pairs = static_cast<double>(cell.pairs);
    table->add({input_name, recipe, std::int64_t{head}, i / blocks, i % blocks, cell.pairs, cell.error / pairs, cell.greatest,
                cell.p / pairs});
  }
}

}  // namespace flamia::cli
