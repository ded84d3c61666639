// SPDX-License-Identifier: Apache-2.0
#include "json.hpp"

#include <cmath>
#include <nlohmann/json.hpp>

namespace flamia::cli {

using Tree = nlohmann::ordered_json;

// NOLINTNEXTLINE(bugprone-exception-escape): the library's constructor of null is noexcept and allocates nothing
struct Json::Value {
  Tree tree;
};

Json::Json() : value_(std::make_unique<Value>()) {}
Json::Json(bool value) : Json() { value_->tree = value; }
Json::Json(int value) : Json() { value_->tree = value; }
Json::Json(std::int64_t value) : Json() { value_->tree = value; }
Json::Json(std::uint64_t value) : Json() { value_->tree = value; }
Json::Json(double value) : Json() {
  if (std::isfinite(value)) value_->tree = value;
}
Json::Json(const char* text) : Json(std::string(text)) {}
Json::Json(const std::string& text) : Json() { value_->tree = text; }
Json::Json(const std::vector<std::string>& list) : Json() { value_->tree = list; }
Json::Json(const std::vector<std::int64_t>& list) : Json() { value_->tree = list; }
Json::Json(const std::vector<std::uint64_t>& list) : Json() { value_->tree = list; }
Json::Json(const std::map<std::string, std::string>& object) : Json() {
  value_->tree = Tree::object();
  for (const auto& [key, text] : object) value_->tree[key] = text;
}
Json::Json(Json&&) noexcept = default;
Json& Json::operator=(Json&&) noexcept = default;
Json::~Json() = default;

Json Json::array() {
  Json made;
  made.value_->tree = Tree::array();
  return made;
}

Json Json::object() {
  Json made;
  made.value_->tree = Tree::object();
  return made;
}

Json Json::parsed(const std::string& text) {
  Json made;
  made.value_->tree = Tree::parse(text);
  return made;
}

Json& Json::set(const std::string& key, Json value) {
  value_->tree[key] = std::move(value.value_->tree);
  return *this;
}

Json& Json::add(Json value) {
  value_->tree.push_back(std::move(value.value_->tree));
  return *this;
}

std::string Json::line() const { return value_->tree.dump(-1, ' ', false, Tree::error_handler_t::replace); }
std::string Json::pretty() const { return value_->tree.dump(1, ' ', false, Tree::error_handler_t::replace); }

}  // namespace flamia::cli
