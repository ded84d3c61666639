// SPDX-License-Identifier: Apache-2.0
// Records: what a tile must know about its queries and keys besides their codes, made once by the prepare kernel from exponents, m and D'.
//
// Everything a thread multiplies with is ready here as a power of two, so the tile loop touches no exponent byte. All entries are finite,
// also in slots without a token, but for NaN where a flagged token must turn its visible pairs into NaN: `bias` and `slope` of keys.
//
// Units. With P = exp2(y rho + bias), bias = 8 - m, the kernel's dS is  Y = P * fma(acc, 2^(eV - 19), -D' 2^(-eG - 19)),  that is the dS of
// numerics section 8 times 2^-11: |Y| 2^-eV stays within FP16 for any input whose V exponents are one.
#pragma once
#include <cstdint>

#include "../layout.hpp"

namespace flamia::sm90::backward {

inline constexpr int kCodeShift = 8;   // P carries 2^8: the largest code of a row is 256
inline constexpr int kUnit = 11;       // Y = dS * 2^-11: P reaches 1.72
inline constexpr int kQueryStep = 64;  // queries a step of the tile loop
inline constexpr int kFlaggedByte = 255;
inline constexpr int kExponentBias = 127;
inline constexpr int kLeastExponent = -127;
inline constexpr int kLeastReach = -100;  // smaller V exponents count as this where FP16 is normalised

/// Row records: [query_heads][slots / 16][RowField][16 words], the words of a field in order pi (a thread's four queries are 16 bytes).
enum RowField : int {
  kBias,    // float: 8 - m; NaN for a flagged query or gradient
  kOffset,  // float: D' 2^(-eG - 19)
  kRho,     // float: FP32(c log2 e) 2^eQ
  kFold,    // float: 2^(eG - R of the 128-query tile)
  kWeight,  // float: 2^(eG + eQ + 11 - 2 lift), Y in units of dK's payload
  kDqUnit,  // int: eG + 11 + z
  kReach,   // int16 x 2: exponent that D' asks of FP16; (high half) the greatest of the 64-query step
  kFoldMax,  // int8 x 2, int16: greatest eG among the tile's queries from this one on; lift of the 64-query step; greatest eG of the tile
  kRowFields
};
inline constexpr int kGroup = 16;                                              // slots a record group covers
inline constexpr int kFieldBytes = kGroup * 4;                                 // 64
inline constexpr int kRowGroupBytes = kRowFields * kFieldBytes;                // 512
inline constexpr int kStepRecordBytes = kQueryStep / kGroup * kRowGroupBytes;  // 2048

/// Key records: [key_heads][slots].
struct alignas(16) KeyRecord {
  float slope;          // 2^eK; NaN if key or value is flagged
  float value;          // 2^(eV - 19)
  float share;          // 2^(eK - greatest eK of the tile + tile_shift)
  std::uint32_t reach;  // bytes: greatest eK and eV (each + 127) among the tile's keys up to this one; KeyFlags
};
enum KeyFlags : std::uint32_t { kUniform = 1u << 16 };  // every key of the tile has the same exponents and none is flagged
inline constexpr int kTileRecordBytes = kKeyTile * static_cast<int>(sizeof(KeyRecord));  // 2048

FLAMIA_LAYOUT_FN int key_reach(std::uint32_t reach) { return static_cast<int>(reach & 255) - kExponentBias; }
FLAMIA_LAYOUT_FN int value_reach(std::uint32_t reach) {
  const int exponent = static_cast<int>(reach >> 8 & 255) - kExponentBias;
  return exponent < kLeastReach ? kLeastReach : exponent;
}
/// Exponent of the power of two that brings Y into FP16 wherever all rows of a step may know the whole tile, by the tile's greatest eV.
FLAMIA_LAYOUT_FN int tile_shift(int value_exponent) {
  const int exponent = value_exponent < kLeastReach ? kLeastReach : value_exponent;
  return exponent > 100 ? -100 : -exponent;
}
FLAMIA_LAYOUT_FN int low_half(int word) { return static_cast<std::int16_t>(word & 0xFFFF); }
FLAMIA_LAYOUT_FN int high_half(int word) { return word >> 16; }
FLAMIA_LAYOUT_FN int pack_halves(int low, int high) {
  return static_cast<int>((static_cast<unsigned>(high) << 16) | (static_cast<unsigned>(low) & 0xFFFFu));
}

FLAMIA_LAYOUT_FN int pack_fold(int from_here, int lift, int of_tile) {
  return pack_halves(static_cast<int>((static_cast<unsigned>(lift) & 0xFFu) << 8 | (static_cast<unsigned>(from_here) & 0xFFu)),
                     of_tile);
}
FLAMIA_LAYOUT_FN int fold_from_here(int word) { return static_cast<std::int8_t>(word & 0xFF); }
FLAMIA_LAYOUT_FN int lift_of(int word) { return static_cast<std::int8_t>(word >> 8 & 0xFF); }

/// Half of the exponent that the weights of a step leave to dK's promotion, from the greatest eG + eQ + 11 among its queries: 0 unless they come near
/// the end of FP32's range. Exact, but where weights of one step lie 2^180 apart.
inline constexpr int kLeastWeight = -60, kGreatestWeight = 60;
FLAMIA_LAYOUT_FN int step_lift(int greatest) {
  if (greatest > kGreatestWeight) return (greatest - kGreatestWeight + 1) / 2;
  return greatest < kLeastWeight ? -((kLeastWeight - greatest + 1) / 2) : 0;
}

/// Byte offset of a field of one row, relative to the record of its group's head.
FLAMIA_LAYOUT_FN std::int64_t row_field_offset(std::int64_t slots, std::int64_t head, std::int64_t slot, int field) {
  return (head * slots + slot / kGroup * kGroup) / kGroup * kRowGroupBytes + field * kFieldBytes +
         pi_column(static_cast<int>(slot % kGroup)) * 4;
}

}  // namespace flamia::sm90::backward
