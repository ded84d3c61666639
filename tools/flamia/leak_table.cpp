// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "leakage.hpp"

namespace flamia::cli {
namespace {

/// The greater of two cells; not a number counts as greatest.
template <class Number>
void raise_to(const Cell& candidate, Cell* cell) {
  if (!std::holds_alternative<Number>(candidate)) return;
  if (!std::holds_alternative<Number>(*cell) || !(std::get<Number>(candidate) <= std::get<Number>(*cell))) *cell = candidate;
}

}  // namespace

std::vector<LeakRow> summarise(const std::vector<LeakRow>& rows) {
  std::vector<LeakRow> summary;
  for (const LeakRow& row : rows) {
    auto same = std::find_if(summary.begin(), summary.end(), [&](const LeakRow& s) { return s.figure == row.figure; });
    if (same == summary.end()) {
      summary.push_back(row);
      summary.back().cut = "all";
      continue;
    }
    same->factor = std::max(same->factor, row.factor);
    for (int output = kO; output <= kDv; ++output) {
      raise_to<double>(row.greatest[output], &same->greatest[output]);
      raise_to<std::int64_t>(row.elements[output], &same->elements[output]);
    }
    const double* cosine = std::get_if<double>(&row.d_q_cosine);
    const double* least = std::get_if<double>(&same->d_q_cosine);
    if (cosine != nullptr && (least == nullptr || !(*cosine >= *least))) same->d_q_cosine = *cosine;
  }
  return summary;
}

Table leak_table(std::vector<Column> columns) {
  for (const Column& column : {Column{"figure", ""}, {"factor", "{:g}"}, {"cut", ""}}) columns.push_back(column);
  for (const char* output : kOutputNames) columns.push_back({output, "{:.1e}"});
  for (const char* output : kOutputNames) columns.push_back({std::string(output) + "_elements", "{}"});
  columns.push_back({"dq_cosine", "{:.5f}"});
  return Table(std::move(columns));
}

void add_leak_rows(const std::vector<Cell>& lead, const std::vector<LeakRow>& rows, Table* table) {
  for (const LeakRow& row : rows) {
    std::vector<Cell> cells = lead;
    cells.emplace_back(row.figure), cells.emplace_back(row.factor), cells.emplace_back(row.cut);
    cells.insert(cells.end(), row.greatest.begin(), row.greatest.end());
    cells.insert(cells.end(), row.elements.begin(), row.elements.end());
    cells.push_back(row.d_q_cosine);
    table->add(std::move(cells));
  }
}

}  // namespace flamia::cli
