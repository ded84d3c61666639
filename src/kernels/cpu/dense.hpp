// SPDX-License-Identifier: Apache-2.0
// Elements of callers' tensors (dtype and strides of their own) as FP32 and back. always_inline: used from every instruction set.
#pragma once
#include <cstdint>

#include "flamia/types.hpp"
#include "numerics/format.hpp"

namespace flamia::cpu {

/// Bytes from a [tokens, heads, dim] tensor's first element to channel 0 of (token, head).
template <class Void>
FLAMIA_FN std::int64_t row_offset(const BasicTensor<Void>& tensor, std::int64_t token, std::int64_t head, int heads, int dim) {
  const std::int64_t head_stride = tensor.head_stride ? tensor.head_stride : dim;
  const std::int64_t token_stride = tensor.token_stride ? tensor.token_stride : std::int64_t{heads} * dim;
  return (token * token_stride + head * head_stride) * (tensor.dtype == DType::f32 ? 4 : 2);
}

FLAMIA_FN void read_row(const TensorView& tensor, std::int64_t token, std::int64_t head, int heads, int dim, float* out) {
  const char* row = static_cast<const char*>(tensor.data) + row_offset(tensor, token, head, heads, dim);
  if (tensor.dtype == DType::f32)
    for (int c = 0; c < dim; ++c) out[c] = reinterpret_cast<const float*>(row)[c];
  else if (tensor.dtype == DType::bf16)
    for (int c = 0; c < dim; ++c) out[c] = numerics::decode_bf16(reinterpret_cast<const std::uint16_t*>(row)[c]);
  else
    for (int c = 0; c < dim; ++c) out[c] = numerics::decode_f16(reinterpret_cast<const std::uint16_t*>(row)[c]);
}

/// NaN is written as the one quiet NaN: which operand's NaN an instruction hands on differs between instruction sets.
FLAMIA_FN void write_row(const MutableTensorView& tensor, std::int64_t token, std::int64_t head, int heads, int dim,
                         const float* x) {
  char* row = static_cast<char*>(tensor.data) + row_offset(tensor, token, head, heads, dim);
  const auto canonical = [](float value) { return numerics::is_nan(value) ? numerics::quiet_nan() : value; };
  if (tensor.dtype == DType::f32)
    for (int c = 0; c < dim; ++c) reinterpret_cast<float*>(row)[c] = canonical(x[c]);
  else if (tensor.dtype == DType::bf16)
    for (int c = 0; c < dim; ++c) reinterpret_cast<std::uint16_t*>(row)[c] = numerics::encode_bf16(canonical(x[c]));
  else
    for (int c = 0; c < dim; ++c) reinterpret_cast<std::uint16_t*>(row)[c] = numerics::encode_f16(canonical(x[c]));
}

}  // namespace flamia::cpu
