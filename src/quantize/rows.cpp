// SPDX-License-Identifier: Apache-2.0
#include "quantize/rows.hpp"

#include <cstring>

#include "numerics/exponent.hpp"
#include "numerics/format.hpp"
#include "numerics/hadamard.hpp"

namespace flamia::quantize {
namespace {

using namespace flamia::numerics;

// ---- bodies: always inlined into the versions below, which alone carry a target attribute ----

FLAMIA_FN void load_body(const void* row, DType dtype, int dim, bool divide, float divisor, bool turn, float* __restrict out) {
  switch (dtype) {
    case DType::bf16: {
      const auto* x = static_cast<const std::uint16_t*>(row);
      for (int c = 0; c < dim; ++c) out[c] = decode_bf16(x[c]);
      break;
    }
    case DType::f16: {
      const auto* x = static_cast<const std::uint16_t*>(row);
      for (int c = 0; c < dim; ++c) out[c] = decode_f16(x[c]);
      break;
    }
    case DType::f32:
      std::memcpy(out, row, sizeof(float) * static_cast<std::size_t>(dim));
      break;
  }
  if (divide)
    for (int c = 0; c < dim; ++c) out[c] = out[c] / divisor;
  if (turn && dim == 128) rotate<128>(out);
  if (turn && dim == 64) rotate<64>(out);
}

FLAMIA_FN void magnitudes_body(const float* x, std::int64_t rows, int dim, std::uint32_t* __restrict magnitudes) {
  for (std::int64_t r = 0; r < rows; ++r, x += dim)
    for (int c = 0; c < dim; ++c) {
      const std::uint32_t u = bits_of(x[c]) & 0x7fffffffu;
      magnitudes[c] = u > magnitudes[c] ? u : magnitudes[c];
    }
}

FLAMIA_FN void group_magnitudes_body(const std::uint32_t* __restrict magnitudes, int dim, int width,
                                     std::uint32_t* __restrict groups) {
  for (int begin = 0, g = 0; begin < dim; begin += width, ++g) {
    const int end = min_of(begin + width, dim);
    std::uint32_t greatest = 0;
    for (int c = begin; c < end; ++c) greatest = magnitudes[c] > greatest ? magnitudes[c] : greatest;
    groups[g] = greatest;
  }
}

struct ByFactor {
  const float* __restrict x;
  const float* __restrict factor;
  FLAMIA_FN float value(int c) const { return mul(x[c], factor[c]); }
  FLAMIA_FN std::uint8_t keep(int) const { return 0xff; }
};

struct ByDivision {
  const float* __restrict x;
  const float* __restrict divisor;
  const std::uint8_t* __restrict kept;
  FLAMIA_FN float value(int c) const { return x[c] / divisor[c]; }
  FLAMIA_FN std::uint8_t keep(int c) const { return kept[c]; }
};

/// FP16(x) as FP32.
FLAMIA_FN float round_f16(float x) { return decode_f16(encode_f16(x)); }

struct ByInverse {
  const float* __restrict x;
  const float* __restrict inverse;
  const std::uint8_t* __restrict kept;
  FLAMIA_FN float value(int c) const { return round_f16(mul(x[c], inverse[c])); }
  FLAMIA_FN std::uint8_t keep(int c) const { return kept[c]; }
};

template <MiniFloat F, class Source>
FLAMIA_FN void encode_bytes(Source source, int begin, int end, std::uint8_t* __restrict codes) {
  for (int c = begin; c < end; ++c) codes[c - begin] = static_cast<std::uint8_t>(encode<F>(source.value(c)) & source.keep(c));
}

/// E2M1, first a byte a code, then two codes a byte: both loops vectorise.
template <class Source>
FLAMIA_FN void encode_pairs(Source source, int dim, std::uint8_t* __restrict codes) {
  for (int begin = 0; begin < dim; begin += 128) {
    std::uint8_t wide[128];
    const int n = min_of(128, dim - begin);
    encode_bytes<kE2M1>(source, begin, begin + n, wide);
    for (std::int64_t c = 0; c < n / 2; ++c) codes[begin / 2 + c] = static_cast<std::uint8_t>(wide[2 * c] | wide[2 * c + 1] << 4);
  }
}

template <class Source>
FLAMIA_FN void encode_body(Element element, Source source, int dim, std::uint8_t* __restrict codes) {
  switch (element) {
    case Element::e4m3:
      encode_bytes<kE4M3>(source, 0, dim, codes);
      break;
    case Element::e5m2:
      encode_bytes<kE5M2>(source, 0, dim, codes);
      break;
    case Element::int8:
      for (int c = 0; c < dim; ++c) codes[c] = static_cast<std::uint8_t>(encode_int8(source.value(c))) & source.keep(c);
      break;
    case Element::e2m1:
      encode_pairs(source, dim, codes);
      break;
    case Element::bf16:
      break;  // has no scale: encode_bf16
  }
}

/// FP16(x * x + sum), rounded once; x and sum are FP16 numbers. x * x is exact; their sum is rounded to odd first, which decides every
/// later rounding as the exact sum would.
FLAMIA_FN float add_square_f16(float x, float sum) {
  const float square = mul(x, x), near = add(sum, square), back = add(near, -sum);
  const float rest = add(add(sum, -add(near, -back)), add(square, -back));
  const std::uint32_t below = rest < 0.f ? 1u : 0u, inexact = rest < 0.f || rest > 0.f ? 1u : 0u;
  return round_f16(float_of((bits_of(near) - below) | inexact));
}

FLAMIA_FN void inverse_errors_body(const float* __restrict x, const float* __restrict inverse, int dim, int width,
                                   float* __restrict scratch, float* __restrict sums) {
  for (int c = 0; c < dim; ++c) {
    const float quotient = float_of(bits_of(round_f16(mul(x[c], inverse[c]))) & 0x7fffffffu);
    scratch[c] = round_f16(add(quotient, -decode<kE2M1>(encode<kE2M1>(quotient))));
  }
  for (int begin = 0, g = 0; begin < dim; begin += width, ++g) {
    const int end = min_of(begin + width, dim);
    float total = 0.f;
    for (int octet = begin; octet < end; octet += 8) {
      float sum[2] = {0.f, 0.f};
      for (int c = octet; c < min_of(octet + 8, end); ++c) sum[(c - octet) % 2] = add_square_f16(scratch[c], sum[(c - octet) % 2]);
      total = add(total, add(sum[0], sum[1]));
    }
    sums[g] = total;
  }
}

FLAMIA_FN void encode_bf16_body(const float* __restrict x, int dim, std::uint8_t* __restrict codes) {
  for (std::int64_t c = 0; c < dim; ++c) {
    const std::uint16_t code = numerics::encode_bf16(x[c]);
    codes[2 * c] = static_cast<std::uint8_t>(code);
    codes[2 * c + 1] = static_cast<std::uint8_t>(code >> 8);
  }
}

// ---- one set of functions per instruction set ----

// NOLINTBEGIN(bugprone-macro-parentheses): an attribute and a namespace cannot stand in parentheses

#define FLAMIA_ROW_KERNELS(set, target)                                                                                          \
  namespace set {                                                                                                                \
  target void load(const void* row, DType dtype, int dim, bool divide, float divisor, bool turn, float* out) {                   \
    load_body(row, dtype, dim, divide, divisor, turn, out);                                                                      \
  }                                                                                                                              \
  target void magnitudes(const float* x, std::int64_t rows, int dim, std::uint32_t* out) { magnitudes_body(x, rows, dim, out); } \
  target void group_magnitudes(const std::uint32_t* x, int dim, int width, std::uint32_t* out) {                                 \
    group_magnitudes_body(x, dim, width, out);                                                                                   \
  }                                                                                                                              \
  target void by_factor(Element element, const float* x, const float* factor, int dim, std::uint8_t* codes) {                    \
    encode_body(element, ByFactor{x, factor}, dim, codes);                                                                       \
  }                                                                                                                              \
  target void by_division(Element element, const float* x, const float* divisor, const std::uint8_t* keep, int dim,              \
                          std::uint8_t* codes) {                                                                                 \
    encode_body(element, ByDivision{x, divisor, keep}, dim, codes);                                                              \
  }                                                                                                                              \
  target void by_inverse(const float* x, const float* inverse, const std::uint8_t* keep, int dim, std::uint8_t* codes) {         \
    encode_pairs(ByInverse{x, inverse, keep}, dim, codes);                                                                       \
  }                                                                                                                              \
  target void inverse_errors(const float* x, const float* inverse, int dim, int width, float* scratch, float* sums) {            \
    inverse_errors_body(x, inverse, dim, width, scratch, sums);                                                                  \
  }                                                                                                                              \
  target void bf16(const float* x, int dim, std::uint8_t* codes) { encode_bf16_body(x, dim, codes); }                            \
  constexpr RowKernels kKernels{                                                                                                 \
      #set, load, magnitudes, group_magnitudes, by_factor, by_division, by_inverse, inverse_errors, bf16};                       \
  }

FLAMIA_ROW_KERNELS(baseline, )
#if defined(__x86_64__)
FLAMIA_ROW_KERNELS(avx2, [[gnu::target("avx2")]])
FLAMIA_ROW_KERNELS(avx512, [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]])
#endif
#undef FLAMIA_ROW_KERNELS
// NOLINTEND(bugprone-macro-parentheses)

struct Available {
  RowKernels versions[3];
  int count = 0;
  Available() {
    versions[count++] = baseline::kKernels;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) versions[count++] = avx2::kKernels;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
      versions[count++] = avx512::kKernels;
#endif
  }
};

const Available& available() {
  static const Available found;
  return found;
}

}  // namespace

const RowKernels& row_kernels() { return available().versions[available().count - 1]; }

const RowKernels* all_row_kernels(int* count) {
  *count = available().count;
  return available().versions;
}

}  // namespace flamia::quantize
