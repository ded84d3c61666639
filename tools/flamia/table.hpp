// SPDX-License-Identifier: Apache-2.0
// Rows of named columns, printed for people, as CSV and as JSON from the same data.
#pragma once
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace flamia::cli {

/// monostate: does not apply (blank in CSV, null in JSON, "-" for people).
using Cell = std::variant<std::monostate, std::string, std::int64_t, double>;

struct Column {
  std::string name;
  std::string format;  // of a number for people, as in "{:.5f}"; CSV and JSON hold every digit
};

class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void add(std::vector<Cell> row) { rows_.push_back(std::move(row)); }
  const std::vector<std::vector<Cell>>& rows() const { return rows_; }

  std::string text() const;  // columns aligned, one line a row
  std::string csv() const;   // RFC 4180, with a header line
  std::string markdown() const;
  std::string json() const;  // array of objects; not a number: null

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;
};

}  // namespace flamia::cli
