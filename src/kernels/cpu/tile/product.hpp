// SPDX-License-Identifier: Apache-2.0
// C = A B in FP32, every element one chain of fused multiply-adds over k = 0, 1, 2, ... So the bits depend neither on the vector width
// nor on the blocking. With the hopper13 model the chain is one of 32-element instructions instead (numerics/accumulate.hpp).
#pragma once
#include <cstdint>

#include "kernels/cpu/tile/simd.hpp"
#include "numerics/accumulate.hpp"

namespace flamia::cpu::FLAMIA_ISA {

/// Element (row, k) of A is data[row * row_stride + k * k_stride].
struct Left {
  const float* data;
  std::int64_t row_stride;
  std::int64_t k_stride;
};

/// Rows `ld` floats apart.
struct Right {
  const float* data;
  std::int64_t ld;
};

namespace detail {

template <int Rows, int Columns>
static void block_product(Left a, Right b, float* c, std::int64_t c_ld, int k_count, bool carry) {
  Vector sum[Rows][Columns];
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Columns; ++v) sum[r][v] = carry ? load(c + r * c_ld + v * kLanes) : zero();
  const float* left = a.data;
  const float* right = b.data;
  for (int k = 0; k < k_count; ++k, left += a.k_stride, right += b.ld) {
    Vector columns[Columns];
    for (int v = 0; v < Columns; ++v) columns[v] = load(right + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Vector row = broadcast(left[r * a.row_stride]);
      for (int v = 0; v < Columns; ++v) sum[r][v] = multiply_add(row, columns[v], sum[r][v]);
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Columns; ++v) store(c + r * c_ld + v * kLanes, sum[r][v]);
}

template <int Columns>
static void column_product(Left a, Right b, float* c, std::int64_t c_ld, int rows, int k_count, bool carry) {
  int r = 0;
  for (; r + kRowBlock <= rows; r += kRowBlock)
    block_product<kRowBlock, Columns>({a.data + r * a.row_stride, a.row_stride, a.k_stride}, b, c + r * c_ld, c_ld, k_count, carry);
  for (; r < rows; ++r)
    block_product<1, Columns>({a.data + r * a.row_stride, a.row_stride, a.k_stride}, b, c + r * c_ld, c_ld, k_count, carry);
}

static void fp32_product(Left a, Right b, float* c, std::int64_t c_ld, int rows, int columns, int k_count, bool carry) {
  int n = 0;
  for (; n + kColumnBlock * kLanes <= columns; n += kColumnBlock * kLanes)
    column_product<kColumnBlock>(a, {b.data + n, b.ld}, c + n, c_ld, rows, k_count, carry);
  for (; n < columns; n += kLanes) column_product<1>(a, {b.data + n, b.ld}, c + n, c_ld, rows, k_count, carry);
}

static float hopper_element(Left a, const float* column, std::int64_t ld, int k_count, float sum) {
  for (int k = 0; k < k_count; k += numerics::kHopperGroup) {
    const int n = numerics::min_of(numerics::kHopperGroup, k_count - k);
    for (int x = k; x < k + n; ++x)
      if (!numerics::is_finite(a.data[x * a.k_stride])) return numerics::quiet_nan();  // the integer model knows numbers only
    sum = numerics::hopper_dot(sum, a.data + k * a.k_stride, a.k_stride, column + k * ld, ld, n);
  }
  return sum;
}

static void hopper_product(Left a, Right b, float* c, std::int64_t c_ld, int rows, int columns, int k_count, bool carry) {
  for (int r = 0; r < rows; ++r)
    for (int n = 0; n < columns; ++n) {
      float& out = c[r * c_ld + n];
      if (carry && numerics::is_nan(out)) continue;
      out = hopper_element({a.data + r * a.row_stride, a.row_stride, a.k_stride}, b.data + n, b.ld, k_count, carry ? out : 0.f);
    }
}

}  // namespace detail

/// rows x columns of C (rows `c_ld` floats apart); `columns` is a multiple of 16. carry: the chain starts from C's content, not from 0.
static void product(numerics::Accumulator model, Left a, Right b, float* c, std::int64_t c_ld, int rows, int columns, int k_count,
                    bool carry = false) {
  if (model == numerics::Accumulator::hopper13)
    detail::hopper_product(a, b, c, c_ld, rows, columns, k_count, carry);
  else
    detail::fp32_product(a, b, c, c_ld, rows, columns, k_count, carry);
}

}  // namespace flamia::cpu::FLAMIA_ISA
