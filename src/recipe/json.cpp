// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "recipe/fields.hpp"
#include "recipe/named.hpp"
#include "recipe/names.hpp"

namespace flamia {
namespace {

using Json = nlohmann::ordered_json;

template <class T>
Json written(const T& x) {
  if constexpr (std::is_enum_v<T>) {
    return recipe::word_of(x);
  } else if constexpr (std::is_arithmetic_v<T>) {
    return x;
  } else {
    Json object = Json::object();
    recipe::visit(x, [&](const char* name, const auto& member) {
      using Member = std::remove_cvref_t<decltype(member)>;
      if constexpr (recipe::kIsOptional<Member>)
        if (member == Member{}) return;
      object[name] = written(member);
    });
    return object;
  }
}

/// Reads an object's members into x; the first error stays. With `complete`, every member must be there.
class Reader {
 public:
  Reader(bool complete, std::string* error) : complete_(complete), error_(error) {}

  template <class T>
  void read(const Json& json, const std::string& path, T& x) {
    if (!json.is_object()) return wrong(path, json, "an object");
    std::vector<std::string> known;
    recipe::visit(x, [&](const char* name, auto& member) {
      known.emplace_back(name);
      const std::string inner = path.empty() ? name : path + "." + name;
      const auto found = json.find(name);
      if (found == json.end()) {
        if (complete_ && !recipe::kIsOptional<std::remove_cvref_t<decltype(member)>>)
          fail("key \"" + inner + "\" is missing; give it, or name a \"base\" recipe that the other keys come from");
      } else {
        value(*found, inner, member);
      }
    });
    for (const auto& item : json.items()) {
      if (std::find(known.begin(), known.end(), item.key()) != known.end() || (path.empty() && item.key() == "base")) continue;
      fail("key \"" + (path.empty() ? "" : path + ".") + recipe::clipped(item.key()) + "\" is unknown; " +
           recipe::suggestion(item.key(), known));
    }
  }

 private:
  template <class T>
  void value(const Json& json, const std::string& path, T& x) {
    if constexpr (std::is_enum_v<T>) {
      if (!json.is_string() || !recipe::read_word(json.template get_ref<const std::string&>(), &x))
        wrong(path, json, "one of " + recipe::quoted_list(recipe::words_of<T>()),
              json.is_string() ? recipe::words_of<T>() : std::vector<std::string>{});
    } else if constexpr (std::is_same_v<T, bool>) {
      if (!json.is_boolean()) return wrong(path, json, "true or false");
      x = json.template get<bool>();
    } else if constexpr (std::is_integral_v<T>) {
      // unsigned numbers beyond int64 are no integer of ours either
      const bool fits = json.is_number_unsigned()
                            ? std::cmp_less_equal(json.template get<std::uint64_t>(), std::numeric_limits<T>::max())
                            : json.is_number_integer() && std::in_range<T>(json.template get<std::int64_t>());
      if (!fits) return wrong(path, json, (sizeof(T) == 1 ? "an " : "a ") + std::to_string(8 * sizeof(T)) + "-bit integer");
      x = json.template get<T>();
    } else if constexpr (std::is_same_v<T, float>) {
      const double wide = json.is_number() ? json.template get<double>() : 2.0 * std::numeric_limits<float>::max();
      if (!(wide >= -std::numeric_limits<float>::max() && wide <= std::numeric_limits<float>::max()))
        return wrong(path, json, "a number in the range of FP32");
      x = static_cast<float>(wide);
    } else {
      read(json, path, x);
    }
  }

  void wrong(const std::string& path, const Json& json, const std::string& allowed, const std::vector<std::string>& words = {}) {
    // a whole tree is not printed: it may be as deep as its author likes
    std::string given =
        json.is_structured() ? std::string("an ") + json.type_name() : json.dump(-1, ' ', true, Json::error_handler_t::replace);
    if (given.size() > 60) given = given.substr(0, 57) + "...";
    std::string text = (path.empty() ? "the text" : "key \"" + path + "\"") + " is " + given + " but must be " + allowed;
    if (!words.empty()) {
      const std::vector<std::string> near = recipe::nearest(json.get_ref<const std::string&>(), words);
      if (!near.empty()) text += "; nearest: " + recipe::quoted_list(near);
    }
    fail(text);
  }

  void fail(const std::string& text) {
    if (error_->empty()) *error_ = "recipe JSON: " + text;
  }

  bool complete_;
  std::string* error_;
};

/// The parser repeats what it read last, which may be all of it.
std::string message_of(const Json::exception& error) {
  const std::string text = error.what();
  return text.size() > 300 ? text.substr(0, 300) + "..." : text;
}

/// Parses, refusing an object that has a key twice (the parser would drop one of them in silence).
Status parsed(std::string_view text, Json* json) {
  std::vector<std::set<std::string>> open;
  std::string twice;
  const auto watch = [&](int, Json::parse_event_t event, Json& part) {
    if (event == Json::parse_event_t::object_start) open.emplace_back();
    if (event == Json::parse_event_t::object_end && !open.empty()) open.pop_back();
    if (event == Json::parse_event_t::key && !open.empty() && !open.back().insert(part.get<std::string>()).second && twice.empty())
      twice = part.get<std::string>();
    return true;
  };
  try {
    *json = Json::parse(text, watch);
  } catch (const Json::exception& error) {
    return Status::invalid("recipe JSON: " + message_of(error));
  }
  if (!twice.empty()) return Status::invalid("recipe JSON: key \"" + recipe::clipped(twice) + "\" is given twice");
  return {};
}

}  // namespace

std::string Recipe::to_json() const { return written(*this).dump(); }

Status Recipe::from_json(std::string_view json, Recipe* recipe) {
  if (Status status = recipe::check_text(json, recipe); !status.ok()) return status;
  Json tree;
  if (Status status = parsed(json, &tree); !status.ok()) return status;
  Recipe made;
  bool complete = true;
  if (tree.is_object() && tree.contains("base")) {
    if (!tree["base"].is_string())
      return Status::invalid("recipe JSON: key \"base\" must be a recipe as text, for example \"mxfp8\"");
    if (Status status = parse(tree["base"].get_ref<const std::string&>(), &made); !status.ok())
      return Status(status.code(), "recipe JSON: key \"base\": " + status.message());
    complete = false;
  }
  std::string error;
  Reader(complete, &error).read(tree, "", made);
  if (!error.empty()) return Status::invalid(error);
  *recipe = made;
  return {};
}

std::uint64_t Recipe::hash() const {
  std::uint64_t h = 0xcbf29ce484222325u;  // FNV-1a, 64 bits
  for (const char c : to_json()) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return h;
}

}  // namespace flamia
