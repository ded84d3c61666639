// SPDX-License-Identifier: Apache-2.0
// An observer of one or more calls: what rounding did to P and dS. For tests and `flamia accuracy`; a call without one pays nothing.
#pragma once
#include <cstdint>
#include <vector>

namespace flamia::cpu {

/// Sums over pairs (query, key) that the mask lets through.
struct ProbeCounts {
  // forward pass
  std::int64_t pairs = 0;        // visible pairs
  std::int64_t p_zero = 0;       // code of P (as the product with V sees it) is 0 though exp2(t - m) is not
  std::int64_t p_saturated = 0;  // value of P before rounding lies beyond the largest code by more than rounding covers
  std::int64_t p_compared = 0;   // with an approximation of exp2: visible pairs ...
  std::int64_t p_equal = 0;      // ... whose code is the one that exp2 gives
  // backward pass; "q" = the payload of dQ, "k" = that of dK
  std::int64_t ds_pairs = 0;   // visible pairs with dS != 0
  std::int64_t ds_zero_q = 0;  // of those, payload 0
  std::int64_t ds_zero_k = 0;
  std::int64_t ds_saturated_q = 0;  // payload saturated
  std::int64_t ds_saturated_k = 0;
  double ds_mass = 0;    // sum of |dS|
  double ds_lost_q = 0;  // the part of it in elements whose payload is 0 (numerics.md §1)
  double ds_lost_k = 0;

  void add(const ProbeCounts& other);
};

/// Fields add up over calls (calls must not run at the same time). Deterministic: independent of the thread count.
struct Probe {
  ProbeCounts counts;

  /// Set by the caller: record the unfolded codes of P, E4M3(exp2(t + B - m)), of every visible pair; 0 elsewhere. [query_heads, tokens,
  /// tokens] floats each, so for small problems. The forward pass writes code * 2^(m of that moment - final m) (numerics.md §3).
  bool record_codes = false;
  std::vector<float> forward_codes;
  std::vector<float> backward_codes;
};

}  // namespace flamia::cpu
