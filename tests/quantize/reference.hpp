// SPDX-License-Identifier: Apache-2.0
// A slow quantiser for the tests: one group at a time, in the words of numerics.md §7, §8 and §10, without blocks of rows, threads or
// vector code. It shares encode() and the exponent rules with the library (tested by themselves) and nothing else.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "numerics/exponent.hpp"
#include "numerics/hadamard.hpp"
#include "quantize/quantize.hpp"

namespace flamia::quantize::testing_reference {

/// A random [tokens, heads, dim] tensor as BF16 bits; rows of very different size.
struct Input {
  std::int64_t tokens;
  int heads, dim;
  std::vector<std::uint16_t> bf16;
  std::vector<float> l;  // [heads, tokens]

  Input(std::int64_t t, int h, int d, unsigned seed = 1) : tokens(t), heads(h), dim(d) {
    std::mt19937 bits(seed);
    std::normal_distribution<float> normal;
    for (std::int64_t row = 0; row < t * h; ++row) {
      const float size = std::exp2(static_cast<float>(static_cast<int>(bits() % 40)) - 20.f);
      const bool zero = bits() % 17 == 0;
      for (int c = 0; c < d; ++c) bf16.push_back(numerics::encode_bf16(zero ? 0.f : size * normal(bits)));
    }
    for (std::int64_t i = 0; i < t * h; ++i) l.push_back(bits() % 13 == 0 ? 0.f : 0.5f + static_cast<float>(bits() % 1000));
  }
  QuantiseInput view(bool rotate = false, bool divide = false) const {
    return {{bf16.data(), DType::bf16, 0, 0}, heads, dim, rotate, divide ? l.data() : nullptr};
  }
  std::uint16_t& at(std::int64_t token, int head, int c) {
    return bf16[static_cast<std::size_t>((token * heads + head) * dim + c)];
  }
};

/// The numbers to be encoded, [tokens, heads, dim].
inline std::vector<float> values_of(const Input& in, bool rotate, bool divide) {
  std::vector<float> x;
  for (std::int64_t row = 0; row < in.tokens * in.heads; ++row) {
    const float l = in.l[static_cast<std::size_t>(row % in.heads * in.tokens + row / in.heads)];
    std::vector<float> v;
    for (int c = 0; c < in.dim; ++c) {
      const float value = numerics::decode_bf16(in.bf16[static_cast<std::size_t>(row * in.dim + c)]);
      v.push_back(!divide ? value : l == 0.f || std::isinf(l) ? 0.f : value / l);
    }
    if (rotate && in.dim == 128) numerics::rotate<128>(v.data());
    if (rotate && in.dim == 64) numerics::rotate<64>(v.data());
    x.insert(x.end(), v.begin(), v.end());
  }
  return x;
}

/// The FP16 number nearest to x, ties to even.
inline double f16_of(double x) {
  if (x == 0 || std::isinf(x)) return x;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(x), -14) - 10), rounded = std::nearbyint(x / unit) * unit;
  return std::fabs(rounded) > 65504 ? std::copysign(HUGE_VAL, x) : rounded;
}
/// The quotient of rule amax_or_smaller.
inline float quotient_f16(float x, float scale) {
  const float inverse = scale == 0.f ? 1.f : 1.f / scale;
  return static_cast<float>(f16_of(x * inverse));
}

inline std::uint32_t encode_one(Element element, float x) {
  switch (element) {
    case Element::e4m3:
      return numerics::encode<numerics::kE4M3>(x);
    case Element::e5m2:
      return numerics::encode<numerics::kE5M2>(x);
    case Element::e2m1:
      return numerics::encode<numerics::kE2M1>(x);
    case Element::int8:
      return static_cast<std::uint8_t>(numerics::encode_int8(x));
    case Element::bf16:
      return numerics::encode_bf16(x);
  }
  return 0;
}

inline int exponent_of(const Quantisation& f, float amax) {
  const bool floor = f.rule == ScaleRule::floor;
  if (f.element == Element::e5m2)
    return floor ? numerics::floor_exponent<numerics::kE5M2>(amax) : numerics::ceil_exponent<numerics::kE5M2>(amax);
  if (f.element == Element::e2m1)
    return floor ? numerics::floor_exponent<numerics::kE2M1>(amax) : numerics::ceil_exponent<numerics::kE2M1>(amax);
  return floor ? numerics::floor_exponent<numerics::kE4M3>(amax) : numerics::ceil_exponent<numerics::kE4M3>(amax);
}

struct Expected {
  std::vector<std::uint32_t> codes;   // [tokens, heads, dim], one each
  std::vector<std::uint32_t> scales;  // as stored, in order
};

inline Expected quantise_slowly(const Input& in, const schedule::Documents& documents, const Quantisation& f, bool rotate = false,
                                bool divide = false) {
  const std::vector<float> x = values_of(in, rotate, divide);
  const auto index = [&](std::int64_t t, int h, int c) { return static_cast<std::size_t>((t * in.heads + h) * in.dim + c); };
  Expected out{std::vector<std::uint32_t>(x.size(), 0u), {}};

  // the group of every element of a document: (kind of key) -> members, in the order in which scales are stored
  struct Members {
    std::vector<std::size_t> elements;
    std::size_t column = 0;  // for sticky: which groups of the document are its predecessors
    std::int64_t document = 0;
    std::size_t flag = 0;  // groups that are flagged together
    bool first = false;    // of the document and its column
  };
  std::vector<Members> groups;
  const std::int64_t rows = f.group.rows == 0 ? in.tokens + 1 : f.group.rows;
  const int columns = f.group.columns == 0 ? in.dim : f.group.columns;
  const int per_row = (in.dim + columns - 1) / columns;
  const bool whole = f.group.kind == Group::Kind::tensor || f.group.kind == Group::Kind::head;
  if (whole) groups.resize(f.group.kind == Group::Kind::head ? static_cast<std::size_t>(in.heads) : 1);
  for (std::size_t g = 0; g < groups.size(); ++g) groups[g].flag = g;
  std::int64_t document = 0;
  for (const schedule::DocumentRange& range : documents.ranges()) {
    for (std::int64_t first = 0; first < range.length; first += whole ? range.length : rows) {
      const std::int64_t last = std::min(range.length, first + (whole ? range.length : rows));
      for (int h = 0; h < in.heads; ++h)
        for (int g = 0; g < (whole ? 1 : per_row); ++g) {
          std::vector<std::size_t> members;
          for (std::int64_t t = first; t < last; ++t)
            for (int c = whole ? 0 : g * columns; c < (whole ? in.dim : std::min(in.dim, (g + 1) * columns)); ++c)
              members.push_back(index(range.start + t, h, c));
          if (whole) {
            std::vector<std::size_t>& all = groups[f.group.kind == Group::Kind::head ? static_cast<std::size_t>(h) : 0].elements;
            all.insert(all.end(), members.begin(), members.end());
          } else {
            groups.push_back({members, static_cast<std::size_t>(h * per_row + g), document,
                              (groups.size()) / static_cast<std::size_t>(per_row), first == 0});
          }
        }
    }
    ++document;
  }
  if (f.element == Element::bf16) {
    for (const schedule::DocumentRange& range : documents.ranges())
      for (std::size_t i = index(range.start, 0, 0); i < index(range.start + range.length, 0, 0); ++i)
        out.codes[i] = numerics::encode_bf16(x[i]);
    return out;
  }

  std::map<std::size_t, bool> flagged;
  for (const Members& group : groups)
    for (const std::size_t i : group.elements) flagged[group.flag] = flagged[group.flag] || !std::isfinite(x[i]);
  std::map<std::pair<std::int64_t, std::size_t>, float> before;   // sticky: greatest magnitude so far
  std::map<std::pair<std::int64_t, std::size_t>, int> beginning;  // exponent of the document's first group, raised by the headroom
  for (const Members& group : groups) {
    if (flagged[group.flag]) {
      out.scales.push_back(f.scale == ScaleType::ue8m0 ? 255u : f.scale == ScaleType::e4m3 ? 0x7fu : 0x7fc00000u);
      continue;  // codes stay 0
    }
    float amax = 0.f;
    for (const std::size_t i : group.elements) amax = std::max(amax, std::fabs(x[i]));
    if (f.headroom != 0 && group.first && exponent_of(f, amax) > -127)
      beginning[{group.document, group.column}] = exponent_of(f, amax) + f.headroom;
    if (f.sticky) {
      float& seen = before[{group.document, group.column}];
      amax = seen = std::max(seen, amax);
    }
    if (f.scale == ScaleType::ue8m0) {
      int e = exponent_of(f, amax);
      if (const auto raised = beginning.find({group.document, group.column}); raised != beginning.end())
        e = std::max(e, std::min(raised->second, 126));
      out.scales.push_back(static_cast<std::uint32_t>(e + 127));
      for (const std::size_t i : group.elements)
        out.codes[i] = encode_one(f.element, static_cast<float>(std::ldexp(static_cast<double>(x[i]), -e)));
      continue;
    }
    const float largest = f.element == Element::e4m3   ? 448.f
                          : f.element == Element::e5m2 ? 57344.f
                          : f.element == Element::e2m1 ? 6.f
                                                       : 127.f;
    float scale = amax / largest;
    std::uint32_t stored = numerics::bits_of(scale);
    if (f.scale == ScaleType::e4m3) {
      float least_error = 0.f;
      for (const float divisor : {largest, 4.f}) {
        if (divisor != largest && f.rule != ScaleRule::amax_or_smaller) continue;
        const std::uint32_t byte = numerics::encode<numerics::kE4M3>(amax / (divisor * f.tensor_scale));
        const float s = numerics::decode<numerics::kE4M3>(byte) * f.tensor_scale;
        if (f.rule == ScaleRule::amax) {
          stored = byte, scale = s;
          continue;
        }
        float error = 0.f;
        for (std::size_t first = 0; first < group.elements.size(); first += 8) {
          double sums[2] = {0, 0};
          for (std::size_t k = first; k < std::min(first + 8, group.elements.size()); ++k) {
            const double q = std::fabs(quotient_f16(x[group.elements[k]], s));
            const double off =
                f16_of(q - numerics::decode<numerics::kE2M1>(numerics::encode<numerics::kE2M1>(static_cast<float>(q))));
            sums[k % 2] = f16_of(sums[k % 2] + off * off);
          }
          error += static_cast<float>(sums[0]) + static_cast<float>(sums[1]);
        }
        error *= s * s;
        if (divisor == largest || scale == 0.f || error < least_error) least_error = error, stored = byte, scale = s;
      }
    }
    out.scales.push_back(stored);
    const bool halves = f.rule == ScaleRule::amax_or_smaller;
    for (const std::size_t i : group.elements)
      out.codes[i] = scale == 0.f ? 0u : encode_one(f.element, halves ? quotient_f16(x[i], scale) : x[i] / scale);
  }
  if (!whole && rows == 1)  // tokens after the last document
    out.scales.resize(static_cast<std::size_t>(in.tokens * in.heads * per_row), 0u);
  return out;
}

/// Codes of a quantised tensor, one each.
inline std::vector<std::uint32_t> unpacked(const QuantisedTensor& q) {
  std::vector<std::uint32_t> codes;
  for (std::size_t i = 0; i < q.codes.size(); ++i) {
    if (q.form.element == Element::e2m1)
      codes.push_back(q.codes[i] & 15u), codes.push_back(q.codes[i] >> 4);
    else if (q.form.element == Element::bf16)
      codes.push_back(q.codes[i] | static_cast<std::uint32_t>(q.codes[i + 1]) << 8), ++i;
    else
      codes.push_back(q.codes[i]);
  }
  return codes;
}

inline std::vector<std::uint32_t> stored_scales(const QuantisedTensor& q) {
  std::vector<std::uint32_t> scales;
  for (std::size_t i = 0; i < q.scales.size();) {
    std::uint32_t bits = q.scales[i];
    if (q.form.scale == ScaleType::f32) std::memcpy(&bits, &q.scales[i], 4);
    scales.push_back(bits);
    i += q.form.scale == ScaleType::f32 ? 4 : 1;
  }
  return scales;
}

}  // namespace flamia::quantize::testing_reference
