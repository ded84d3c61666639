// SPDX-License-Identifier: Apache-2.0
#include "plan/explain.hpp"

#include <algorithm>

#include "plan/kernels.hpp"
#include "recipe/guarantee.hpp"
#include "recipe/lower.hpp"
#include "recipe/named.hpp"
#include "recipe/names.hpp"
#include "recipe/text_fields.hpp"

namespace flamia::plan {
namespace {

using namespace flamia::recipe;

std::string padded(std::string text, std::size_t width) {
  text.resize(std::max(width, text.size()), ' ');
  return text;
}

template <class Items, class Text>
std::string joined(const Items& items, Text text, const char* separator = ", ") {
  std::string all;
  for (const auto& item : items) all += (all.empty() ? "" : separator) + std::string(text(item));
  return all;
}

/// "1 scale per 32 tokens x all channels"
std::string group_words(const Quantisation& form, bool of_tile) {
  const char* rows = of_tile ? "queries" : "tokens";
  const char* columns = of_tile ? "keys of a tile" : "channels";
  switch (form.group.kind) {
    case Group::Kind::none:
      return "no scale";
    case Group::Kind::constant:
      return "a constant power of two";
    case Group::Kind::tensor:
      return "one scale for the tensor";
    case Group::Kind::head:
      return "one scale per head";
    case Group::Kind::blocks:
      break;
  }
  const auto extent = [](int n, const char* unit) { return n == 0 ? std::string("all ") + unit : std::to_string(n) + " " + unit; };
  const std::string row = form.group.rows == 1 ? (of_tile ? "query" : "token") : extent(form.group.rows, rows);
  const std::string column = form.group.columns == 1 ? (of_tile ? "key" : "channel") : extent(form.group.columns, columns);
  return "one scale per " + row + " x " + column;
}

std::string form_words(const Quantisation& form, bool of_tile) {
  std::string text = word_of(form.element) + ", " + group_words(form, of_tile);
  if (form.scale != ScaleType::none) text += " (" + word_of(form.scale) + ", " + word_of(form.rule) + ")";
  if (form.sticky) text += ", sticky";
  if (form.headroom != 0) text += ", begins " + std::to_string(form.headroom) + " binades higher";
  if (form.tensor_scale != 1.f) text += ", with a constant tensor scale";
  return text;
}

std::string operands_section(const Lowering& plan, const Recipe& recipe) {
  std::string text = "operands\n";
  for (const CopyPlan& copy : plan.copies) {
    text += "  " + padded(row_of(copy.operand).name, 4) + form_words(copy.form, false);
    text += "; for " + joined(copy.products, [](Product p) { return name_of(p); });
    text += "; layout " + joined(
                              copy.layouts, [](Layout l) { return name_of(l); }, " and ");
    const bool values = std::find(copy.layouts.begin(), copy.layouts.end(), Layout::rows_bf16) != copy.layouts.end();
    text += copy.layouts.size() < 2 ? "\n" : values ? " (the same numbers)\n" : " (two copies of the same codes)\n";
  }
  for (const Place& place : places(recipe, !recipe.trains)) {
    const Operand operand = place.row.operand;
    if (operand != Operand::p && operand != Operand::d_s) continue;
    const OperandPolicy& policy = policy_of(recipe, operand);
    const bool one_payload = operand == Operand::d_s ? recipe.one_ds_payload : policy.first == policy.second;
    const bool both = recipe.trains && one_payload;
    if (both && place.is_second) continue;
    text += "  " + padded(place.row.name, 4) + form_words(place.form, true) + "; for " + name_of(place.use.product);
    if (both) text += std::string(" and ") + name_of(place.row.second.product) + ", one payload";
    if (both && operand == Operand::d_s && place.form.element == Element::bf16) text += ", rounded to nearest even";
    text += "\n";
  }
  return text;
}

std::string softmax_section(const Recipe& r) {
  std::string text = "softmax\n  row reference " + word_of(r.softmax.reference) + ", exp2 " + word_of(r.softmax.exp2);
  if (r.softmax.exp2 == Exp2::polynomial)
    text += " of degree " + std::to_string(r.softmax.polynomial_degree) + " on " + std::to_string(r.softmax.polynomial_sixteenths) +
            "/16 of the keys";
  text += ", l sums " + std::string(r.softmax.sum == SumOf::codes ? "the rounded codes" : "P before rounding") + "\n";
  if (r.rotate)
    text += std::string("  Q and K are rotated (signs, then Hadamard)") + (r.trains ? "; dQ and dK are rotated back\n" : "\n");
  if (r.smoothing.k) text += "  the mean of K over the document's tokens is subtracted\n";
  if (r.p.first.rule == ScaleRule::two_level)
    text += "  the first level of P's scales is of each query's " + std::to_string(r.tile.keys) + " keys\n";
  if (r.smoothing.q)
    text += "  the mean of Q over each " + std::to_string(r.tile.queries) + " queries is subtracted and multiplied with " +
            (r.trains ? "what K's codes stand for" : "K") + " in FP32\n";
  if (!r.trains) return text;
  text +=
      "  dS uses P " + std::string(r.gradient_p == GradientP::unrounded ? "before rounding" : "as rounded") + "; dQ is summed in ";
  text += r.accumulation.dq_f16 ? "FP16 with a pre-scale " + std::string(r.accumulation.dq_prescale == PreScale::causal_row
                                                                             ? "per row, from what the row sees"
                                                                             : "per sequence")
                                : std::string("FP32");
  if (r.gradient_d == GradientD::scores) text += "; D is the mean of dP under P over the row's keys, from the numbers of dS";
  return text + "\n";
}

std::string products_section(const Lowering& plan) {
  std::string text = "products\n";
  for (const ProductPlan& product : plan.products) {
    text += "  " + padded(name_of(product.product), 4);
    if (!product.mma) {
      text += "refused\n";
      continue;
    }
    text += product.mma->name;
    for (const OperandUse& use : product.operands)
      if (use.scale != ScaleUse::none) text += std::string("; ") + row_of(use.operand).name + ": " + name_of(use.scale);
    text += "\n";
  }
  return text;
}

}  // namespace

std::string explain(const Recipe& recipe, Architecture architecture, int head_dim) {
  const ArchitectureFacts& machine = facts(architecture);
  const Lowering plan = lower(recipe, architecture, head_dim);
  const Guarantee promise = guarantee(recipe);
  const std::string name = recipe.name();
  std::string text = "recipe " + name;
  if (const NamedRecipe* named = find_named(name)) text += ": " + std::string(named->summary);
  text += "\non " + std::string(machine.name) + " (" + machine.title + "; " + machine.status + "), head dim " +
          std::to_string(head_dim) + "\n\n";
  text += operands_section(plan, recipe) + "\n" + softmax_section(recipe) + "\n" + products_section(plan);
  const bool runs = can_run(recipe, architecture, head_dim, false).ok();
  if (const KernelFacts* kernel = runs ? forward_kernel(recipe, architecture, head_dim) : nullptr)
    text += "\nkernel\n" + describe(*kernel);
  text += "\nguarantee (causal)\n  " + promise.sentence(recipe.trains) + "\n";
  for (const std::string& reason : promise.reasons) text += "  - " + reason + "\n";
  const auto list = [&](const char* title, const std::vector<std::string>& lines) {
    if (lines.empty()) return;
    text += std::string("\n") + title + "\n";
    for (const std::string& line : lines) text += "  - " + line + "\n";
  };
  std::vector<std::string> refused = plan.refusals;
  for (const std::string& line : {plan.no_backward, plan.not_executed})
    if (!line.empty()) refused.push_back(line);
  list("notes", plan.notes);
  list("refused", refused);
  return text;
}

}  // namespace flamia::plan
