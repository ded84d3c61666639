// SPDX-License-Identifier: Apache-2.0
// The inner loops of the host quantiser over the channels of a few rows, compiled once per instruction set in one translation unit
// (rows.cpp), so no inline function exists in two versions. Every version gives the same bits: the loops hold only operations that
// IEEE 754 rounds one way, and maxima of integers.
#pragma once
#include <cstdint>

#include "flamia/recipe.hpp"
#include "flamia/types.hpp"

namespace flamia::quantize {

struct RowKernels {
  const char* name;  // "baseline", "avx2", "avx512"
  /// out[c] = value of channel c as FP32, divided by `divisor` if `divide`, then rotated (dim 64, 128) if `rotate`.
  void (*load)(const void* row, DType dtype, int dim, bool divide, float divisor, bool rotate, float* out);
  /// magnitudes[c] = max(magnitudes[c], bits of |x[r][c]|) over r < rows. Integer order puts infinity and NaN above all numbers.
  void (*magnitudes)(const float* x, std::int64_t rows, int dim, std::uint32_t* magnitudes);
  /// groups[g] = greatest of magnitudes[g * width ... (g + 1) * width).
  void (*group_magnitudes)(const std::uint32_t* magnitudes, int dim, int width, std::uint32_t* groups);
  /// codes[c] = encode(x[c] * factor[c]).
  void (*encode_by_factor)(Element element, const float* x, const float* factor, int dim, std::uint8_t* codes);
  /// codes[c] = encode(x[c] / divisor[c]) & keep[c]; codes as above.
  void (*encode_by_division)(Element element, const float* x, const float* divisor, const std::uint8_t* keep, int dim,
                             std::uint8_t* codes);
  /// Rule amax_or_smaller: codes[c] = E2M1(FP16(x[c] * inverse[c])) & keep[c], two a byte.
  void (*encode_by_inverse)(const float* x, const float* inverse, const std::uint8_t* keep, int dim, std::uint8_t* codes);
  /// sums[g] = sum of the squared differences between those quotients and their codes, over the `width` channels of group g: in FP16 and by
  /// fma over the even and over the odd channels of eight, beyond that in FP32 (encode.hpp). `scratch` holds dim numbers.
  void (*inverse_errors)(const float* x, const float* inverse, int dim, int width, float* scratch, float* sums);
  /// BF16 codes, little endian.
  void (*encode_bf16)(const float* x, int dim, std::uint8_t* codes);
};

/// The fastest version that this machine runs.
const RowKernels& row_kernels();
/// All versions that this machine runs, slowest first (tests compare them). `count` gets their number.
const RowKernels* all_row_kernels(int* count);

}  // namespace flamia::quantize
