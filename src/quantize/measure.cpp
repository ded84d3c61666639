// SPDX-License-Identifier: Apache-2.0
#include "quantize/measure.hpp"

#include <algorithm>
#include <cmath>

#include "quantize/rows.hpp"
#include "quantize/scale.hpp"

namespace flamia::quantize {
namespace {

/// Elements beyond largest + half a step of the largest binade saturate: the code next to the largest one would have been nearer.
float rounding_limit(Element element) {
  switch (element) {
    case Element::e4m3:
      return 464.f;
    case Element::e5m2:
      return 61440.f;
    case Element::e2m1:
      return 7.f;
    case Element::int8:
      return 127.5f;
    case Element::bf16:
      break;
  }
  return numerics::infinity();
}

/// x of one row as it was quantised; false if it has no gradient (its divisor is 0 or infinite) and so became zeros.
bool load_row(const QuantiseInput& in, std::int64_t tokens, std::int64_t token, int head, float* x) {
  const std::int64_t head_stride = in.tensor.head_stride ? in.tensor.head_stride : in.dim;
  const std::int64_t token_stride = in.tensor.token_stride ? in.tensor.token_stride : std::int64_t{in.heads} * in.dim;
  const float divisor = in.divide_by ? in.divide_by[head * tokens + token] : 1.f;
  if (divisor == 0.f || divisor == numerics::infinity()) return false;
  const auto* row = static_cast<const char*>(in.tensor.data) +
                    (token * token_stride + head * head_stride) * static_cast<std::int64_t>(flamia::size_of(in.tensor.dtype));
  row_kernels().load(row, in.tensor.dtype, in.dim, in.divide_by != nullptr, divisor, in.rotate, x);
  return true;
}

void count(const QuantisedTensor& tensor, const float* x, const float* value, float scale, int begin, int end,
           OperandHealth* health) {
  for (int c = begin; c < end; ++c) {
    if (std::isnan(value[c]) || !std::isfinite(x[c])) {
      ++health->flagged;
      continue;
    }
    ++health->elements;
    health->zeros += x[c] != 0.f && value[c] == 0.f;
    health->saturated += std::fabs(x[c]) > rounding_limit(tensor.form.element) * scale;
  }
}

}  // namespace

OperandHealth measure(const QuantiseInput& input, const schedule::Documents& documents, const QuantisedTensor& tensor) {
  OperandHealth health;
  bool any = false;
  const std::vector<float> values = dequantise(tensor, documents);
  const std::int64_t groups = column_groups(tensor.form.group, tensor.dim);
  const int width = groups == 1 ? tensor.dim : tensor.form.group.columns;
  std::vector<float> x(static_cast<std::size_t>(tensor.dim));
  for_each_row(tensor, documents, [&](std::int64_t token, int head, std::int64_t slot, const Quantisation& form) {
    if (!load_row(input, tensor.tokens, token, head, x.data())) std::fill(x.begin(), x.end(), 0.f);
    const float* value = values.data() + (token * tensor.heads + head) * tensor.dim;
    for (int g = 0; g < groups; ++g) {
      const std::uint32_t stored = tensor.scales.empty() ? 0 : read_scale(tensor.form.scale, tensor.scales.data(), slot + g);
      count(tensor, x.data(), value, scale_value(form, stored), g * width, std::min((g + 1) * width, tensor.dim), &health);
      const int e = numerics::decode_ue8m0(static_cast<std::uint8_t>(stored));
      if (tensor.form.scale != ScaleType::ue8m0 || stored == numerics::kFlagged || e == numerics::kLeastExponent) continue;
      health.least_exponent = any ? std::min(health.least_exponent, e) : e;
      health.greatest_exponent = any ? std::max(health.greatest_exponent, e) : e;
      any = true;
    }
  });
  return health;
}

}  // namespace flamia::quantize
