// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/oracle_product.hpp"

#include <cstring>

namespace flamia::cpu {
namespace {

using Eight = double __attribute__((vector_size(64)));

/// Rows x 8 * Columns elements of C in registers. Multiplication and addition round apart, so that every instruction set gives the same.
template <int Rows, int Columns>
[[gnu::always_inline]] inline void block(const double* a, std::int64_t a_row, std::int64_t a_k, const double* b, std::int64_t b_ld,
                                         double* c, std::int64_t c_ld, std::int64_t k_count) {
  Eight sum[Rows][Columns];
  for (int r = 0; r < Rows; ++r) std::memcpy(sum[r], c + r * c_ld, sizeof sum[r]);
  for (std::int64_t k = 0; k < k_count; ++k) {
    Eight right[Columns];
    std::memcpy(right, b + k * b_ld, sizeof right);
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Columns; ++v) sum[r][v] += a[r * a_row + k * a_k] * right[v];
  }
  for (int r = 0; r < Rows; ++r) std::memcpy(c + r * c_ld, sum[r], sizeof sum[r]);
}

[[gnu::always_inline]] inline void whole(const double* a, std::int64_t a_row, std::int64_t a_k, const double* b, std::int64_t b_ld,
                                         double* c, std::int64_t c_ld, std::int64_t rows, std::int64_t columns,
                                         std::int64_t k_count) {
  for (std::int64_t n = 0; n < columns;) {
    const bool wide = n + 16 <= columns;
    for (std::int64_t r = 0; r < rows;) {
      const double* left = a + r * a_row;
      double* out = c + r * c_ld + n;
      if (r + 4 <= rows && wide)
        block<4, 2>(left, a_row, a_k, b + n, b_ld, out, c_ld, k_count), r += 4;
      else if (wide)
        block<1, 2>(left, a_row, a_k, b + n, b_ld, out, c_ld, k_count), r += 1;
      else
        block<1, 1>(left, a_row, a_k, b + n, b_ld, out, c_ld, k_count), r += 1;
    }
    n += wide ? 16 : 8;
  }
}

using Product = void (*)(const double*, std::int64_t, std::int64_t, const double*, std::int64_t, double*, std::int64_t,
                         std::int64_t, std::int64_t, std::int64_t);

void baseline(const double* a, std::int64_t a_row, std::int64_t a_k, const double* b, std::int64_t b_ld, double* c,
              std::int64_t c_ld, std::int64_t rows, std::int64_t columns, std::int64_t k_count) {
  whole(a, a_row, a_k, b, b_ld, c, c_ld, rows, columns, k_count);
}
#if defined(__x86_64__)
[[gnu::target("avx2")]] void avx2(const double* a, std::int64_t a_row, std::int64_t a_k, const double* b, std::int64_t b_ld,
                                  double* c, std::int64_t c_ld, std::int64_t rows, std::int64_t columns, std::int64_t k_count) {
  whole(a, a_row, a_k, b, b_ld, c, c_ld, rows, columns, k_count);
}
[[gnu::target("avx512f,prefer-vector-width=512")]] void avx512(const double* a, std::int64_t a_row, std::int64_t a_k,
                                                               const double* b, std::int64_t b_ld, double* c, std::int64_t c_ld,
                                                               std::int64_t rows, std::int64_t columns, std::int64_t k_count) {
  whole(a, a_row, a_k, b, b_ld, c, c_ld, rows, columns, k_count);
}
#endif

Product fastest() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return avx512;
  if (__builtin_cpu_supports("avx2")) return avx2;
#endif
  return baseline;
}

}  // namespace

void double_product(const double* a, std::int64_t a_row, std::int64_t a_k, const double* b, std::int64_t b_ld, double* c,
                    std::int64_t c_ld, std::int64_t rows, std::int64_t columns, std::int64_t k_count) {
  static const Product chosen = fastest();
  chosen(a, a_row, a_k, b, b_ld, c, c_ld, rows, columns, k_count);
}

}  // namespace flamia::cpu
