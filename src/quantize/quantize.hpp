// SPDX-License-Identifier: Apache-2.0
// One quantised form of Q, K, V or dO on the host: what the CPU backend computes with, what `flamia quantize` writes, and what the
// GPU's codes and scales are compared with bit for bit.
#pragma once
#include <cstdint>
#include <vector>

#include "flamia/recipe.hpp"
#include "flamia/types.hpp"
#include "quantize/form.hpp"
#include "schedule/documents.hpp"

namespace flamia::quantize {

/// Codes and scales of a [tokens, heads, dim] tensor. Tokens after the last document have code 0.
struct QuantisedTensor {
  Quantisation form;
  std::int64_t tokens = 0;
  int heads = 0;
  int dim = 0;
  /// E4M3, E5M2, INT8: one byte an element, [tokens, heads, dim]. E2M1: [tokens, heads, dim / 2], low nibble = even channel.
  /// BF16: two bytes an element, little endian.
  std::vector<std::uint8_t> codes;
  /// UE8M0 and E4M3: one byte a group; F32: four, little endian. Shapes: form.hpp.
  std::vector<std::uint8_t> scales;
  std::vector<std::int64_t> scale_shape;
  /// Rule two_level: the first level, [sum of ceil(L / 128), heads]; else empty.
  std::vector<float> first_levels;
};

struct QuantiseInput {
  TensorView tensor;  // [tokens, heads, dim]
  int heads = 0;
  int dim = 0;
  bool rotate = false;  // signs and Hadamard first (dim 64 or 128)
  /// [heads, tokens] or null: rows are divided by it first (dO / l). A row whose divisor is 0 or +inf becomes a row of zeros.
  const float* divide_by = nullptr;
  /// Means (means.hpp) over blocks of `subtract_rows` tokens, or null: subtracted after the rotation.
  const float* subtract = nullptr;
  std::int64_t subtract_rows = 1;
};

/// Quantises every document by itself (only `tensor` and `head` groups span documents). Result independent of `threads`.
/// Tokens that hold NaN or infinity are flagged with all channels of their block (encode.hpp): codes 0, scale UE8M0 255 (E4M3 0x7f,
/// F32 NaN), and they count in no maximum. BF16 codes keep NaN and infinity: they have no scale that could tell.
Status quantise(const QuantiseInput& input, const schedule::Documents& documents, const Quantisation& form, int threads,
                QuantisedTensor* out);

/// Calls visit(token, head, slot, form) for every row of the documents; slot = index of its first stored scale, form = the tensor's with the
/// row's first level as the tensor scale, if there is one.
template <class Visit>
void for_each_row(const QuantisedTensor& tensor, const schedule::Documents& documents, Visit visit) {
  const Group& group = tensor.form.group;
  const bool blocks = group.kind == Group::Kind::blocks;
  const std::int64_t rows = rows_of(group), groups = column_groups(group, tensor.dim);
  std::int64_t first_block = 0, first_tile = 0;
  Quantisation form = tensor.form;
  for (const schedule::DocumentRange& range : documents.ranges()) {
    for (std::int64_t position = 0; position < range.length; ++position)
      for (int head = 0; head < tensor.heads; ++head) {
        const std::int64_t tile = first_tile + position / kFirstLevelRows;
        if (!tensor.first_levels.empty())
          form.tensor_scale = tensor.first_levels[static_cast<std::size_t>(tile * tensor.heads + head)];
        const std::int64_t slot = blocks ? ((first_block + position / rows) * tensor.heads + head) * groups
                                  : group.kind == Group::Kind::head ? head
                                                                    : 0;
        visit(range.start + position, head, slot, static_cast<const Quantisation&>(form));
      }
    first_block += (range.length + rows - 1) / rows;
    first_tile += (range.length + kFirstLevelRows - 1) / kFirstLevelRows;
  }
}

/// Element values code * scale (* first level) as FP32, [tokens, heads, dim]; flagged groups give NaN.
std::vector<float> dequantise(const QuantisedTensor& tensor, const schedule::Documents& documents);

}  // namespace flamia::quantize
