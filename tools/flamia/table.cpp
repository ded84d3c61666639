// SPDX-License-Identifier: Apache-2.0
#include "table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "json.hpp"

namespace flamia::cli {
namespace {

std::string for_people(const Cell& cell, const std::string& format) {
  if (std::holds_alternative<std::string>(cell)) return std::get<std::string>(cell);
  if (std::holds_alternative<std::int64_t>(cell)) return std::to_string(std::get<std::int64_t>(cell));
  if (!std::holds_alternative<double>(cell)) return "-";
  const double value = std::get<double>(cell);
  if (value == 0 && format.find('e') != std::string::npos) return "0";  // exactly: it matters in a leak
  return fmt::format(fmt::runtime(format), value);
}

std::string for_csv(const Cell& cell) {
  if (std::holds_alternative<std::monostate>(cell)) return "";
  if (std::holds_alternative<std::int64_t>(cell)) return std::to_string(std::get<std::int64_t>(cell));
  if (std::holds_alternative<double>(cell)) return fmt::format("{}", std::get<double>(cell));
  const std::string& text = std::get<std::string>(cell);
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? "\"\"" : std::string(1, c);
  return quoted + "\"";
}

}  // namespace

std::string Table::text() const {
  std::vector<std::vector<std::string>> cells(1);
  for (const Column& column : columns_) cells[0].push_back(column.name);
  for (const auto& row : rows_) {
    cells.emplace_back();
    for (std::size_t c = 0; c < row.size(); ++c) cells.back().push_back(for_people(row[c], columns_[c].format));
  }
  std::vector<std::size_t> widths(columns_.size());
  for (const auto& row : cells)
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  std::string text;
  for (const auto& row : cells) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c) {
      const bool number = !columns_[c].format.empty();
      line += number ? fmt::format("{:>{}}  ", row[c], widths[c]) : fmt::format("{:<{}}  ", row[c], widths[c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

std::string Table::csv() const {
  std::string text;
  for (std::size_t c = 0; c < columns_.size(); ++c) text += (c ? "," : "") + columns_[c].name;
  text += '\n';
  for (const auto& row : rows_) {
    for (std::size_t c = 0; c < row.size(); ++c) text += (c ? "," : "") + for_csv(row[c]);
    text += '\n';
  }
  return text;
}

std::string Table::markdown() const {
  std::string text, line;
  for (const Column& column : columns_) {
    text += "| " + column.name + " ";
    line += column.format.empty() ? "| --- " : "| ---: ";
  }
  text += "|\n" + line + "|\n";
  for (const auto& row : rows_) {
    for (std::size_t c = 0; c < row.size(); ++c) text += "| " + for_people(row[c], columns_[c].format) + " ";
    text += "|\n";
  }
  return text;
}

std::string Table::json() const {
  Json array = Json::array();
  for (const auto& row : rows_) {
    Json object = Json::object();
    for (std::size_t c = 0; c < row.size(); ++c) {
      Json value;
      if (const auto* text = std::get_if<std::string>(&row[c])) value = *text;
      if (const auto* whole = std::get_if<std::int64_t>(&row[c])) value = *whole;
      if (const auto* number = std::get_if<double>(&row[c])) value = *number;
      object.set(columns_[c].name, std::move(value));
    }
    array.add(std::move(object));
  }
  return array.pretty();
}

}  // namespace flamia::cli
