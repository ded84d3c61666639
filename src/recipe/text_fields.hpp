// SPDX-License-Identifier: Apache-2.0
// The tokens "field=value" that follow a recipe's name in text. Two tables:
//   fields      partition the recipe: two recipes are equal if and only if all fields print alike
//   shorthands  set several fields at once, in the words that documentation uses ("ds=32x32", "sticky=on")
#pragma once
#include <span>
#include <string>
#include <string_view>

#include "flamia/recipe.hpp"

namespace flamia::recipe {

struct TextField {
  const char* key;
  const char* values;                                    // what it may be, for messages
  std::string (*print)(const Recipe& recipe);            // a shorthand that cannot describe the recipe prints ""
  bool (*read)(std::string_view value, Recipe* recipe);  // false: not a value of this field; the recipe is then unspecified
};

std::span<const TextField> text_fields();
std::span<const TextField> text_shorthands();

/// "e4m3/32xall/ue8m0/ceil", with "/sticky", "/sticky+2" and "/x0.5" (tensor scale) where they differ from the default; "bf16" alone.
std::string form_text(const Quantisation& form);
/// "32xall", "tensor", ...
std::string group_text(const Group& group);

}  // namespace flamia::recipe
