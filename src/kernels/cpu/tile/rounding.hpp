// SPDX-License-Identifier: Apache-2.0
// P and dS in blocks of a tile, whatever the type of their scales:
//
//   ue8m0  the exponents of payload.hpp, multiplied into the values
//   e4m3   byte = E4M3(amax / fl(largest * first)), s = value(byte), code = encode(x / fl(s * first)); s * code, which is exact, is the
//          value and `first` the outer factor: the form's constant, or that of a line of the tile along the contraction (quantize::first_level)
//   f32    s = fl(amax / largest), code = encode(x / s); the code is the value, s the outer factor
//
// A scale of 0 has codes 0. NaN counts in no maximum and stays NaN.
#pragma once
#include "kernels/cpu/tile/payload.hpp"
#include "quantize/scale.hpp"

namespace flamia::cpu::FLAMIA_ISA {

/// What stays outside the product, by pair: row(j)[i] for query i and key j, null for 1.
struct OuterFactors {
  const float* data = nullptr;
  int keys_per_row = kTile;
  const float* row(int j) const { return data + j / keys_per_row * kTile; }
  float at(int j, int i) const { return data ? row(j)[i] : 1.f; }
};

namespace detail {

/// magnitudes[block of keys][query] = greatest |x| of the pair's block.
static void block_maxima(const Payload& form, const float* x, const TileShape& t, std::uint32_t* magnitudes) {
  key_block_maxima(x, t, form.columns, magnitudes);
  if (form.rows == 1) return;
  for (int block = 0; block * form.columns < t.keys; ++block) {
    std::uint32_t* row = magnitudes + block * kTile;
    for (int begin = 0; begin < t.width; begin += form.rows) {
      const int end = numerics::min_of(begin + form.rows, t.width);
      std::uint32_t greatest_bits = 0;
      for (int i = begin; i < end; ++i) greatest_bits = greatest_bits > row[i] ? greatest_bits : row[i];
      for (int i = begin; i < end; ++i) row[i] = greatest_bits;
    }
  }
}

FLAMIA_FN float first_level(std::uint32_t magnitude, float largest) {
  return quantize::first_level(numerics::float_of(magnitude), largest);
}

/// The first level of E4M3 scales: of each query's lines of the tile, of each key's column, or of the whole tile.
static OuterFactors first_levels(const Payload& form, const TileShape& t, const std::uint32_t* magnitudes, float* table) {
  const int blocks = (t.keys + form.columns - 1) / form.columns;
  const float largest = largest_code(form.element);
  if (!form.two_level) {
    if (form.first_level == 1.f) return {};
    for (int i = 0; i < t.width; ++i) table[i] = form.first_level;
    return {table, kTile};
  }
  if (form.rows == 1) {
    const int per_line = form.line / form.columns;
    for (int begin = 0; begin < blocks; begin += per_line) {
      std::uint32_t line[kTile] = {};
      for (int block = begin; block < numerics::min_of(begin + per_line, blocks); ++block)
        for (int i = 0; i < t.width; ++i) {
          const std::uint32_t x = magnitudes[block * kTile + i];
          line[i] = line[i] > x ? line[i] : x;
        }
      for (int i = 0; i < t.width; ++i) table[begin / per_line * kTile + i] = first_level(line[i], largest);
    }
    return {table, form.line};
  }
  const bool of_tile = form.columns != 1;
  std::uint32_t line = 0;
  for (int block = 0; block < blocks; ++block) {
    if (!of_tile) line = 0;
    for (int i = 0; i < t.width; ++i) line = line > magnitudes[block * kTile + i] ? line : magnitudes[block * kTile + i];
    if (!of_tile)
      for (int i = 0; i < t.width; ++i) table[block * kTile + i] = first_level(line, largest);
  }
  if (of_tile)
    for (int i = 0; i < t.width; ++i) table[i] = first_level(line, largest);
  return {table, of_tile ? kTile : 1};
}

static OuterFactors round_e4m3_blocks(const Payload& form, const float* x, float* value, const TileShape& t, const Buffers& b) {
  block_maxima(form, x, t, b.magnitudes);
  const OuterFactors outer = first_levels(form, t, b.magnitudes, b.factors);
  const float largest = largest_code(form.element);
  alignas(64) float scale[kTile], divisor[kTile];
  for (int j = 0; j < t.keys; ++j) {
    if (j % form.columns == 0)
      for (int i = 0; i < t.width; ++i) {
        const float first = outer.at(j, i), amax = numerics::float_of(b.magnitudes[j / form.columns * kTile + i]);
        scale[i] = numerics::round_e4m3(amax / numerics::mul(largest, first));
        divisor[i] = scale[i] == 0.f ? 1.f : numerics::mul(scale[i], first);
      }
    const float* in = x + j * kTile;
    float* out = value + j * kTile;
    for (int i = 0; i < t.width; ++i) out[i] = in[i] / divisor[i];
    round_lanes(form.element, out, out, t.width);
    for (int i = 0; i < t.width; ++i) out[i] = numerics::mul(out[i], scale[i]);
  }
  return outer;
}

static OuterFactors round_f32_blocks(const Payload& form, const float* x, float* value, const TileShape& t, const Buffers& b) {
  block_maxima(form, x, t, b.magnitudes);
  const float largest = largest_code(form.element);
  const OuterFactors outer{b.factors, form.columns};
  for (int block = 0; block * form.columns < t.keys; ++block)
    for (int i = 0; i < t.width; ++i) b.factors[block * kTile + i] = numerics::float_of(b.magnitudes[block * kTile + i]) / largest;
  for (int j = 0; j < t.keys; ++j) {
    const float* in = x + j * kTile;
    const float* scale = outer.row(j);
    float* out = value + j * kTile;
    for (int i = 0; i < t.width; ++i) out[i] = in[i] / (scale[i] == 0.f ? 1.f : scale[i]);
    round_lanes(form.element, out, out, t.width);
    for (int i = 0; i < t.width; ++i) out[i] = scale[i] == 0.f && !numerics::is_nan(out[i]) ? 0.f : out[i];
  }
  return outer;
}

}  // namespace detail

/// value[key][query] of x[key][query], in which masked pairs are 0. Uses b.exponents or b.factors, and b.magnitudes.
static OuterFactors round_blocks(const Payload& form, const float* x, float* value, const TileShape& t, const Buffers& b) {
  if (form.scale == ScaleType::e4m3) return detail::round_e4m3_blocks(form, x, value, t, b);
  if (form.scale == ScaleType::f32) return detail::round_f32_blocks(form, x, value, t, b);
  const BlockExponents exponents = block_exponents(form, x, t, -1, b);
  for (int j = 0; j < t.keys; ++j) {
    const int* e = exponents.row(j);
    float* out = value + j * kTile;
    round_with_exponents(form, x + j * kTile, e, t.width, out);
    for (int i = 0; i < t.width; ++i) out[i] = times_pow2(out[i], e[i]);
  }
  return {};
}

/// sum[i] = sum over the keys of value times outer factor, each block of keys with one factor summed first. `lane` is scratch.
static void sum_of_values(const float* value, const OuterFactors& outer, const TileShape& t, float* lane, float* sum) {
  for (int i = 0; i < t.width; ++i) sum[i] = 0.f;
  for (int begin = 0; begin < t.keys; begin += outer.keys_per_row) {
    const int end = numerics::min_of(begin + outer.keys_per_row, t.keys);
    for (int i = 0; i < t.width; ++i) lane[i] = 0.f;
    for (int j = begin; j < end; ++j)
      for (int i = 0; i < t.width; ++i) lane[i] = numerics::add(lane[i], value[j * kTile + i]);
    for (int i = 0; i < t.width; ++i) sum[i] = numerics::add(sum[i], numerics::mul(lane[i], outer.at(begin, i)));
  }
}

}  // namespace flamia::cpu::FLAMIA_ISA
