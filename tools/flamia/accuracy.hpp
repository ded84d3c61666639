// SPDX-License-Identifier: Apache-2.0
// Accuracy of a recipe on one input, against float64 attention on the unquantised input.
#pragma once
#include <array>
#include <optional>
#include <vector>

#include "call.hpp"
#include "kernels/cpu/oracle.hpp"
#include "kernels/cpu/probe.hpp"
#include "measures.hpp"
#include "table.hpp"

namespace flamia::cli {

enum Output { kO, kDq, kDk, kDv };  // indices of the four results
inline constexpr std::array<const char*, 4> kOutputNames{"o", "dq", "dk", "dv"};

struct Accuracy {
  std::array<std::vector<Deviation>, 4>
      heads;                               // by output and head (query heads for O and dQ, key heads for dK and dV); may be empty
  std::optional<cpu::ProbeCounts> counts;  // absent where nobody observed the call (GPU)
  std::vector<cpu::ProbeCounts> head_counts;  // by query head; empty where a scale spans all heads, so that no head stands alone
  /// Over the heads: mean cosine, mean relative L2, greatest worst row.
  Deviation mean(Output output) const;
};

/// The reference, once per input; `options.backward` says whether gradients too.
Status make_oracle(const Inputs& inputs, const CallOptions& options, cpu::OracleResult* oracle);

/// `probe` may be null: nothing is counted then.
Status measure_accuracy(const Inputs& inputs, const Recipe& recipe, const CallOptions& options, const cpu::OracleResult& oracle,
                        Accuracy* accuracy, cpu::Probe* probe);

/// One row a head and one for all heads. `lead`: first columns (the recipe, or the input and the recipe).
Table accuracy_table(std::vector<Column> lead = {{"recipe", ""}});
void add_accuracy_rows(const std::vector<Cell>& lead, const Accuracy& accuracy, Table* table);

}  // namespace flamia::cli
