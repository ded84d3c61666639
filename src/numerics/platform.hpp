// SPDX-License-Identifier: Apache-2.0
// The few things that differ between a CPU and a GPU compiler. Everything in numerics/ is written once on top of them.
#pragma once
#include <bit>
#include <cstdint>

#if defined(__FAST_MATH__)
#error "flamia numerics must be compiled without fast-math: rounding is part of its contract"
#endif

// always_inline on the host is not about speed: the CPU kernels are compiled once per instruction set, and a shared out-of-line
// copy of one of these functions could end up using instructions that the running machine lacks.
#if defined(__CUDACC__)
#define FLAMIA_FN __host__ __device__ __forceinline__
#define FLAMIA_UNROLL _Pragma("unroll")
#else
#define FLAMIA_FN [[gnu::always_inline]] inline
#define FLAMIA_UNROLL
#endif

namespace flamia::numerics {

FLAMIA_FN std::uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  return __builtin_bit_cast(std::uint32_t, x);  // std::bit_cast is a function that could stay out of line (see above)
#endif
}

FLAMIA_FN float float_of(std::uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  return __builtin_bit_cast(float, u);
#endif
}

// Explicitly rounded operations: the compilers contract a*b+c differently, so numerics never leaves that choice to them
// (the host side is also compiled with -ffp-contract=off).
FLAMIA_FN float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

FLAMIA_FN float mul(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

FLAMIA_FN float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

FLAMIA_FN float abs_of(float x) { return float_of(bits_of(x) & 0x7fffffffu); }
FLAMIA_FN bool is_nan(float x) { return (bits_of(x) & 0x7fffffffu) > 0x7f800000u; }
FLAMIA_FN bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }
FLAMIA_FN float infinity() { return float_of(0x7f800000u); }
FLAMIA_FN float quiet_nan() { return float_of(0x7fc00000u); }
FLAMIA_FN int min_of(int a, int b) { return a < b ? a : b; }
FLAMIA_FN int max_of(int a, int b) { return a > b ? a : b; }

}  // namespace flamia::numerics
