// SPDX-License-Identifier: Apache-2.0
// Where the error of P sits: |P^ / l - P| by blocks of 32 queries x 32 keys of one head.
#pragma once
#include <string>

#include "accuracy.hpp"

namespace flamia::cli {

/// input, recipe, head, query_block, key_block (packed tokens / 32), pairs, mean_error, max_error, mean_p
Table heatmap_table();

/// `codes`: Probe::forward_codes. A row of them is divided by its sum, which is l when the recipe sums codes.
void add_heatmap_rows(const std::string& input_name, const std::string& recipe, const Inputs& inputs, const CallOptions& options,
                      const cpu::OracleResult& oracle, const std::vector<float>& codes, int head, Table* table);

}  // namespace flamia::cli
