// SPDX-License-Identifier: Apache-2.0
// Codes to code values: 128 tokens of one head of one form (call.hpp, Operand).
#pragma once
#include "kernels/cpu/call.hpp"
#include "kernels/cpu/tile/simd.hpp"
#include "numerics/exponent.hpp"

namespace flamia::cpu::FLAMIA_ISA {

namespace detail {

static std::int64_t scale_row(const Operand& form, const Document& document, std::int64_t position) {
  if (form.block_size < 0) return document.start + position;
  return document.blocks_before[form.block_size] + position / form.rows;
}

static float f32_at(const std::uint8_t* numbers, std::int64_t index) {
  std::uint32_t bits = 0;
  for (int byte = 3; byte >= 0; --byte) bits = bits << 8 | numbers[4 * index + byte];
  return numerics::float_of(bits);
}

/// Value of a stored scale; `flagged` if it marks NaN or infinity.
static float scale_value(const Operand& form, std::int64_t index, bool* flagged) {
  float value = 1.f;
  if (form.scale == ScaleType::ue8m0) {
    *flagged = form.scales[index] == numerics::kFlagged;
    value = numerics::pow2(numerics::decode_ue8m0(form.scales[index]));
  } else if (form.scale == ScaleType::e4m3) {
    value = numerics::decode<numerics::kE4M3>(form.scales[index]);
    *flagged = numerics::is_nan(value);
  } else if (form.scale == ScaleType::f32) {
    value = f32_at(form.scales, index);
    *flagged = numerics::is_nan(value);
  }
  return *flagged ? 1.f : value;
}

static float first_level(const Operand& form, const Document& document, int head, std::int64_t position) {
  const std::int64_t tile = document.blocks_before[form.tile_size] + position / kTile;
  return f32_at(form.first_levels, tile * form.heads + head);
}

template <numerics::MiniFloat F>
static void decode_bytes(const std::uint8_t* codes, int dim, float* out) {
  for (int c = 0; c < dim; ++c) out[c] = numerics::decode<F>(codes[c]);
}

/// Returns false if a BF16 element is NaN or infinite (the other elements have their scales to say so).
static bool decode_row(const Operand& form, const std::uint8_t* codes, float* out) {
  switch (form.element) {
    case Element::bf16: {
      std::uint32_t top = 0;
      for (int c = 0; c < form.dim; ++c) {
        const std::uint32_t bits = static_cast<std::uint32_t>(codes[2 * c] | codes[2 * c + 1] << 8) << 16;
        out[c] = numerics::float_of(bits);
        const std::uint32_t magnitude = bits & 0x7fffffffu;
        top = magnitude > top ? magnitude : top;
      }
      return top < 0x7f800000u;
    }
    case Element::e4m3:
      decode_bytes<numerics::kE4M3>(codes, form.dim, out);
      break;
    case Element::e5m2:
      decode_bytes<numerics::kE5M2>(codes, form.dim, out);
      break;
    case Element::e2m1:
      for (int c = 0; c < form.dim; ++c) out[c] = numerics::decode<numerics::kE2M1>(codes[c / 2] >> (c % 2 * 4) & 0xfu);
      break;
    case Element::int8:
      for (int c = 0; c < form.dim; ++c) out[c] = numerics::decode_int8(static_cast<std::int8_t>(codes[c]));
      break;
  }
  return true;
}

static std::int64_t row_bytes(const Operand& form) {
  return form.element == Element::bf16 ? 2 * form.dim : form.element == Element::e2m1 ? form.dim / 2 : form.dim;
}

}  // namespace detail

/// `rows` tokens from `position` of the document: values [rows][dim], exponents, FP32 factors of whole tokens (1 beyond `rows`), flags.
/// A flagged token has values 0, exponent 0. Returns the factor of the whole form: its one FP32 scale or its tensor scale.
static float load_values(const Operand& form, const Document& document, int head, std::int64_t position, int rows, float* values,
                         int* exponents, float* scales, std::uint8_t* flagged) {
  const bool blocks = form.group == Group::Kind::blocks;
  const bool inner = blocks && (form.columns != 0 || form.scale == ScaleType::e4m3 || form.in_bf16);  // multiplied into the values
  float factor = form.tensor_scale;
  for (int r = 0; r < kTile; ++r) scales[r] = 1.f;
  bool all_flagged = false;
  int exponent = 0;
  if (form.group == Group::Kind::tensor || form.group == Group::Kind::head) {
    const std::int64_t index = form.group == Group::Kind::head ? head : 0;
    const float value = detail::scale_value(form, index, &all_flagged);
    if (form.scale == ScaleType::ue8m0)
      exponent = numerics::decode_ue8m0(form.scales[index]);
    else
      factor = numerics::mul(factor, value);
  }
  for (int r = 0; r < rows; ++r) {
    float* out = values + std::int64_t{r} * form.dim;
    const std::int64_t token = document.start + position + r;
    bool bad = !detail::decode_row(form, form.codes + (token * form.heads + head) * detail::row_bytes(form), out) || all_flagged;
    exponents[r] = exponent;
    if (blocks) {
      const std::int64_t base = (detail::scale_row(form, document, position + r) * form.heads + head) * form.column_groups;
      const int width = form.columns == 0 ? form.dim : form.columns;
      for (int g = 0; g < form.column_groups; ++g) {
        bool flag = false;
        const float value = detail::scale_value(form, base + g, &flag);
        bad = bad || flag;
        if (!inner && form.scale == ScaleType::f32)
          scales[r] = value;
        else if (!inner)
          exponents[r] = numerics::decode_ue8m0(form.scales[base]);
        else
          for (int c = g * width; c < numerics::min_of((g + 1) * width, form.dim); ++c) out[c] = numerics::mul(out[c], value);
      }
      for (int c = 0; form.in_bf16 && c < form.dim; ++c) out[c] = numerics::round_bf16(out[c]);
    }
    flagged[r] = bad ? 1 : 0;
    if (bad) {
      exponents[r] = 0;
      scales[r] = 1.f;
      for (int c = 0; c < form.dim; ++c) out[c] = 0.f;
    }
    if (form.first_levels)
      scales[r] = detail::first_level(form, document, head, position + r);  // of the tile, also for a flagged token
  }
  return factor;
}

/// Greatest exponent by which a token's codes are scaled, whatever the grouping; the least one for a flagged token.
static int greatest_exponent(const Operand& form, const Document& document, int head, std::int64_t position) {
  if (form.scale != ScaleType::ue8m0) {
    bool flagged = false;  // FP32 and E4M3 scales: the least power of two above them
    int greatest = numerics::kLeastExponent;
    const bool blocks = form.group == Group::Kind::blocks;
    const std::int64_t base = blocks ? (detail::scale_row(form, document, position) * form.heads + head) * form.column_groups
                              : form.group == Group::Kind::head ? head
                                                                : 0;
    const float first = form.first_levels ? detail::first_level(form, document, head, position) : form.tensor_scale;
    for (int g = 0; g < (blocks ? form.column_groups : 1); ++g) {
      const float value = numerics::mul(detail::scale_value(form, base + g, &flagged), first);
      if (!flagged && value > 0.f) greatest = numerics::max_of(greatest, numerics::ceil_log2(value));
    }
    return greatest;
  }
  if (form.group != Group::Kind::blocks) {
    const std::uint8_t byte = form.scales[form.group == Group::Kind::head ? head : 0];
    return byte == numerics::kFlagged ? numerics::kLeastExponent : numerics::decode_ue8m0(byte);
  }
  const std::int64_t base = (detail::scale_row(form, document, position) * form.heads + head) * form.column_groups;
  int greatest = numerics::kLeastExponent;
  for (int g = 0; g < form.column_groups; ++g)
    if (form.scales[base + g] != numerics::kFlagged)
      greatest = numerics::max_of(greatest, numerics::decode_ue8m0(form.scales[base + g]));
  return greatest;
}

/// out[c][lane] = values[lane][c]; lanes from `rows` to `width` are 0. Rows of `out` are kTile floats apart.
static void transpose(const float* values, int rows, int width, int dim, float* out) {
  constexpr int kBlock = 16;
  for (int r0 = 0; r0 < width; r0 += kBlock)
    for (int c0 = 0; c0 < dim; c0 += kBlock)
      for (int c = c0; c < c0 + kBlock; ++c)
        for (int r = r0; r < r0 + kBlock; ++r) out[c * kTile + r] = r < rows ? values[std::int64_t{r} * dim + c] : 0.f;
}

}  // namespace flamia::cpu::FLAMIA_ISA
