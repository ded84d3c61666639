// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>

namespace flamia {

/// Strides of 0 stand for a dense tensor [tokens][heads][head_dim]: what they are in elements. `View`: TensorView or MutableTensorView.
template <class View>
void fill_dense_strides(View& tensor, int heads, int head_dim) {
  if (tensor.head_stride == 0) tensor.head_stride = head_dim;
  if (tensor.token_stride == 0) tensor.token_stride = std::int64_t{heads} * head_dim;
}

}  // namespace flamia
