// SPDX-License-Identifier: Apache-2.0
// One thread's working memory, cut into tiles. Head dim d, 128 rows or lanes each.
#pragma once
#include "kernels/cpu/call.hpp"

namespace flamia::cpu {

/// Numbers of the 128 queries of a tile (lanes) and of its 128 keys.
struct TileRows {
  // queries
  alignas(64) float rho[kTile];  // FP32(c log2 e) * 2^eQ; NaN if the query is flagged
  alignas(64) float m[kTile];
  alignas(64) float l[kTile];
  alignas(64) float correction[kTile];  // 2^(m_old - m_new)
  alignas(64) float d[kTile];           // D' in units of dO's exponent
  alignas(64) float lane[kTile];        // scratch of one key row
  alignas(64) float code[kTile];
  alignas(64) float sum[kTile];
  alignas(64) float fold[kTile];  // the integer part of an addend
  alignas(64) std::int32_t greatest[kTile];
  alignas(64) int q_exponent[kTile];   // of Q in S
  alignas(64) int q2_exponent[kTile];  // of Q in dK
  alignas(64) int g_exponent[kTile];   // of dO' in dP
  alignas(64) int g2_exponent[kTile];  // of dO' in dV
  alignas(64) int reference[kTile];    // R, or a payload's exponent per output row
  alignas(64) int seen[kTile];         // keys of the tile that the query sees
  int fresh[kTile];
  int careful[kTile], rise[kTile];  // tilesum: the row's maximum is looked at; steps that r rises before the next tile
  // FP32 factors of whole tokens beside their exponents: 1, but for FP32 scales per block and first-level scales (operand.hpp)
  alignas(64) float q_scale[kTile], q2_scale[kTile], g_scale[kTile], g2_scale[kTile], k_scale[kTile], k2_scale[kTile],
      v_scale[kTile];
  // keys
  int k_exponent[kTile], v_exponent[kTile], k2_exponent[kTile], prefix[kTile];
  int first[kTile], last[kTile];  // queries of the tile that see the key: [first, last)
  std::uint8_t q_flagged[kTile], k_flagged[kTile], v_flagged[kTile], g_flagged[kTile], other_flagged[kTile];
  float q_factor, q2_factor, k_factor, k2_factor, v_factor, g_factor, g2_factor;
};

struct Buffers {
  TileRows* rows;
  // [d][128], lanes are queries
  float *q_t, *g_t;
  // [128][d]
  float *q, *g, *k, *k2, *v, *part, *sum0, *sum1, *sum2;
  // [128 keys][128 queries]
  float *scores, *p, *ds, *payload;
  int* exponents;             // [128][128]
  std::uint32_t* magnitudes;  // [128][128]
  float* factors;             // [128][128]
};

inline constexpr int kPanels = 11;  // of 128 x d
inline constexpr int kSquares = 7;  // of 128 x 128
inline constexpr std::int64_t kRowFloats = (sizeof(TileRows) + 63) / 64 * 16;

FLAMIA_FN Buffers buffers_of(Scratch scratch, int dim) {
  Buffers b{};
  float* next = scratch.memory;
  b.rows = reinterpret_cast<TileRows*>(next);
  next += kRowFloats;
  float** const panels[kPanels] = {&b.q_t, &b.g_t, &b.q, &b.g, &b.k, &b.k2, &b.v, &b.part, &b.sum0, &b.sum1, &b.sum2};
  for (float** panel : panels) *panel = next, next += std::int64_t{kTile} * dim;
  float** const squares[] = {&b.scores, &b.p, &b.ds, &b.payload};
  for (float** square : squares) *square = next, next += std::int64_t{kTile} * kTile;
  b.exponents = reinterpret_cast<int*>(next);
  next += std::int64_t{kTile} * kTile;
  b.magnitudes = reinterpret_cast<std::uint32_t*>(next);
  next += std::int64_t{kTile} * kTile;
  b.factors = next;
  return b;
}

}  // namespace flamia::cpu
