// SPDX-License-Identifier: Apache-2.0
#include "quantize/form.hpp"

#include <algorithm>
#include <string>

#include "numerics/exponent.hpp"

namespace flamia::quantize {

std::int64_t scale_rows(const Quantisation& form, const schedule::Documents& documents) {
  if (form.group.kind != Group::Kind::blocks) return 1;
  const std::int64_t rows = rows_of(form.group);
  return rows == 1 ? documents.tokens() : documents.blocks(rows);
}

std::int64_t codes_bytes(const Quantisation& form, std::int64_t tokens, int heads, int dim) {
  return tokens * heads * row_bytes(form.element, dim);
}

std::vector<std::int64_t> scale_shape(const Quantisation& form, const schedule::Documents& documents, int heads, int dim) {
  switch (form.group.kind) {
    case Group::Kind::none:
    case Group::Kind::constant:
      return {};
    case Group::Kind::tensor:
      return {1};
    case Group::Kind::head:
      return {heads};
    case Group::Kind::blocks:
      break;
  }
  const std::int64_t rows = scale_rows(form, documents);
  if (form.group.columns == 0) return {rows, heads};
  return {rows, heads, column_groups(form.group, dim)};
}

std::int64_t scale_bytes(const Quantisation& form, const schedule::Documents& documents, int heads, int dim) {
  const std::int64_t first = form.rule == ScaleRule::two_level ? documents.blocks(kFirstLevelRows) * heads * 4 : 0;
  return group_scale_bytes(form, documents, heads, dim) + first;
}

std::int64_t group_scale_bytes(const Quantisation& form, const schedule::Documents& documents, int heads, int dim) {
  std::int64_t count = size_of(form.scale);
  const std::vector<std::int64_t> shape = scale_shape(form, documents, heads, dim);
  if (shape.empty()) return 0;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

std::int64_t scale_bytes_bound(const Quantisation& form, std::int64_t tokens, std::int64_t documents, int heads, int dim) {
  const std::int64_t each = size_of(form.scale);
  switch (form.group.kind) {
    case Group::Kind::none:
    case Group::Kind::constant:
      return 0;
    case Group::Kind::tensor:
      return each;
    case Group::Kind::head:
      return each * heads;
    case Group::Kind::blocks:
      break;
  }
  // sum of ceil(L / r) <= tokens / r + documents, and no block is empty
  const std::int64_t rows = rows_of(form.group);
  const std::int64_t blocks = rows == 1 ? tokens : std::min(tokens, tokens / rows + documents);
  const std::int64_t first = form.rule == ScaleRule::two_level ? (tokens / kFirstLevelRows + documents) * heads * 4 : 0;
  return blocks * heads * column_groups(form.group, dim) * each + first;
}

Status check_form(const Quantisation& form, int dim) {
  const Group::Kind kind = form.group.kind;
  if (form.element == Element::bf16) {
    if (kind == Group::Kind::none && form.scale == ScaleType::none && form.rule == ScaleRule::none && !form.sticky &&
        form.headroom == 0)
      return {};
    return Status::invalid("form: BF16 elements have no scale; use group none, scale none and rule none");
  }
  if (kind == Group::Kind::none || kind == Group::Kind::constant)
    return Status::invalid(
        "form: elements of Q, K, V and dO need a scale group (tensor, head or blocks) unless they are BF16; a constant is for P");
  if (form.group.rows < 0 || form.group.columns < 0)
    return Status::invalid("form: group of " + std::to_string(form.group.rows) + " x " + std::to_string(form.group.columns) +
                           "; rows and columns are at least 0 (0 = all)");
  if (dim <= 0) return Status::invalid("dim = " + std::to_string(dim) + " must be positive");
  if (form.element == Element::e2m1 && dim % 2 != 0)
    return Status::invalid("dim = " + std::to_string(dim) + " must be even for E2M1: two codes share a byte");
  if (form.headroom < 0 || form.headroom > numerics::kMostHeadroom ||
      (form.headroom != 0 && (!form.sticky || form.scale != ScaleType::ue8m0)))
    return Status::invalid("form: headroom = " + std::to_string(form.headroom) +
                           "; sticky exponents that are powers of two have 0 to 4 binades, other scales none");
  switch (form.rule) {
    case ScaleRule::ceil:
    case ScaleRule::floor:
      if (form.scale != ScaleType::ue8m0)
        return Status::invalid("form: the rules ceil and floor make powers of two; use scale ue8m0");
      if (form.element == Element::int8)
        return Status::invalid("form: INT8 takes scale f32 with rule amax (amax / 127), not a power of two");
      return {};
    case ScaleRule::amax:
      if (form.scale == ScaleType::f32 || form.scale == ScaleType::e4m3) break;
      return Status::invalid("form: rule amax needs scale f32 or e4m3; a power of two follows from rule ceil or floor");
    case ScaleRule::amax_or_smaller:
      if (form.element != Element::e2m1 || form.scale != ScaleType::e4m3 || kind != Group::Kind::blocks || form.group.rows != 1)
        return Status::invalid("form: rule amax_or_smaller is for E2M1 elements with scale e4m3 in blocks of one token");
      if (form.sticky)
        return Status::invalid(
            "form: rule amax_or_smaller cannot be sticky: its scale does not grow with the maximum; use rule amax");
      break;
    case ScaleRule::two_level:
      if (form.element != Element::e2m1 || form.scale != ScaleType::e4m3 || kind != Group::Kind::blocks || form.group.rows == 0 ||
          kFirstLevelRows % form.group.rows != 0 || form.sticky)
        return Status::invalid(
            "form: rule two_level is for E2M1 elements with scale e4m3 in blocks whose rows divide 128 tokens, and not sticky");
      break;
    case ScaleRule::none:
      return Status::invalid("form: a scaled element needs a rule: ceil, floor, amax or amax_or_smaller");
  }
  if (form.scale == ScaleType::e4m3 && !(form.tensor_scale > 0.f && form.tensor_scale <= 3.4e38f))
    return Status::invalid("form: tensor_scale = " + std::to_string(form.tensor_scale) + " must be positive and finite");
  if (form.sticky && kind != Group::Kind::blocks)
    return Status::invalid("form: sticky needs blocks: one scale for the tensor or a head has no earlier group");
  return {};
}

}  // namespace flamia::quantize
