// SPDX-License-Identifier: Apache-2.0
// One tile of the block-scaled product (kernels/cpu/block_scaled.hpp): the operands decoded and multiplied as for the scores.
#pragma once
#include "kernels/cpu/tile/scores.hpp"

namespace flamia::cpu::FLAMIA_ISA {

/// c[r][n] (rows `ld` apart) of rows [a0, a0 + rows) of A and [b0, b0 + columns) of B; at most kTile of each.
static void block_scaled_tile(const Operand& a, std::int64_t a0, int rows, const Operand& b, std::int64_t b0, int columns,
                              Scratch scratch, float* c, std::int64_t ld) {
  const Buffers buffers = buffers_of(scratch, a.dim);
  TileRows& tile = *buffers.rows;
  const Document all{0, 0, nullptr};
  load_values(a, all, 0, a0, rows, buffers.k, tile.k_exponent, tile.k_scale, tile.k_flagged);
  load_values(b, all, 0, b0, columns, buffers.q, tile.q_exponent, tile.q_scale, tile.q_flagged);
  const int width = (columns + 15) / 16 * 16;
  transpose(buffers.q, columns, width, a.dim, buffers.q_t);
  product(numerics::Accumulator::fp32, {buffers.k, a.dim, 1}, {buffers.q_t, kTile}, buffers.scores, kTile, rows, width, a.dim);
  for (int r = 0; r < rows; ++r)
    for (int n = 0; n < columns; ++n)
      c[r * ld + n] = tile.k_flagged[r] || tile.q_flagged[n] ? numerics::quiet_nan() : buffers.scores[r * kTile + n];
}

}  // namespace flamia::cpu::FLAMIA_ISA
