// SPDX-License-Identifier: Apache-2.0
// The power of two that FP16 partial sums of dQ carry, per row, from what the row may see (numerics.md section 6).
#pragma once
#include "numerics/exponent.hpp"

namespace flamia::quantize {

/// z = 15 - E with 2^E > 2.002 * |dO'| * l * N * K, the greatest magnitude that a row of dQ (without the softmax scale) and any
/// partial sum of it can reach. From exponents: N * K = 448^2 * sqrt(d) * 2^(e_k + e_v), e_k and e_v the greatest exponents of the
/// keys and values that the row sees. `square_sum` is the sum of the row's squared dO' codes, e_g their exponent. A row of zeros: 0.
FLAMIA_FN int dq_exponent(float square_sum, float l, int d, int e_g, int e_k, int e_v) {
  if (!(square_sum > 0.f)) return 0;
  constexpr float kBound = 2.002f * 448.f * 448.f;
#if defined(__CUDA_ARCH__)
  const float norm = __fsqrt_rn(numerics::mul(square_sum, static_cast<float>(d)));
#else
  const float norm = __builtin_sqrtf(numerics::mul(square_sum, static_cast<float>(d)));
#endif
  const float bound = numerics::mul(numerics::mul(norm, l), kBound);
  const int above = static_cast<int>(numerics::bits_of(bound) >> 23) - 126;  // least integer with 2^above > bound
  return 15 - (above + e_g + e_k + e_v);
}

}  // namespace flamia::quantize
