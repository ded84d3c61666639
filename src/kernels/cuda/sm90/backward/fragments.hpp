// SPDX-License-Identifier: Apache-2.0
// Who holds what: the index maps of the backward kernel, shared by its device code and by the host test that emulates a step.
//
// Lane = 4 g + c of warp w. Scores are held transposed, 64 keys x 64 queries a warpgroup: register i of a thread belongs to key
// 16 w + g + 8 (i / 2 % 2) of the warpgroup and to query 8 (i / 4) + 2 c + i % 2 of the step.
#pragma once
#include "records.hpp"

namespace flamia::sm90::backward {

inline constexpr int kScores = 32;    // registers of a 64 x 64 accumulator
inline constexpr int kCodeWords = 8;  // four E4M3 codes each: the A operand of dV or dK, 64 queries

FLAMIA_LAYOUT_FN int row_of(int warp, int lane, int i) { return 16 * warp + lane / 4 + 8 * (i / 2 % 2); }
FLAMIA_LAYOUT_FN int column_of(int lane, int i) { return 8 * (i / 4) + 2 * (lane % 4) + i % 2; }

/// Code word 2 u + half holds registers first, first + 1, first + 4, first + 5: queries 16 u + 2 c + {0, 1, 8, 9} of key `half`.
FLAMIA_LAYOUT_FN int first_of_word(int u, int half) { return 8 * u + 2 * half; }

/// dS on its way to the dQ warpgroup: FP16 [key / 8][query][key % 8], 16-byte lines of eight keys.
FLAMIA_LAYOUT_FN int exchange_offset(int query, int key) { return key / 8 * (kQueryStep * 16) + query * 16 + key % 8 * 2; }

/// Line that lane `lane` of a consumer warp addresses for the store of queries 16 u ... 16 u + 15: matrices (queries 0-7, keys 0-7),
/// (0-7, 8-15), (8-15, 0-7), (8-15, 8-15) of the warp's 16 keys.
FLAMIA_LAYOUT_FN int store_line(int group, int warp, int lane, int u) {
  const int matrix = lane / 8;
  return exchange_offset(16 * u + 8 * (matrix / 2) + lane % 8, 64 * group + 16 * warp + 8 * (matrix % 2));
}

/// Line that a lane of the dQ warpgroup addresses when its warp reads 16 queries x keys 16 t ... 16 t + 15: matrices (queries 0-7, keys 0-7),
/// (8-15, 0-7), (0-7, 8-15), (8-15, 8-15). Registers 0 and 2 are row g, 1 and 3 are row g + 8.
FLAMIA_LAYOUT_FN int load_line(int warp, int lane, int t) {
  const int matrix = lane / 8;
  return exchange_offset(16 * warp + 8 * (matrix % 2) + lane % 8, 16 * t + 8 * (matrix / 2));
}

/// Where a lane of the dQ warpgroup stores the four codes that it makes of registers 0 and 2 of a load (row g), in place of dS; those of
/// registers 1 and 3 (row g + 8) go exchange_offset(8, 0) further. The keys of 16 come in order pi.
FLAMIA_LAYOUT_FN int code_place(int warp, int lane) { return exchange_offset(16 * warp + lane / 4, 0) + lane % 4 * 4; }

/// Where register v of half h (64 channels) of a dQ fragment lies in the partial sums, relative to the 16 slots of its warp, in elements.
/// One instruction of a warp covers 512 contiguous bytes.
template <int kBytes>
FLAMIA_LAYOUT_FN int partial_offset(int lane, int h, int v) {
  constexpr int kRun = 16 / kBytes;  // elements a 16-byte access holds
  return h * (16 * 64) + v / kRun * (32 * kRun) + lane * kRun + v % kRun;
}

}  // namespace flamia::sm90::backward
