// SPDX-License-Identifier: Apache-2.0
// The named recipes, as one table of data (docs/recipes.md).
#pragma once
#include <functional>
#include <span>
#include <string_view>

#include "flamia/recipe.hpp"

namespace flamia::recipe {

struct NamedRecipe {
  const char* name;
  const char* summary;  // one line: what it is and where it comes from
  Recipe recipe;
};

/// In the order of the documentation.
std::span<const NamedRecipe> named_recipes();

/// Null if there is no recipe of this name.
const NamedRecipe* find_named(std::string_view name);

/// The named recipe with the fewest members that differ from `recipe`, of those that `fits` takes; null if it takes none.
const NamedRecipe* nearest_named(const Recipe& recipe, const std::function<bool(const Recipe&)>& fits);

}  // namespace flamia::recipe
