// SPDX-License-Identifier: Apache-2.0
// What this version computes of the recipes that an architecture could run.
#pragma once
#include <string>
#include <vector>

#include "flamia/recipe.hpp"
#include "plan/architecture.hpp"

namespace flamia::recipe {

/// Why the backend for `architecture` does not compute the recipe's forward pass; empty: it does.
std::vector<std::string> execution_gaps(const Recipe& recipe, plan::Architecture architecture);

/// The same for the backward pass alone.
std::vector<std::string> backward_gaps(const Recipe& recipe, plan::Architecture architecture);

}  // namespace flamia::recipe
