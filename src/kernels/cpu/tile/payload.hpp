// SPDX-License-Identifier: Apache-2.0
// Exponents of blocks of a [key][query] tile, and rounding with them.
#pragma once
#include "kernels/cpu/tile/scores.hpp"

namespace flamia::cpu::FLAMIA_ISA {

/// The exponents of a tile's blocks: row(j)[i] is that of the pair (query i, key j).
struct BlockExponents {
  int* data;
  int keys_per_row;  // keys that share a row of 128 exponents
  const int* row(int j) const { return data + j / keys_per_row * kTile; }
};

FLAMIA_FN int payload_exponent(const Payload& form, std::uint32_t magnitude) {
  const float amax = numerics::float_of(magnitude);
  if (form.element == Element::e2m1)
    return form.floor ? numerics::floor_exponent<numerics::kE2M1>(amax) : numerics::ceil_exponent<numerics::kE2M1>(amax);
  return form.floor ? numerics::floor_exponent<numerics::kE4M3>(amax) : numerics::ceil_exponent<numerics::kE4M3>(amax);
}

namespace detail {

/// magnitudes[block of keys][query] = greatest |z| over the block's keys; masked pairs are 0 in z and do not count.
static void key_block_maxima(const float* z, const TileShape& t, int columns, std::uint32_t* magnitudes) {
  for (int j = 0; j < t.keys; ++j) {
    std::uint32_t* out = magnitudes + j / columns * kTile;
    const float* row = z + j * kTile;
    if (j % columns == 0)
      for (int i = 0; i < t.width; ++i) out[i] = magnitude_bits(row[i]);
    else
      for (int i = 0; i < t.width; ++i) {
        const std::uint32_t x = magnitude_bits(row[i]);
        out[i] = out[i] > x ? out[i] : x;
      }
  }
}

/// The same exponent for queries [begin, end) of one row of exponents.
static void fill_block(const Payload& form, std::uint32_t magnitude, int begin, int end, int* out) {
  const int e = payload_exponent(form, magnitude);
  for (int i = begin; i < end; ++i) out[i] = e;
}

}  // namespace detail

/// Exponents of blocks of `form.rows` queries x `form.columns` keys. right_reach >= 0: for key j only the queries >= j - right_reach of
/// a block count, so that no gradient of a key depends on a query before it (numerics.md §8, "its queries as for dV's R").
static BlockExponents block_exponents(const Payload& form, const float* z, const TileShape& t, std::int64_t right_reach,
                                      const Buffers& b) {
  detail::key_block_maxima(z, t, form.columns, b.magnitudes);
  const int key_blocks = (t.keys + form.columns - 1) / form.columns;
  const bool per_key = form.rows > 1 && form.columns > 1 && right_reach >= 0;
  for (int block = 0; block < key_blocks; ++block) {
    std::uint32_t* magnitudes = b.magnitudes + block * kTile;
    if (form.rows == 1) {
      for (int i = 0; i < t.width; ++i) b.exponents[block * kTile + i] = payload_exponent(form, magnitudes[i]);
      continue;
    }
    for (int begin = 0; begin < t.width; begin += form.rows) {
      const int end = numerics::min_of(begin + form.rows, t.width);
      for (int i = end - 2; i >= begin; --i)  // suffix maxima over the block's queries
        if (magnitudes[i + 1] > magnitudes[i]) magnitudes[i] = magnitudes[i + 1];
      if (!per_key) {
        detail::fill_block(form, magnitudes[begin], begin, end, b.exponents + block * kTile);
        continue;
      }
      for (int j = block * form.columns; j < numerics::min_of((block + 1) * form.columns, t.keys); ++j) {
        const std::int64_t from = greatest(t.k0 + j - right_reach - t.q0, begin);
        detail::fill_block(form, from < end ? magnitudes[from] : 0u, begin, end, b.exponents + j * kTile);
      }
    }
  }
  return {b.exponents, per_key ? 1 : form.columns};
}

/// What a payload's rounding did, over the visible pairs.
struct PayloadCounts {
  std::int64_t zero = 0, saturated = 0;
  double lost = 0;
};

/// code[i] = value of the code nearest z[i] * 2^-e[i].
static void round_with_exponents(const Payload& form, const float* z, const int* e, int width, float* code) {
  for (int i = 0; i < width; ++i) code[i] = numerics::mul(z[i], numerics::pow2(-e[i]));
  round_lanes(form.element, code, code, width);
}

}  // namespace flamia::cpu::FLAMIA_ISA
