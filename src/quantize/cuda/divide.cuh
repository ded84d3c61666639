// SPDX-License-Identifier: Apache-2.0
// Many quotients by one divisor, correctly rounded, by multiplications.
#pragma once
#include "numerics/platform.hpp"

namespace flamia::quantize::gpu {

/// x / l to nearest even for many x and one l. With y = RN(1/l): q0 = x y; q1 = q0 + (x - q0 l) y is within an ulp of x / l, and
/// q2 = q1 + (x - q1 l) y then is RN(x / l) (Markstein, 1990: the residual is exact, y correctly rounded), as long as nothing is
/// subnormal or infinite in between. `safe` says when that holds for all that matters to E4M3(RN(x / l) * 2^-e): l in
/// 2^-20 ... 2^40, and e >= -60, so that where |x| < 2^-100, and a residual may be inexact, the scaled quotient is below 2^-20 and the
/// code is 0. The sign is x's own: a sum of zeros would lose it.
class Divider {
 public:
  __device__ explicit Divider(float l) : l_(l) { y_ = __frcp_rn(l); }
  static __device__ bool safe(float l, int exponent) { return l >= 0x1p-20f && l <= 0x1p40f && exponent >= -60; }
  __device__ float operator()(float x) const {
    const float q0 = numerics::mul(x, y_);
    const float q1 = numerics::fma(numerics::fma(-q0, l_, x), y_, q0);
    const float q2 = numerics::fma(numerics::fma(-q1, l_, x), y_, q1);
    return copysignf(q2, x);
  }

 private:
  float l_, y_;
};

}  // namespace flamia::quantize::gpu
