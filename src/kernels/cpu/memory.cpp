// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/memory.hpp"

#include "kernels/cpu/work.hpp"
#include "quantize/form.hpp"

namespace flamia::cpu {
namespace {

constexpr std::size_t kAlignment = 64;
static_assert(kKeyMeanRows == quantize::kWholeDocument);

/// Hands out aligned parts of a buffer.
class Parts {
 public:
  std::size_t take(std::size_t bytes) {
    const std::size_t at = end_;
    end_ = (end_ + bytes + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  template <class T>
  std::size_t take_array(std::int64_t count) {
    return take(static_cast<std::size_t>(count) * sizeof(T));
  }
  std::size_t end() const { return end_; }

 private:
  std::size_t end_ = 0;
};

/// Floats of the means of Q: room for any lengths of the documents.
std::int64_t q_mean_floats(const Problem& p, const Recipe& recipe) { return q_mean_blocks(p, recipe) * p.query_heads * p.head_dim; }

FormPlace place_form(const Quantisation& form, const Problem& p, int heads, Parts& parts) {
  FormPlace place{form, true};
  place.codes_bytes = static_cast<std::size_t>(quantize::codes_bytes(form, p.tokens, heads, p.head_dim));
  place.scales_bytes = static_cast<std::size_t>(quantize::scale_bytes_bound(form, p.tokens, p.documents, heads, p.head_dim));
  place.codes = parts.take(place.codes_bytes);
  place.scales = parts.take(place.scales_bytes);
  return place;
}

/// The forms in `wanted` (null = not needed) of one operand, equal ones once.
void place_forms(std::initializer_list<std::pair<FormIndex, const Quantisation*>> wanted, const Problem& p, int heads, Parts& parts,
                 SavedLayout& layout) {
  for (const auto& [index, form] : wanted) {
    if (!form) continue;
    FormPlace* same = nullptr;
    for (const auto& [other, ignored] : wanted)
      if (layout.forms[other].present && layout.forms[other].form == *form) same = &layout.forms[other];
    layout.forms[index] = same ? *same : place_form(*form, p, heads, parts);
  }
}

}  // namespace

std::int64_t q_mean_blocks(const Problem& problem, const Recipe& recipe) {
  return problem.tokens / recipe.tile.queries + problem.documents;
}

Quantisation per_token(const Quantisation& form) {
  if (form.group.kind != Group::Kind::blocks || form.group.rows == 1) return form;
  if (form.group.columns != 0) return {form.element, {Group::Kind::blocks, 1, 0}, ScaleType::ue8m0, ScaleRule::ceil};
  Quantisation made = form;
  made.group.rows = 1;
  return made;
}

SavedLayout saved_layout(const Problem& problem, const Recipe& recipe, bool training) {
  SavedLayout layout;
  Parts parts;
  const Quantisation v_diagonal = per_token(recipe.v.first), v_second_diagonal = per_token(recipe.v.second),
                     k_diagonal = per_token(recipe.k.second);
  const auto if_training = [training](const Quantisation& form) { return training ? &form : nullptr; };
  place_forms({{kQ, &recipe.q.first}, {kQSecond, if_training(recipe.q.second)}}, problem, problem.query_heads, parts, layout);
  place_forms({{kK, &recipe.k.first},
               {kKSecond, if_training(recipe.k.second)},
               {kKDiagonal, recipe.safety.fold_k ? if_training(k_diagonal) : nullptr}},
              problem, problem.key_heads, parts, layout);
  const bool fold_v = recipe.safety.fold_v_diagonal;
  place_forms({{kV, &recipe.v.first},
               {kVSecond, if_training(recipe.v.second)},
               {kVDiagonal, fold_v ? &v_diagonal : nullptr},
               {kVSecondDiagonal, fold_v ? if_training(v_second_diagonal) : nullptr}},
              problem, problem.key_heads, parts, layout);
  if (training) {
    layout.m = parts.take_array<float>(problem.query_heads * problem.tokens);
    layout.l = parts.take_array<float>(problem.query_heads * problem.tokens);
    if (recipe.smoothing.q) layout.q_means = parts.take_array<float>(q_mean_floats(problem, recipe));
  }
  layout.bytes = parts.end();
  return layout;
}

BlockSizes block_sizes(const Recipe& recipe) {
  BlockSizes sizes;
  for (const OperandPolicy* policy : {&recipe.q, &recipe.k, &recipe.v, &recipe.d_out})
    for (const Quantisation* form : {&policy->first, &policy->second}) {
      if (form->group.kind == Group::Kind::blocks && form->group.rows != 1) sizes.add(quantize::rows_of(form->group));
      if (form->rule == ScaleRule::two_level) sizes.add(quantize::kFirstLevelRows);
    }
  if (recipe.smoothing.q) sizes.add(recipe.tile.queries);
  if (recipe.smoothing.k) sizes.add(kKeyMeanRows);
  return sizes;
}

int BlockSizes::index(std::int64_t tokens) const {
  for (int i = 0; i < count; ++i)
    if (rows[i] == tokens) return i;
  return -1;
}

int BlockSizes::index(const Quantisation& form) const {
  return form.group.kind == Group::Kind::blocks ? index(quantize::rows_of(form.group)) : -1;
}

void BlockSizes::add(std::int64_t tokens) {
  if (index(tokens) < 0) rows[count++] = tokens;
}

Operand operand_at(const FormPlace& place, const void* base, const BlockSizes& sizes, const schedule::Documents& documents,
                   int heads, int dim) {
  Operand operand;
  if (!place.present) return operand;
  const Quantisation& form = place.form;
  operand.codes = static_cast<const std::uint8_t*>(base) + place.codes;
  operand.scales = static_cast<const std::uint8_t*>(base) + place.scales;
  operand.element = form.element;
  operand.scale = form.scale;
  operand.group = form.group.kind;
  operand.block_size = sizes.index(form);
  operand.rows = quantize::rows_of(form.group);
  operand.columns = form.group.kind == Group::Kind::blocks ? form.group.columns : 0;
  operand.column_groups = static_cast<int>(quantize::column_groups(form.group, dim));
  operand.tensor_scale = form.tensor_scale;
  if (form.rule == ScaleRule::two_level) {
    operand.first_levels = operand.scales + quantize::group_scale_bytes(form, documents, heads, dim);
    operand.tile_size = sizes.index(quantize::kFirstLevelRows);
  }
  operand.heads = heads;
  operand.dim = dim;
  return operand;
}

WorkspaceLayout workspace_layout(const Problem& problem, const Recipe& recipe, Pass pass, int threads) {
  WorkspaceLayout layout;
  Parts parts;
  layout.table = parts.take_array<std::int64_t>(WorkTable::entries(problem.documents, block_sizes(recipe).count));
  if (pass == Pass::forward) {
    layout.forward_forms = saved_layout(problem, recipe, false);
    layout.forms = parts.take(layout.forward_forms.bytes);
    if (recipe.smoothing.q) layout.q_means = parts.take_array<float>(q_mean_floats(problem, recipe));
    if (recipe.smoothing.k) layout.k_means = parts.take_array<float>(problem.documents * problem.key_heads * problem.head_dim);
  } else {
    layout.d_o = place_form(recipe.d_out.first, problem, problem.query_heads, parts);
    layout.d_o_second = recipe.d_out.second == recipe.d_out.first
                            ? layout.d_o
                            : place_form(recipe.d_out.second, problem, problem.query_heads, parts);
    layout.d = parts.take_array<float>(problem.query_heads * problem.tokens);
    if (recipe.accumulation.dq_f16) {
      layout.exponent_bound = parts.take_array<std::int16_t>(problem.key_heads * problem.tokens);
      layout.pre_scale = parts.take_array<std::int16_t>(problem.query_heads * problem.tokens);
    }
  }
  layout.scratch_bytes = static_cast<std::size_t>(scratch_floats(problem.head_dim)) * sizeof(float);
  layout.scratch = parts.take(layout.scratch_bytes * static_cast<std::size_t>(thread_count(threads)));
  layout.bytes = parts.end();
  return layout;
}

}  // namespace flamia::cpu
