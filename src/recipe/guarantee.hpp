// SPDX-License-Identifier: Apache-2.0
// What a recipe promises about tokens that a row must not see (causal attention; a window is the same with its right edge), derived
// from its forms alone. Tests measure it: tests/kernels, `flamia leak`.
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
/// The farther of the two.
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
