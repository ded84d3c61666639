// SPDX-License-Identifier: Apache-2.0
// Attention on the unquantised input in float64, forward and backward: what every recipe is measured against. It shares the mask with
// the kernels (schedule/mask.hpp) and nothing else.
#pragma once
#include <vector>

#include "flamia/attention.hpp"
#include "schedule/documents.hpp"

namespace flamia::cpu {

struct OracleResult {
  std::vector<double> o;         // [tokens, query_heads, head_dim]
  std::vector<double> lse;       // [query_heads, tokens], natural logarithm; +inf for a row that sees no key
  std::vector<double> d_q;       // as o; empty without d_o
  std::vector<double> d_k, d_v;  // [tokens, key_heads, head_dim]; empty without d_o
};

/// inputs: q, k, v (any dtype and strides; cu_seqlens, o and lse are not read). d_o: gradient of the output, or null for the forward
/// pass alone. Work items are (document, key head); threads = 0: all cores; the result does not depend on it. Head dim is a multiple
/// of 8. Errors: head counts that do not divide, a head dim that is not allowed, out of memory.
Status oracle(const Problem& problem, const schedule::Documents& documents, const ForwardTensors& inputs, const TensorView* d_o,
              int threads, OracleResult* result);

}  // namespace flamia::cpu
