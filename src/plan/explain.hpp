// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <string>

#include "flamia/recipe.hpp"
#include "plan/architecture.hpp"

namespace flamia::plan {

/// Text for people: what is quantised how, which copies lie where, what each product runs on, which guarantee holds, and what the
/// machine or the rules refuse and why. Lines end with a newline.
std::string explain(const Recipe& recipe, Architecture architecture, int head_dim);

}  // namespace flamia::plan
