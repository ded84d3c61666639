// SPDX-License-Identifier: Apache-2.0
// The block-scaled product of 4-bit matrices, as Blackwell's MMA computes it and SageAttention3 names it (FP4MM): codes and scales of A
// and B in, FP32 out. The scores of nvfp4 and sage3 are this product.
#pragma once
#include <cstdint>
#include <span>

#include "flamia/recipe.hpp"
#include "flamia/status.hpp"
#include "kernels/cpu/call.hpp"

namespace flamia::cpu {

/// [rows, k] in E2M1: two codes a byte, low nibble = even column, and a scale per `group` columns of each row.
struct BlockScaledMatrix {
  std::span<const std::uint8_t> codes;   // [rows, k / 2]
  std::span<const std::uint8_t> scales;  // [rows, k / group]
  std::int64_t rows = 0;
  ScaleType scale = ScaleType::e4m3;  // NVFP4; ue8m0: MXFP4
  int group = 16;
};

/// c[i][j] = sum over x of A(i, x) B(j, x), value = code * scale; FP32, every element one chain of fused multiply-adds over x = 0, 1, 2 ...
/// k is a multiple of 16 and of both groups, at most 256. A row with a scale that is NaN gives NaN. `c` is [a.rows, b.rows].
Status block_scaled_product(const BlockScaledMatrix& a, const BlockScaledMatrix& b, int k, std::span<float> c, Isa isa = Isa::best);

}  // namespace flamia::cpu
