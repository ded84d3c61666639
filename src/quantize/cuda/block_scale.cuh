// SPDX-License-Identifier: Apache-2.0
// E4M3 scales of blocks and E2M1 by them, rule amax: the host's numbers (quantize/encode.hpp) bit for bit.
#pragma once
#include "kernels/cuda/ptx/arithmetic.cuh"
#include "kernels/cuda/ptx/convert.cuh"
#include "numerics/platform.hpp"

namespace flamia::quantize::gpu {

/// 1 / x, rounded to nearest, for x in 2^-120 ... 2^120.
__device__ __forceinline__ float nearest_inverse(float x) {
  const float near = ptx::reciprocal_approximate(x);
  return numerics::fma(numerics::fma(-near, x, 1.f), near, near);
}

/// Nearest magnitude of E2M1, ties to even, from a quotient >= 0: the addition of 2^22 times one and a half of the power of two below it (at
/// least 1) leaves one bit of mantissa.
__device__ __forceinline__ float round_e2m1(float quotient) {
  const float q = fminf(quotient, 6.f);
  const float magic = __int_as_float((max(__float_as_int(q), 0x3f800000) & 0x7f800000) | 0x00400000);
  return numerics::fma(magic, -0x1p22f, numerics::fma(magic, 0x1p22f, q));
}

/// A scale, its value and the inverse of that; 0 of a scale of zero, which makes every code 0.
struct BlockScale {
  std::uint32_t byte;
  float value, inverse;

  /// x / value as a magnitude of E2M1: x by the inverse, corrected once, is the quotient rounded to nearest.
  __device__ __forceinline__ float magnitude(float x) const {
    const float a = fabsf(x), near = numerics::mul(a, inverse);
    return round_e2m1(numerics::fma(numerics::fma(-near, value, a), inverse, near));
  }
};

/// E4M3(amax / divisor), the divisor 6 times the first level; `inverse`: of the divisor, to nearest.
__device__ __forceinline__ BlockScale block_scale(float amax, float divisor, float inverse, float first_level) {
  const float near = numerics::mul(amax, inverse);
  const float quotient = numerics::fma(numerics::fma(-divisor, near, amax), inverse, near);
  const std::uint16_t byte = ptx::pack_e4m3x2(quotient, 0.f);
  float low, high;
  ptx::unpack_e4m3x2(byte, low, high);
  const float value = numerics::mul(low, first_level);
  return {byte & 0xffu, value, low == 0.f ? 0.f : nearest_inverse(value)};
}

}  // namespace flamia::quantize::gpu
