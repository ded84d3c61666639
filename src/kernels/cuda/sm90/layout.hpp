// SPDX-License-Identifier: Apache-2.0
// Where quantised operands lie in device memory on Hopper: exactly as shared memory and the tensor core want them.
//
// Token axis. A document occupies consecutive *slots*, starting at a multiple of kSlotAlign; slot = slot_start[document] + position.
// Slots between a document's end and the next start, and kTailSlots slots after the last document, hold code 0: a tile may read
// past a document's end and meets finite numbers only.
//
// The layouts of codes are made of the tensor core's *core matrices*, 8 rows x 16 bytes stored contiguously (wgmma, K-major, no swizzle),
// so a tile is one contiguous range of bytes: it travels by plain bulk copies, no tensor map is needed, and a tile may start at
// any multiple of 16 slots.
//
//   rows        [head][slot / 8][d / 16][slot % 8][16 bytes]     contracted along d:      Q, K, V, dO
//   transposed  [head][slot / 16][d][16 bytes]                   contracted along tokens: Vt, dOt, Qt, Kt
//
// Values in BF16 (codes times scale, for products with dS in BF16, which take either major order) lie as the 128-byte swizzle wants them,
// so that they travel the same way: rows of 64 channels, eight of them an atom of 1,024 bytes, the 16-byte chunks of row r at
// place chunk ^ r:
//
//   rows16      [head][slot / 8][d / 64][slot % 8][8 chunks][8 elements]   contracted along tokens: Q, K
//
// In the transposed layout the 16 tokens of a group are permuted (`pi` for products whose A operand is packed from accumulator
// registers, `rho` for the A operand that stmatrix writes); the exact orders are below and are tested against the fragment maps.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define FLAMIA_LAYOUT_FN __host__ __device__ constexpr
#else
#define FLAMIA_LAYOUT_FN constexpr
#endif

namespace flamia::sm90 {

inline constexpr int kSlotAlign = 16;   // slots; a document starts at a multiple of this
inline constexpr int kTailSlots = 256;  // zero slots after the last document: no tile reaches further
inline constexpr int kKeyTile = 128;    // keys per tile, counted from the document's start
inline constexpr int kBlock = 32;       // tokens per token-block, counted from the document's start

/// Slots needed for `tokens` tokens in at most `documents` documents (host side bound; lengths are known on the device only).
FLAMIA_LAYOUT_FN std::int64_t slot_capacity(std::int64_t tokens, std::int64_t documents) {
  const std::int64_t nonempty = documents < tokens ? documents : tokens;
  const std::int64_t bound = tokens + nonempty * (kSlotAlign - 1) + kTailSlots;
  return (bound + kKeyTile - 1) / kKeyTile * kKeyTile;
}

/// Byte offset of element (head, slot, channel) in the `rows` layout; `slots` = slot_capacity, `d` = head dim.
FLAMIA_LAYOUT_FN std::int64_t rows_offset(std::int64_t slots, int d, std::int64_t head, std::int64_t slot, int channel) {
  return (head * slots + slot / 8 * 8) * d + std::int64_t{channel / 16} * 128 + slot % 8 * 16 + channel % 16;
}

/// Element offset of (head, slot, channel) in the `rows16` layout.
FLAMIA_LAYOUT_FN std::int64_t rows16_offset(std::int64_t slots, int d, std::int64_t head, std::int64_t slot, int channel) {
  const std::int64_t row = slot % 8;
  return (head * slots + slot / 8 * 8) * d + std::int64_t{channel / 64} * 512 + row * 64 + ((channel / 8 % 8) ^ row) * 8 +
         channel % 8;
}

/// Column (0..15) at which token i of a 16-token group lies: `pi` pairs with A fragments packed from an FP32 accumulator.
/// token -> column: 0 1 4 5 8 9 12 13 2 3 6 7 10 11 14 15
FLAMIA_LAYOUT_FN int pi_column(int token) { return token / 2 % 4 * 4 + token / 8 * 2 + token % 2; }

/// The same for `rho`, which pairs with the transposed 16-bit store of packed 8-bit accumulators.
/// column -> token: 0 8 1 9 2 10 3 11 4 12 5 13 6 14 7 15
FLAMIA_LAYOUT_FN int rho_column(int token) { return token % 8 * 2 + token / 8; }

enum class TokenOrder { pi, rho };

/// Byte offset of element (head, slot, channel) in the `transposed` layout.
FLAMIA_LAYOUT_FN std::int64_t transposed_offset(std::int64_t slots, int d, std::int64_t head, std::int64_t slot, int channel,
                                                TokenOrder order) {
  const int token = static_cast<int>(slot % 16);
  const int column = order == TokenOrder::pi ? pi_column(token) : rho_column(token);
  return (head * slots + slot / 16 * 16) * d + static_cast<std::int64_t>(channel) * 16 + column;
}

/// One document, made on the device from cu_seqlens (sanitised: 0 <= token_start, token_start + length <= tokens).
struct Document {
  std::int32_t slot_start;   // multiple of kSlotAlign
  std::int32_t token_start;  // first row of q, k, v, o
  std::int32_t length;       // tokens; 0 for an empty document
};

/// One item of the work list: a tile of a document; heads are enumerated by the kernel, not by the list.
struct WorkItem {
  std::int32_t document;
  std::int32_t first;  // position of the tile's first query (forward) or key (backward) in the document
};

}  // namespace flamia::sm90
