// SPDX-License-Identifier: Apache-2.0
// What a recipe lets through between tokens that the mask keeps apart (docs/numerics.md, section 2): inputs that an output may not see are multiplied
// by a factor, and the output is compared bit by bit with that of the untouched input.
#pragma once
#include <array>
#include <functional>
#include <string>
#include <vector>

#include "accuracy.hpp"

namespace flamia::cli {

/// figure              outputs compared                              what was multiplied
/// earlier             O, dQ at positions <= t                       q, k, v, dout of the later tokens that the mask hides from them
/// earlier_blocks      the same, but in blocks before that of the first row that sees the block of the first multiplied token
/// behind_window       O, dQ at positions >= t (window only)         q, k, v, dout of the tokens that lie before their window
/// look_back           dK, dV at positions >= t                      q, dout of the queries that do not see them
/// look_back_blocks    the same, but in blocks after that of the last key that the block of the last multiplied query sees
/// other_documents     O, dQ, dK, dV of all other documents          q, k, v, dout of one whole document
/// Blocks are those of the recipe's guarantee (recipe/guarantee.hpp), of 32 tokens where it names none.
struct LeakRow {
  std::string figure;
  double factor = 0;
  std::string cut;  // which t, or which document
  std::array<Cell, 4>
      greatest;  // by Output: greatest change relative to the greatest output; 0 = every bit equal, empty = nothing to compare
  std::array<Cell, 4> elements;  // outputs whose bits changed
  Cell d_q_cosine;               // other_documents: their dQ against that before
};

/// Runs of the call that one recipe needs.
int leak_runs(const Inputs& inputs, const CallOptions& options, std::size_t factors);

/// `step` is called before every run. Without options.backward only O is measured. Values are multiplied in FP32, so that every
/// product is exact for 16-bit input; for a GPU they are then rounded to BF16.
Status measure_leak(const Inputs& inputs, const Recipe& recipe, const CallOptions& options, const std::vector<float>& factors,
                    const std::function<void(const std::string&)>& step, std::vector<LeakRow>* rows);

/// One row a figure: the greatest over factors and cuts, and the least cosine.
std::vector<LeakRow> summarise(const std::vector<LeakRow>& rows);

/// `lead`: first columns, as in accuracy_table.
Table leak_table(std::vector<Column> lead = {{"recipe", ""}});
void add_leak_rows(const std::vector<Cell>& lead, const std::vector<LeakRow>& rows, Table* table);

}  // namespace flamia::cli
