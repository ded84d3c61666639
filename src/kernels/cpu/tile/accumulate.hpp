// SPDX-License-Identifier: Apache-2.0
// Partial products join an FP32 sum: sum <- sum * correction + part * 2^e * f, one exponent and factor per row of the output.
#pragma once
#include "kernels/cpu/tile/scores.hpp"

namespace flamia::cpu::FLAMIA_ISA {

/// One sum of `rows` x `dim`.
struct Sum {
  float* data;
  int rows;
  int dim;
  const int* active;        // rows with 0 are left alone, bit for bit
  const float* correction;  // null: 1
};

/// sum += A[.., k0 ... k0 + count) B, in pieces of `interval` (0: the chain of products starts from the sum itself).
/// e(row, k) = exponent of the part that holds k, f(row, k) its factor, both constant inside a piece; f = 1 if interval is 0.
template <class Exponent, class Factor>
static void accumulate(numerics::Accumulator model, const Sum& sum, Left a, Right b, int k_count, int interval, float* part,
                       Exponent exponent, Factor factor) {
  const int piece = interval == 0 ? k_count : interval;
  for (int k = 0; k < k_count; k += piece) {
    const int count = numerics::min_of(piece, k_count - k);
    const Left left{a.data + k * a.k_stride, a.row_stride, a.k_stride};
    const Right right{b.data + k * b.ld, b.ld};
    const bool carry = interval == 0;
    // the exponent of a group of zeros says nothing about the sum, which must not be multiplied with 2^127
    const auto carried = [](int e) { return e <= numerics::kLeastExponent ? 0 : e; };
    if (carry)
      for (int r = 0; r < sum.rows; ++r) {
        const float correction = k == 0 && sum.correction ? sum.correction[r] : 1.f;
        for (int c = 0; c < sum.dim; ++c)
          part[r * sum.dim + c] = times_pow2(numerics::mul(sum.data[r * sum.dim + c], correction), -carried(exponent(r, k)));
      }
    product(model, left, right, part, sum.dim, sum.rows, sum.dim, count, carry);
    for (int r = 0; r < sum.rows; ++r) {
      if (!sum.active[r]) continue;
      const int e = carry ? carried(exponent(r, k)) : exponent(r, k);
      const float f0 = numerics::mul(numerics::pow2(e >> 1), factor(r, k)), f1 = numerics::pow2(e - (e >> 1));
      const float correction = carry ? 0.f : k == 0 && sum.correction ? sum.correction[r] : 1.f;
      float* out = sum.data + r * sum.dim;
      const float* in = part + r * sum.dim;
      if (carry)
        for (int c = 0; c < sum.dim; ++c) out[c] = numerics::mul(numerics::mul(in[c], f0), f1);
      else
        for (int c = 0; c < sum.dim; ++c) out[c] = numerics::fma(out[c], correction, numerics::mul(numerics::mul(in[c], f0), f1));
    }
  }
}

}  // namespace flamia::cpu::FLAMIA_ISA
