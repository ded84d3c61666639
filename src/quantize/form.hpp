// SPDX-License-Identifier: Apache-2.0
// Where the codes and scales of one quantised form lie. The same for host and device: the CUDA passes write this layout too.
//
//   group                      scales                                    (heads and groups of columns are the fast axes)
//   none                       no scales                                 BF16 only
//   tensor                     [1]
//   head                       [heads]
//   blocks r x all, r > 1      [sum over documents of ceil(L / r), heads]
//   blocks 1 x all             [tokens, heads]                           tokens after the last document have scale 0
//   blocks 1 x n               [tokens, heads, ceil(dim / n)]
//   blocks r x n               [sum of ceil(L / r), heads, ceil(dim / n)]
// Rule two_level: behind them one FP32 number per tile of 128 tokens and head, [sum of ceil(L / 128), heads], little endian, not aligned.
// r = 0 stands for all tokens of the document. The last block of a document and the last group of a row may be short.
#pragma once
#include <cstdint>
#include <vector>

#include "flamia/recipe.hpp"
#include "flamia/status.hpp"
#include "schedule/documents.hpp"

namespace flamia::quantize {

/// Rows of a block when a document is one block (Group::rows = 0).
inline constexpr std::int64_t kWholeDocument = std::int64_t{1} << 40;

/// Tokens that share a scale; 1 for forms that know no blocks.
constexpr std::int64_t rows_of(const Group& group) {
  if (group.kind != Group::Kind::blocks) return 1;
  return group.rows == 0 ? kWholeDocument : group.rows;
}

/// Scales of one block and head: ceil(dim / n), 1 where all channels share a scale.
constexpr std::int64_t column_groups(const Group& group, int dim) {
  if (group.kind != Group::Kind::blocks || group.columns == 0) return 1;
  return (dim + std::int64_t{group.columns} - 1) / group.columns;
}

constexpr std::int64_t size_of(ScaleType type) { return type == ScaleType::none ? 0 : type == ScaleType::f32 ? 4 : 1; }

/// Bytes of a row of `dim` codes; dim even for E2M1.
constexpr std::int64_t row_bytes(Element element, int dim) {
  return element == Element::bf16 ? 2 * std::int64_t{dim} : element == Element::e2m1 ? dim / 2 : dim;
}

/// Tokens that share the first level of two-level scales.
inline constexpr std::int64_t kFirstLevelRows = 128;

/// Rows of the scale tensor: blocks of all documents, `tokens` for one-token blocks, 1 for the other groups.
std::int64_t scale_rows(const Quantisation& form, const schedule::Documents& documents);

/// Bytes of the codes of a [tokens, heads, dim] tensor.
std::int64_t codes_bytes(const Quantisation& form, std::int64_t tokens, int heads, int dim);
/// Shape of the scales (table above); empty for BF16.
std::vector<std::int64_t> scale_shape(const Quantisation& form, const schedule::Documents& documents, int heads, int dim);
/// Bytes of the scales without their first level.
std::int64_t group_scale_bytes(const Quantisation& form, const schedule::Documents& documents, int heads, int dim);
/// Bytes of the scales.
std::int64_t scale_bytes(const Quantisation& form, const schedule::Documents& documents, int heads, int dim);
/// Bytes that suffice for any lengths of at most `documents` documents in `tokens` tokens.
std::int64_t scale_bytes_bound(const Quantisation& form, std::int64_t tokens, std::int64_t documents, int heads, int dim);

/// Whether Q, K, V or dO can have this form at this head dim; the message says what does not fit together.
Status check_form(const Quantisation& form, int dim);

}  // namespace flamia::quantize
