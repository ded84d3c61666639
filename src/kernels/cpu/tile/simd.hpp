// SPDX-License-Identifier: Apache-2.0
// The vector operations of the matrix products, per instruction set. Everything under tile/ is compiled once per instruction set, each
// time into a namespace of its own (FLAMIA_ISA), and calls nothing that another translation unit could have emitted: no inline function
// of the standard library, only always_inline numerics, intrinsics and functions of this namespace.
#pragma once
#include "numerics/platform.hpp"

#if !defined(FLAMIA_ISA)
#error "kernels/cpu/tile/ is compiled through baseline.cpp, avx2.cpp and avx512.cpp, which name the instruction set"
#endif

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace flamia::cpu::FLAMIA_ISA {

#if defined(__AVX512F__)
using Vector = __m512;
inline constexpr int kLanes = 16;
inline constexpr int kRowBlock = 8;     // rows x columns of a register block: 8 x 2 accumulators
inline constexpr int kColumnBlock = 2;  // in vectors
FLAMIA_FN Vector load(const float* p) { return _mm512_loadu_ps(p); }
FLAMIA_FN void store(float* p, Vector v) { _mm512_storeu_ps(p, v); }
FLAMIA_FN Vector broadcast(float x) { return _mm512_set1_ps(x); }
FLAMIA_FN Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
FLAMIA_FN Vector zero() { return _mm512_setzero_ps(); }
#elif defined(__AVX2__)
using Vector = __m256;
inline constexpr int kLanes = 8;
inline constexpr int kRowBlock = 4;
inline constexpr int kColumnBlock = 2;
FLAMIA_FN Vector load(const float* p) { return _mm256_loadu_ps(p); }
FLAMIA_FN void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
FLAMIA_FN Vector broadcast(float x) { return _mm256_set1_ps(x); }
FLAMIA_FN Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
FLAMIA_FN Vector zero() { return _mm256_setzero_ps(); }
#else
// No fused multiply-add in hardware is assumed: the C library computes it. Slow, and the same bits.
using Vector = float;
inline constexpr int kLanes = 1;
inline constexpr int kRowBlock = 4;
inline constexpr int kColumnBlock = 1;
FLAMIA_FN Vector load(const float* p) { return *p; }
FLAMIA_FN void store(float* p, Vector v) { *p = v; }
FLAMIA_FN Vector broadcast(float x) { return x; }
FLAMIA_FN Vector multiply_add(Vector a, Vector b, Vector c) { return numerics::fma(a, b, c); }
FLAMIA_FN Vector zero() { return 0.f; }
#endif

}  // namespace flamia::cpu::FLAMIA_ISA
