// SPDX-License-Identifier: Apache-2.0
// What makes a recipe meaningless or unsafe on every machine. A rule is a predicate and a sentence; violations() reports all of them at
// once. What one machine cannot do is a refusal of lower(); what a recipe leaks is not forbidden but stated by guarantee().
#pragma once
#include <string>
#include <vector>

#include "flamia/recipe.hpp"
#include "recipe/operands.hpp"

namespace flamia::recipe {

/// A form in its place: the operand, which of its two products, the axis that product sums over.
struct Place {
  const OperandRow& row;
  const Use& use;
  const Quantisation& form;
  bool is_second;
  bool widened = false;  // the product takes codes times scale in BF16, because its other operand is BF16
};

/// The twelve places of a recipe; with `inference`, those of S and O only.
std::vector<Place> places(const Recipe& recipe, bool inference = false);
const OperandPolicy& policy_of(const Recipe& recipe, Operand operand);

const char* name_of(Product product);
const char* name_of(Axis axis);
/// "K in dQ"
std::string name_of(const Place& place);

/// Elements of the type that the product's MMA is given: the form's own, BF16 if it is widened.
Element element_of(const Place& place);

/// Tokens whose products a kernel sums before it applies scales: a scale that changes along queries or keys in such steps costs nothing.
inline constexpr int kPartialSum = 64;

/// Elements along the contraction after which the scale may change within one sum; 0 if it does not, or is in the values (widened).
int changes_along_contraction(const Place& place, int head_dim);

/// Sentences; empty if the recipe is sound.
std::vector<std::string> violations(const Recipe& recipe);

}  // namespace flamia::recipe
