// SPDX-License-Identifier: Apache-2.0
#include "api/capi.hpp"
#include "recipe/names.hpp"
#include "recipe/rules.hpp"

namespace flamia::capi {

namespace {
thread_local std::string last_message;
}

flamia_status report(const Status& status) {
  if (!status.ok()) last_message = status.message();
  return static_cast<flamia_status>(status.code());
}

Status write_text(std::string_view text, char* buffer, std::size_t capacity, std::size_t* length) {
  if (length == nullptr && capacity == 0)
    return Status::invalid("capacity is 0 and length is null; ask for the length first or pass a buffer");
  if (length != nullptr) *length = text.size();
  if (capacity == 0) return {};
  if (buffer == nullptr) return Status::invalid("text is null although capacity is " + std::to_string(capacity));
  if (capacity < text.size() + 1)
    return Status::invalid("capacity = " + std::to_string(capacity) + " but the text needs " + std::to_string(text.size() + 1) +
                           " bytes with its final 0; pass a larger buffer");
  std::memcpy(buffer, text.data(), text.size());
  buffer[text.size()] = 0;
  return {};
}

namespace {

/// A handle never holds a recipe that breaks the rules; Plan::create would refuse it, but far from where it was written.
Status check_rules(const Recipe& recipe) {
  const std::vector<std::string> broken = recipe::violations(recipe);
  if (broken.empty()) return {};
  return Status::invalid("recipe \"" + recipe.name() + "\": " + recipe::in_lines(broken));
}

/// Recipe::parse or Recipe::from_json into a new object.
template <class Read>
flamia_status make_recipe(const char* text, flamia_recipe** recipe, const char* argument, Read read) {
  if (text == nullptr) return null_argument(argument);
  if (recipe == nullptr) return null_argument("recipe");
  return guarded([&]() -> Status {
    Recipe parsed;
    if (Status s = read(text, &parsed); !s.ok()) return s;
    if (Status s = check_rules(parsed); !s.ok()) return s;
    *recipe = new flamia_recipe{parsed};
    return {};
  });
}

}  // namespace
}  // namespace flamia::capi

using namespace flamia;

extern "C" {

const char* flamia_status_message(void) { return capi::last_message.c_str(); }
const char* flamia_version(void) { return flamia::version(); }

flamia_status flamia_recipe_parse(const char* text, flamia_recipe** recipe) {
  return capi::make_recipe(text, recipe, "text", [](const char* t, Recipe* r) { return Recipe::parse(t, r); });
}

flamia_status flamia_recipe_from_json(const char* json, flamia_recipe** recipe) {
  return capi::make_recipe(json, recipe, "json", [](const char* t, Recipe* r) { return Recipe::from_json(t, r); });
}

void flamia_recipe_destroy(flamia_recipe* recipe) { delete recipe; }

uint64_t flamia_recipe_hash(const flamia_recipe* recipe) { return recipe == nullptr ? 0 : recipe->recipe.hash(); }

flamia_status flamia_recipe_name(const flamia_recipe* recipe, char* text, size_t capacity, size_t* length) {
  if (recipe == nullptr) return capi::null_argument("recipe");
  return capi::guarded([&] { return capi::write_text(recipe->recipe.name(), text, capacity, length); });
}

flamia_status flamia_recipe_json(const flamia_recipe* recipe, char* text, size_t capacity, size_t* length) {
  if (recipe == nullptr) return capi::null_argument("recipe");
  return capi::guarded([&] { return capi::write_text(recipe->recipe.to_json(), text, capacity, length); });
}

}  // extern "C"
