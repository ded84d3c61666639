// SPDX-License-Identifier: Apache-2.0
// The oracle's matrix product in double.
#pragma once
#include <cstdint>

namespace flamia::cpu {

/// C[r][n] += sum over k of A(r, k) * B[k][n], element (r, k) of A at a[r * a_row + k * a_k]; columns is a multiple of 8.
void double_product(const double* a, std::int64_t a_row, std::int64_t a_k, const double* b, std::int64_t b_ld, double* c,
                    std::int64_t c_ld, std::int64_t rows, std::int64_t columns, std::int64_t k_count);

}  // namespace flamia::cpu
