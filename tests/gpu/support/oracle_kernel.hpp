// SPDX-License-Identifier: Apache-2.0
// Float64 attention on the GPU, plain and slow, on unquantised BF16 operands, compared row by row with an output that is already there.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace flamia::test {

/// One row (token, head) of an output against the oracle's.
struct RowReport {
  double dot, got, want;     // of the two rows: product, squared norms
  double difference;         // squared norm
  double worst_element;      // greatest |got - want| / |want|
  double lse;                // got - want; 0 where both are the same infinity
  std::int32_t in_document;  // 0: output 0 and LSE +infinity are right
  std::int32_t wrong;        // not finite, or not what a row must hold that sees nothing
};

/// All on the device, dense. `cu_seqlens` and the mask need not be those that the output was made with: that is the control.
struct OracleCall {
  const std::uint16_t *q, *k, *v, *o;  // BF16
  const float* lse;
  const std::int32_t* cu_seqlens;
  std::int64_t tokens, documents;
  int query_heads, key_heads, dim;  // dim <= 128
  double scale;
  bool causal;
  std::int64_t left, right;
};

/// Reports [query_heads][tokens].
cudaError_t launch_oracle(const OracleCall& call, RowReport* reports);

}  // namespace flamia::test
