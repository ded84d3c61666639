// SPDX-License-Identifier: Apache-2.0
#include "quantize/quantize.hpp"

#include <algorithm>

#include "quantize/encode.hpp"
#include "quantize/scale.hpp"

namespace flamia::quantize {

Status quantise(const QuantiseInput& input, const schedule::Documents& documents, const Quantisation& form, int threads,
                QuantisedTensor* out) {
  if (Status status = check_form(form, input.dim); !status.ok()) return status;
  if (input.heads <= 0 || input.dim <= 0) return quantise_into(input, documents, form, threads, {}, {});  // says what is wrong
  QuantisedTensor made;
  made.form = form;
  made.tokens = documents.tokens();
  made.heads = input.heads;
  made.dim = input.dim;
  made.codes.resize(static_cast<std::size_t>(codes_bytes(form, made.tokens, made.heads, made.dim)));
  made.scales.resize(static_cast<std::size_t>(scale_bytes(form, documents, made.heads, made.dim)));
  made.scale_shape = scale_shape(form, documents, made.heads, made.dim);
  if (Status status = quantise_into(input, documents, form, threads, made.codes, made.scales); !status.ok()) return status;
  if (form.rule == ScaleRule::two_level) {
    const auto tail = static_cast<std::size_t>(group_scale_bytes(form, documents, made.heads, made.dim));
    made.first_levels.resize((made.scales.size() - tail) / sizeof(float));
    for (std::size_t i = 0; i < made.first_levels.size(); ++i)
      made.first_levels[i] =
          numerics::float_of(read_scale(ScaleType::f32, made.scales.data() + tail, static_cast<std::int64_t>(i)));
    made.scales.resize(tail);
  }
  *out = std::move(made);
  return {};
}

namespace {

float code_value(const QuantisedTensor& tensor, std::int64_t row, int c) {
  const std::uint8_t* codes = tensor.codes.data() + row * row_bytes(tensor.form.element, tensor.dim);
  switch (tensor.form.element) {
    case Element::bf16:
      return numerics::decode_bf16(static_cast<std::uint16_t>(codes[std::int64_t{2} * c] | codes[std::int64_t{2} * c + 1] << 8));
    case Element::e4m3:
      return numerics::decode<numerics::kE4M3>(codes[c]);
    case Element::e5m2:
      return numerics::decode<numerics::kE5M2>(codes[c]);
    case Element::e2m1:
      return numerics::decode<numerics::kE2M1>(c % 2 == 0 ? codes[c / 2] & 15u : codes[c / 2] >> 4);
    case Element::int8:
      return numerics::decode_int8(static_cast<std::int8_t>(codes[c]));
  }
  return 0.f;
}

}  // namespace

std::vector<float> dequantise(const QuantisedTensor& tensor, const schedule::Documents& documents) {
  const bool blocks = tensor.form.group.kind == Group::Kind::blocks;
  const std::int64_t width = tensor.form.group.columns == 0 ? tensor.dim : tensor.form.group.columns;
  std::vector<float> values(static_cast<std::size_t>(tensor.tokens * tensor.heads * tensor.dim), 0.f);
  for_each_row(tensor, documents, [&](std::int64_t token, int head, std::int64_t slot, const Quantisation& form) {
    const std::int64_t row = token * tensor.heads + head;
    for (int c = 0; c < tensor.dim; ++c) {
      const std::uint32_t stored =
          tensor.scales.empty() ? 0 : read_scale(tensor.form.scale, tensor.scales.data(), slot + (blocks ? c / width : 0));
      values[static_cast<std::size_t>(row * tensor.dim + c)] = numerics::mul(code_value(tensor, row, c), scale_value(form, stored));
    }
  });
  return values;
}

}  // namespace flamia::quantize
