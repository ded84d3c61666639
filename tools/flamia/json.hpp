// SPDX-License-Identifier: Apache-2.0
// JSON to be written. The library lies behind this, in json.cpp: its templates would cost every command seconds of compilation.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace flamia::cli {

/// A value with the order of its keys. Implicit, so that `set` and `add` take what is at hand.
class Json {
 public:
  Json();  // null
  Json(bool value);
  Json(int value);
  Json(std::int64_t value);
  Json(std::uint64_t value);
  Json(double value);  // not a finite number: null
  Json(const char* text);
  Json(const std::string& text);  // bytes that are no UTF-8 are replaced when it is written
  Json(const std::vector<std::string>& list);
  Json(const std::vector<std::int64_t>& list);
  Json(const std::vector<std::uint64_t>& list);
  Json(const std::map<std::string, std::string>& object);
  Json(Json&&) noexcept;
  Json& operator=(Json&&) noexcept;
  ~Json();

  static Json array();
  static Json object();
  /// Of a text that flamia itself has written.
  static Json parsed(const std::string& text);

  Json& set(const std::string& key, Json value);  // of an object
  Json& add(Json value);                          // to an array

  std::string line() const;
  std::string pretty() const;  // a line for each value

 private:
  struct Value;
  std::unique_ptr<Value> value_;
};

}  // namespace flamia::cli
