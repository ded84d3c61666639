// SPDX-License-Identifier: Apache-2.0
// What a machine does with a recipe, and what it refuses and why: the one place that decides it. Derived from the operand table, the
// forms of the recipe and the facts of the architecture.
#pragma once
#include <string>
#include <vector>

#include "flamia/recipe.hpp"
#include "flamia/status.hpp"
#include "flamia/types.hpp"
#include "plan/architecture.hpp"
#include "recipe/operands.hpp"
#include "recipe/rules.hpp"

namespace flamia::recipe {

/// Where the codes of Q, K, V, dO lie (src/kernels/cuda/sm90/layout.hpp gives the bytes).
enum class Layout {
  as_given,       // [tokens, heads, head_dim], read in either major order
  rows,           // contiguous along channels: contracted over channels
  transposed_pi,  // contiguous along tokens, 16 of them permuted by pi: the other operand (P, dS) is packed from accumulator registers
  transposed,     // contiguous along tokens, in order
  rows_bf16,      // codes times scale in BF16, contiguous along channels: the other operand is dS in BF16
};
const char* name_of(Layout layout);

/// One quantised form of an operand. Equal forms are one quantisation; a layout more is a copy of the same codes or values.
struct CopyPlan {
  Operand operand;
  Quantisation form;
  std::vector<Product> products;
  std::vector<Layout> layouts;
};

/// How a use's scale gets into its product.
enum class ScaleUse {
  none,      // BF16 (the values carry the scale), or a constant that the row's sum carries anyway
  outside,   // one factor for a row or column of the product, or for a partial sum
  fold,      // into the exponent of P or dS, against a reference exponent
  hardware,  // applied by the MMA along the contraction
  loops,     // CPU: products are summed group by group
};
const char* name_of(ScaleUse use);

struct OperandUse {
  Operand operand;
  ScaleUse scale;
};

struct ProductPlan {
  Product product;
  const plan::MmaKind* mma = nullptr;  // null: refused
  OperandUse operands[2];
};

struct Lowering {
  plan::Architecture architecture;
  std::vector<CopyPlan> copies;       // of Q, K, V, dO
  std::vector<ProductPlan> products;  // S and O only if the recipe does not train
  std::vector<std::string> refusals;  // violations of the rules and what the architecture cannot do; empty: it can
  std::vector<std::string> notes;     // what has no effect here
  std::string no_backward;            // why there is no backward pass; empty if there is
  std::string not_executed;           // possible, but no backend of this version does it, and the nearest that one does
};

Lowering lower(const Recipe& recipe, plan::Architecture architecture, int head_dim);

/// Whether the mask leaves the recipe defined: means over tokens have no place in a sliding window.
Status can_mask(const Recipe& recipe, const Mask& mask);

/// lower() as one answer: ok if this version runs the recipe there; else `unsupported` (`invalid_argument` for broken rules) with every reason.
Status can_run(const Recipe& recipe, plan::Architecture architecture, int head_dim, bool backward);

}  // namespace flamia::recipe
