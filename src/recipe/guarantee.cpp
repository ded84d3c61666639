// SPDX-License-Identifier: Apache-2.0
#include "recipe/guarantee.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>

#include "recipe/rules.hpp"
#include "recipe/text_fields.hpp"

namespace flamia::recipe {
namespace {

constexpr int kTile = 128;

/// Rows whose scale a row shares.
Reach rows_sharing(const Quantisation& form, bool of_tile) {
  using Kind = Group::Kind;
  switch (form.group.kind) {
    case Kind::none:
    case Kind::constant:
      return {};
    case Kind::tensor:
    case Kind::head:
      return {Reach::Kind::tensor};
    case Kind::blocks:
      break;
  }
  Reach rows{};
  if (form.group.rows != 1) rows = {Reach::Kind::block, form.group.rows};
  if (form.group.rows == 0) rows = of_tile ? Reach{Reach::Kind::block, kTile} : Reach{Reach::Kind::document};
  // The first level is of 128 tokens; in P and dS of one query's line, but of all queries of the tile where a block has more than one.
  if (form.rule != ScaleRule::two_level || (of_tile && form.group.rows == 1)) return rows;
  return farther(rows, {Reach::Kind::block, kTile});
}

std::string text_of(const Reach& reach) {
  switch (reach.kind) {
    case Reach::Kind::none:
      return "nothing";
    case Reach::Kind::block:
      return "a block of " + std::to_string(reach.tokens) + " tokens";
    case Reach::Kind::document:
      return "the whole document";
    case Reach::Kind::tensor:
      return "all tokens of all documents";
  }
  return "";
}

/// Collects what shares scales, and why.
class Collector {
 public:
  explicit Collector(Guarantee* out) : out_(out) {}

  void add(const Reach& reach, std::initializer_list<Reach*> affected, const std::string& why) {
    if (reach.kind == Reach::Kind::none) return;
    for (Reach* one : affected) *one = farther(*one, reach);
    if (reach.kind == Reach::Kind::tensor) out_->documents_isolated = false;
    out_->reasons.push_back(why);
  }

  void add(const Place& place, const Recipe& recipe) {
    const SafetyPolicy& safety = recipe.safety;
    const bool of_tile = place.row.operand == Operand::p || place.row.operand == Operand::d_s;
    const bool per_key = (safety.fold_v_diagonal && place.row.operand == Operand::v) ||
                         (safety.fold_k && place.row.operand == Operand::k && place.is_second);
    // Per key on the diagonal no block crosses the mask's edge; the first level of forms over all channels stays that of 128 tokens.
    const bool first_level =
        place.form.rule == ScaleRule::two_level && (place.form.group.rows == 1 || place.form.group.columns == 0);
    if (per_key && !first_level && place.form.group.rows > 0 && kTile % place.form.group.rows == 0) {
      if (place.is_second && recipe.accumulation.dq_f16 && place.form.group.rows > 1)
        add(rows_sharing(place.form, of_tile), {&out_->d_q},
            name_of(place) + " (" + form_text(place.form) + ") sets the pre-scale of dQ's FP16 sums by its block");
      return;
    }
    const Reach reach = rows_sharing(place.form, of_tile);
    Guarantee& g = *out_;
    const std::string why = name_of(place) + " (" + form_text(place.form) + ") shares a scale over " + text_of(reach);
    // A scale shared by keys lets later keys reach earlier rows; one shared by queries does so too, and lets earlier queries reach
    // later keys' gradients. In dK and dV the sums run over queries, of which a key may see the later ones only; but a NaN or infinity in a
    // group of their forms of Q and dO flags the group's rows, and dQ with them.
    switch (place.row.operand) {
      case Operand::q:
        return place.is_second ? add(reach, {&g.d_q, &g.look_back}, why) : add(reach, {&g.outputs, &g.d_q, &g.look_back}, why);
      case Operand::k:
      case Operand::v:
        return place.is_second ? add(reach, {&g.d_q}, why) : add(reach, {&g.outputs, &g.d_q}, why);
      case Operand::d_out:
        return add(reach, {&g.d_q, &g.look_back}, why);
      case Operand::p:
        return place.is_second ? add_columns(place, of_tile) : add(reach, {&g.outputs, &g.d_q, &g.look_back}, why);
      case Operand::d_s:
        return place.is_second ? add_columns(place, of_tile) : add(reach, {&g.d_q}, why);
    }
  }

 private:
  /// Payloads of dV and dK take their maxima over queries that the key may see (numerics.md §8) if they are powers of two of their own or
  /// belong to one key; other blocks and a scale of the whole tensor know no such limit.
  void add_columns(const Place& place, bool of_tile) {
    const Reach reach = rows_sharing(place.form, of_tile);
    const bool limited = place.form.scale == ScaleType::ue8m0 || place.form.group.columns == 1;
    if (reach.kind != Reach::Kind::tensor && limited) return;
    add(reach, {&out_->look_back}, name_of(place) + " (" + form_text(place.form) + ") shares a scale over " + text_of(reach));
  }

  Guarantee* out_;
};

}  // namespace

Reach farther(const Reach& a, const Reach& b) {
  if (a.kind != b.kind) return a.kind > b.kind ? a : b;
  if (a.kind != Reach::Kind::block) return a;
  // Blocks of which neither holds the other: what one reaches, the other passes on.
  const std::int64_t both = std::lcm(std::int64_t{a.tokens}, std::int64_t{b.tokens});
  return both > std::numeric_limits<int>::max() ? Reach{Reach::Kind::document} : Reach{Reach::Kind::block, static_cast<int>(both)};
}

Guarantee guarantee(const Recipe& recipe) {
  Guarantee made;
  Collector collect(&made);
  for (const Place& place : places(recipe, !recipe.trains)) {
    if (place.is_second && place.form == policy_of(recipe, place.row.operand).first && place.row.operand != Operand::d_s) {
      // the same copy: one line in the reasons, both effects
      Guarantee second;
      Collector(&second).add(place, recipe);
      made.outputs = farther(made.outputs, second.outputs);
      made.d_q = farther(made.d_q, second.d_q);
      made.look_back = farther(made.look_back, second.look_back);
      continue;
    }
    collect.add(place, recipe);
  }
  made.sticky = recipe.k.first.sticky || recipe.k.second.sticky || recipe.v.first.sticky || recipe.v.second.sticky;
  if (recipe.trains && recipe.one_ds_payload)
    collect.add(
        rows_sharing(recipe.d_s.first, true), {&made.d_q, &made.look_back},
        "one payload of dS (" + form_text(recipe.d_s.first) + ") serves both products, so its scale is shared by queries and keys");
  if (recipe.smoothing.q)
    collect.add({Reach::Kind::block, recipe.tile.queries}, {&made.outputs, &made.d_q, &made.look_back},
                "the mean of Q is taken over a tile of " + std::to_string(recipe.tile.queries) + " queries");
  if (recipe.smoothing.k)
    collect.add({Reach::Kind::document}, {&made.outputs, &made.d_q}, "the mean of K is taken over all tokens of the document");
  if (recipe.trains && recipe.accumulation.dq_f16 && recipe.accumulation.dq_prescale == PreScale::sequence)
    collect.add({Reach::Kind::document}, {&made.d_q}, "the FP16 pre-scale of dQ is taken over the whole sequence");
  return made;
}

std::string Guarantee::sentence(bool trains) const {
  const Reach earlier = trains ? farther(outputs, d_q) : outputs;
  const std::string what = trains ? "O or dQ" : "O";
  std::string text;
  switch (earlier.kind) {
    case Reach::Kind::none:
      text = "exact: no bit of " + what + " depends on a later token than its row may see";
      if (sticky) text += " (in a window, earlier tokens that have left it may still set exponents)";
      break;
    case Reach::Kind::block:
      text = "within a block: " + what + " may depend on later tokens of the same " + std::to_string(earlier.tokens) +
             " tokens, and on no others";
      break;
    case Reach::Kind::document:
      text = "leaks: " + what + " depends on later tokens of the whole document";
      break;
    case Reach::Kind::tensor:
      text = "leaks: " + what + " depends on every token of every document";
      break;
  }
  if (trains) {
    text += "; dK and dV depend on ";
    text += look_back.kind == Reach::Kind::none ? "no earlier query"
            : look_back.kind == Reach::Kind::block
                ? "earlier queries of the same " + std::to_string(look_back.tokens) + " tokens only"
                : "earlier queries";
  }
  return text + (documents_isolated ? "; documents are isolated" : "; documents are NOT isolated");
}

}  // namespace flamia::recipe
