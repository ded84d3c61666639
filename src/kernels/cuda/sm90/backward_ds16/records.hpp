// SPDX-License-Identifier: Apache-2.0
// Records of the backward pass with dS in BF16: what a step must know about its queries and keys besides their codes, made once by the prepare
// kernel. Every factor is ready as a power of two; all are finite, but for NaN in `bias` (a flagged query or gradient) and in `slope` (a
// flagged key or value), which turns P and with it the codes and dS of the token's visible pairs into NaN.
//
// dS = P 2^8 * fma(acc, value * gain, -offset) per block and (P 2^8 * fold) * fma(acc, value * gain, -offset) per token, in true units: BF16 has
// FP32's range, so no row, tile or tensor needs a unit of its own. That R is in all three factors per token costs no bit: it cancels in powers of
// two (as long as R exceeds eG by less than about 80).
#pragma once
#include <cstdint>

#include "../backward/backward.hpp"
#include "../backward/records.hpp"

namespace flamia::sm90::ds16 {

using backward::kCodeShift;
using backward::kExponentBias;
using backward::kFlaggedByte;
using backward::kGroup;
using backward::kLeastExponent;
using backward::kQueryStep;

/// No factor or product of factors with a sum of codes (below 2^25) may be infinite, or a masked pair's 0 would become NaN: exponents are held
/// below these, which only values above 10^33 exceed.
inline constexpr int kGreatestValue = 100, kGreatestGain = 112;
inline constexpr float kGreatestFactor = 0x1p100f;
/// The power of two that FP16 partial sums of dQ carry is held within these, so that it is a normal number and so is its inverse.
inline constexpr int kGreatestUnit = 126;

inline constexpr float kLog2E = 1.4426950408889634f;

/// Bytes of an element of Q and K as the scores take them in. NVFP4: code times scale in FP16, exact, so those of a token have no exponent.
template <ScaleGroup kScaleGroup>
inline constexpr int kScoreBytes = kScaleGroup == ScaleGroup::nvfp4 ? 2 : 1;

/// Row records: [query_heads][slots / 16], each a group of 16 queries: fields of 16 words in order pi (a thread's four queries are 16 bytes), then
/// the group's own words.
template <ScaleGroup kScaleGroup>
struct RowRecord {
  static constexpr bool kPerToken = kScaleGroup != ScaleGroup::block;
  static constexpr int kFieldBytes = kGroup * 4;
  enum Field : int {
    kBias = 0,                // 8 - m
    kOffset = kFieldBytes,    // D' 2^-8; per token D' 2^(R - eG - 8)
    kRho = 2 * kFieldBytes,   // FP32(c log2 e) 2^(eQ + common)  per token only, like the next one
    kFold = 3 * kFieldBytes,  // 2^(eG - R), where R is that of the 128-query tile
    kWords = (kPerToken ? 4 : 2) * kFieldBytes,
  };
  enum Word : int {      // one number for the group: a token-block's, or the tile's
    kBlockRho = kWords,  // per token 2^common
    kBlockFold = kWords + 4,
    kGain = kWords + 8,        // 2^(eG - 8); per token 2^(R - 8)
    kReference = kWords + 12,  // int: R
  };
  static constexpr int kBytes = kWords + 16;
  static constexpr int kStepBytes = kQueryStep / kGroup * kBytes;
};

/// Beside them, [query_heads][slots]: R over the queries of the 128-query tile from this one on, and 2^z.
struct RowArrays {
  std::uint8_t* records;
  std::int32_t* references;
  float* units;
};

/// Key records: [key_heads][slots].
struct alignas(8) KeyFactors {
  float slope;  // 2^eK, per token 2^(eK - common); NaN if key or value is flagged
  float value;  // 2^eV
};
inline constexpr int kTileFactorBytes = kKeyTile * static_cast<int>(sizeof(KeyFactors));

// The buffers are those of the other pass (backward_scratch), which needs more.
static_assert(RowRecord<ScaleGroup::token>::kBytes + 2 * 4 * kGroup <= backward::kRowGroupBytes);
static_assert(sizeof(KeyFactors) <= sizeof(backward::KeyRecord));

/// How the buffer for row records is divided.
template <ScaleGroup kScaleGroup>
FLAMIA_LAYOUT_FN RowArrays row_arrays(void* buffer, std::int64_t slots, int query_heads) {
  const std::int64_t rows = slots * query_heads;
  auto* const records = static_cast<std::uint8_t*>(buffer);
  auto* const references = reinterpret_cast<std::int32_t*>(records + rows / kGroup * RowRecord<kScaleGroup>::kBytes);
  return {records, references, reinterpret_cast<float*>(references + rows)};
}

}  // namespace flamia::sm90::ds16
