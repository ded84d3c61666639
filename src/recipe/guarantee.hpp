// SPDX-License-Identifier: Apache-2.0
// What a recipe promises about tokens that a row must not see, derived from its forms alone: in causal attention. With a window to the
// right a block reaches the rows that see a token of it, and the blocks of those rows. NaN and infinity count as any other value. Tests measure it:
// tests/kernels, `flamia leak`.
#pragma once
#include <string>
#include <vector>

#include "flamia/recipe.hpp"

namespace flamia::recipe {

/// How far a token that must not matter can matter.
struct Reach {
  enum class Kind { none, block, document, tensor };  // not at all; inside a block of `tokens`; the document; all documents
  Kind kind = Kind::none;
  int tokens = 0;
  friend bool operator==(const Reach&, const Reach&) = default;
};
/// What both reach together: the farther, or the least block that is made of whole blocks of either.
Reach farther(const Reach& a, const Reach& b);

struct Guarantee {
  Reach outputs;    // later tokens -> O of earlier rows
  Reach d_q;        // later tokens -> dQ of earlier rows
  Reach look_back;  // earlier queries -> dK, dV of later keys
  bool documents_isolated = true;
  bool sticky =
      false;  // K or V scales remember earlier tokens of the document, also those that have left a window (numerics.md §8)
  std::vector<std::string> reasons;  // which operand, why

  /// "exact: no bit of O or dQ depends on a later token; documents are isolated"
  std::string sentence(bool trains) const;
};

Guarantee guarantee(const Recipe& recipe);

}  // namespace flamia::recipe
