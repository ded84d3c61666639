// SPDX-License-Identifier: Apache-2.0
#include "recipe/rules.hpp"

#include <cmath>
#include <type_traits>

#include "numerics/exponent.hpp"
#include "plan/architecture.hpp"
#include "recipe/fields.hpp"
#include "recipe/names.hpp"
#include "recipe/text_fields.hpp"

namespace flamia::recipe {
namespace {

using Kind = Group::Kind;

constexpr int kTile = 128;

bool of_tile(const Place& p) { return p.row.operand == Operand::p || p.row.operand == Operand::d_s; }
bool is(const Place& p, Operand operand) { return p.row.operand == operand; }

// ---- rules on one form ----

struct FormRule {
  bool (*broken)(const Place& p);
  const char* sentence;
};

constexpr FormRule kFormRules[] = {
    {[](const Place& p) { return p.form.group.kind != Kind::blocks && (p.form.group.rows != 0 || p.form.group.columns != 0); },
     "rows and columns belong to blocks; set them to 0 for other groups"},
    {[](const Place& p) { return p.form.group.rows < 0 || p.form.group.columns < 0; },
     "rows and columns of a block are at least 0 (0 = all)"},
    {[](const Place& p) {
       return p.form.element == Element::bf16 && (p.form.group.kind != Kind::none || p.form.scale != ScaleType::none ||
                                                  p.form.rule != ScaleRule::none || p.form.sticky);
     },
     "BF16 has no scale; use group none, scale none, rule none"},
    {[](const Place& p) { return p.form.element != Element::bf16 && p.form.group.kind == Kind::none; },
     "an 8-bit or 4-bit operand needs a scale group"},
    {[](const Place& p) { return p.form.group.kind == Kind::constant && !of_tile(p); },
     "a constant scale fits P, which lies in [0, 1], and no input; use tensor, head or blocks"},
    {[](const Place& p) {
       return p.form.group.kind == Kind::constant && (p.form.scale != ScaleType::none || p.form.rule != ScaleRule::none);
     },
     "a constant scale is not computed from the data; use scale none and rule none"},
    {[](const Place& p) {
       const bool scaled =
           p.form.group.kind == Kind::tensor || p.form.group.kind == Kind::head || p.form.group.kind == Kind::blocks;
       return p.form.element != Element::bf16 && scaled && (p.form.scale == ScaleType::none || p.form.rule == ScaleRule::none);
     },
     "a scale group needs a scale type (ue8m0, e4m3, f32) and a rule (ceil, floor, amax, ...)"},
    {[](const Place& p) {
       const bool power = p.form.rule == ScaleRule::ceil || p.form.rule == ScaleRule::floor;
       return p.form.rule != ScaleRule::none && p.form.scale != ScaleType::none && power != (p.form.scale == ScaleType::ue8m0);
     },
     "the rules ceil and floor make powers of two (scale ue8m0); amax and its relatives make scales of type e4m3 or f32"},
    {[](const Place& p) {
       return p.form.element == Element::int8 && p.form.group.kind != Kind::none && p.form.group.kind != Kind::constant &&
              (p.form.scale != ScaleType::f32 || p.form.rule != ScaleRule::amax);
     },
     "INT8 takes scale f32 with rule amax (amax / 127)"},
    {[](const Place& p) {
       return p.form.rule == ScaleRule::amax_or_smaller && (p.form.element != Element::e2m1 || p.form.scale != ScaleType::e4m3 ||
                                                            p.form.group.rows != 1 || p.form.sticky || of_tile(p));
     },
     "rule amax_or_smaller is for E2M1 with scale e4m3 in blocks of one token of Q, K, V or dO, and not sticky"},
    {[](const Place& p) {
       return p.form.rule == ScaleRule::two_level &&
              (p.form.element != Element::e2m1 || p.form.scale != ScaleType::e4m3 || p.form.group.kind != Kind::blocks ||
               p.form.sticky || p.form.tensor_scale != 1.f);
     },
     "rule two_level is for E2M1 with scale e4m3 in blocks, not sticky, and has no tensor scale beside it"},
    {[](const Place& p) { return p.form.sticky && p.form.group.kind != Kind::blocks; },
     "sticky needs blocks: a scale for the tensor or a head has no earlier group"},
    {[](const Place& p) { return p.form.sticky && (is(p, Operand::q) || is(p, Operand::d_out)); },
     "sticky exponents of Q or dO would let dK and dV see earlier queries; sticky is for K and V"},
    {[](const Place& p) { return p.form.sticky && of_tile(p); },
     "P and dS live in one tile and have no earlier group; sticky is for K and V"},
    {[](const Place& p) { return p.form.headroom < 0 || p.form.headroom > numerics::kMostHeadroom; },
     "headroom of sticky exponents is 0 to 4 binades"},
    {[](const Place& p) { return p.form.headroom != 0 && (!p.form.sticky || p.form.scale != ScaleType::ue8m0); },
     "headroom raises the first of a document's sticky exponents; give it with sticky=on and power-of-two scales (ue8m0)"},
    {[](const Place& p) { return !(p.form.tensor_scale > 0.f) || !std::isfinite(p.form.tensor_scale); },
     "the tensor scale must be positive and finite"},
    {[](const Place& p) { return p.form.tensor_scale != 1.f && p.form.scale != ScaleType::e4m3; },
     "a tensor scale goes with scales of type e4m3"},
    {[](const Place& p) {
       const auto fits = [](int n) { return n == 0 || (n > 0 && n <= kTile && kTile % n == 0); };
       return of_tile(p) && p.form.group.kind == Kind::blocks && (!fits(p.form.group.rows) || !fits(p.form.group.columns));
     },
     "blocks of P and dS must divide the 128 x 128 tile"},
    {[](const Place& p) { return of_tile(p) && p.form.group.kind == Kind::head; },
     "P and dS have no scale per head; use constant, tensor or blocks"},
    {[](const Place& p) { return is(p, Operand::d_s) && p.form.group.kind == Kind::constant; },
     "the size of dS depends on the data and the length (P is about 1 / length); a constant loses 99 % of it to zero. Use blocks"},
    {[](const Place& p) {
       // hardware scales cover 16 or 32 elements along the contraction; anything finer, and any F32 scale that cannot be folded, fits nowhere
       const int step = changes_along_contraction(p, kTile);
       const bool foldable = !of_tile(p) && p.use.contracts != Axis::channels && p.form.group.columns == 0;
       const int hardware = p.form.scale == ScaleType::e4m3 || p.form.element == Element::e2m1 ? 16 : 32;
       return step > 0 && !foldable && (p.form.scale == ScaleType::f32 || step % hardware != 0);
     },
     "the scale changes along the contraction in steps that no MMA applies (16 elements for 4-bit types and scales of type e4m3, "
     "else 32) and that cannot be "
     "folded "
     "into P or dS; use a second form grouped along the other axis, or all channels"},
};

// ---- rules on the whole recipe ----

struct RecipeRule {
  bool (*broken)(const Recipe& r);
  const char* sentence;
};

bool approximate(Exp2 kind) { return kind == Exp2::mitchell || kind == Exp2::schraudolph || kind == Exp2::direct; }

constexpr RecipeRule kRecipeRules[] = {
    {[](const Recipe& r) { return r.trains && approximate(r.softmax.exp2); },
     "exp2 mitchell, schraudolph and direct are approximations for inference; a recipe that trains uses hardware or poly "
     "(trains=off asks for inference alone)"},
    {[](const Recipe& r) {
       return r.softmax.exp2 == Exp2::direct && (r.p.first.element != Element::e2m1 || r.p.first.group.kind != Kind::blocks);
     },
     "exp2=direct takes 4-bit codes of P from the bits of the scores; give P E2M1 elements in blocks along the keys"},
    {[](const Recipe& r) {
       return r.trains && (r.p.first.rule == ScaleRule::two_level || r.p.second.rule == ScaleRule::two_level);
     },
     "two-level P is for inference; for training give P a constant or blocks"},
    {[](const Recipe& r) {
       const auto fits = [](int n) { return n == 32 || n == 64 || n == 128; };
       return !fits(r.tile.queries) || !fits(r.tile.keys);
     },
     "tile: statistics are taken over 32, 64 or 128 queries and keys"},
    {[](const Recipe& r) { return r.tile.queries != 128 && !r.smoothing.q; },
     "tile: its queries share the mean of Q alone, and Q is not smoothed; use smooth-q=on or 128 queries"},
    {[](const Recipe& r) { return r.tile.keys != 128 && (r.trains || r.p.first.rule != ScaleRule::two_level); },
     "tile: its keys share the first level of a two-level P alone, as \"sage3\" has it; use 128 keys"},
    {[](const Recipe& r) { return r.softmax.polynomial_degree < 2 || r.softmax.polynomial_degree > 4; },
     "the polynomial of exp2 has degree 2, 3 or 4"},
    {[](const Recipe& r) { return r.softmax.polynomial_sixteenths < 0 || r.softmax.polynomial_sixteenths > 16; },
     "the polynomial's share of the keys is 0 to 16 sixteenths"},
    {[](const Recipe& r) { return r.softmax.reference == RowReferenceRule::tilesum && r.p.first.element != Element::e4m3; },
     "ref=tilesum reads the sum of E4M3 codes of P; with another P use ref=phase32"},
    {[](const Recipe& r) { return r.softmax.reference == RowReferenceRule::tilesum && r.softmax.sum != SumOf::codes; },
     "ref=tilesum needs l=codes: the sum that makes l proves that nothing saturated"},
    {[](const Recipe& r) {
       const auto bf16 = [](const Quantisation& form) { return form.element == Element::bf16; };
       return r.trains && !r.one_ds_payload && bf16(r.d_s.first) && bf16(r.d_s.second);
     },
     "dS in BF16 has no scale, so it is rounded once for both products: two payloads of it are a contradiction; set payloads=1, or "
     "write ds=bf16"},
    {[](const Recipe& r) {
       const auto whole = [](const Quantisation& form) { return form.group.kind == Kind::tensor; };
       return r.trains && whole(r.d_s.first) != whole(r.d_s.second);
     },
     "a scale of dS for the tensor is found before dS is made and is part of both payloads; give it to ds1 and ds2, or to neither"},
    {[](const Recipe& r) { return r.one_ds_payload && r.d_s.first != r.d_s.second; },
     "one payload of dS serves both products, so both forms must be equal; set payloads=2 or make ds1 and ds2 equal"},
    {[](const Recipe& r) {
       const bool itself = r.d_out.first.element == Element::bf16 && r.v.second.element == Element::bf16;
       const bool decoded =
           r.d_out.first.element == Element::bf16 && r.v.second.element == Element::int8 && r.v.second == r.v.first;
       return r.d_out_times_v_bf16 ? !itself && !decoded : itself && r.p.first.element != Element::bf16;
     },
     "dov-bf16=on means that dO (do1) and V (v2) stay BF16 in dP, V perhaps as what O's INT8 codes of it stand for (v2 as v1), and "
     "both do so only with it (or in an all-BF16 recipe)"},
    {[](const Recipe& r) {
       const auto fits = [](int n) { return n == 0 || n == 32 || n == 64 || n == 128; };
       return !fits(r.accumulation.promote_keys) || !fits(r.accumulation.promote_queries);
     },
     "promotion intervals are 0 (never), 32, 64 or 128"},
    {[](const Recipe& r) { return r.accumulation.model == AccumulatorModel::hopper13 && r.q.first.element == Element::bf16; },
     "acc=hopper13 models the FP8 accumulator; BF16 products are added in FP32 (acc=native)"},
};

/// Enumerators that do not exist, by the member that holds one: memory that nobody filled, or the value of a newer header.
struct UnknownWords {
  std::string path;
  std::vector<std::string>* found;

  template <class T>
  void operator()(const char* name, const T& x) const {
    if constexpr (std::is_enum_v<T>) {
      if (!is_known(x))
        found->push_back(path + name + " = " + word_of(x) + " is no value of it; allowed: " + quoted_list(words_of<T>()));
    } else if constexpr (std::is_class_v<T>) {
      visit(x, UnknownWords{path + name + ".", found});
    }
  }
};

/// Products whose two operands no instruction multiplies.
void check_products(const Recipe& recipe, std::vector<std::string>* found) {
  const std::vector<Place> all = places(recipe, !recipe.trains);
  for (std::size_t i = 0; i < all.size(); ++i)
    for (std::size_t j = i + 1; j < all.size(); ++j) {
      if (all[i].use.product != all[j].use.product) continue;
      if (plan::precision_of(element_of(all[i])) == plan::precision_of(element_of(all[j]))) continue;
      found->push_back(
          std::string(name_of(all[i].use.product)) + " multiplies " + all[i].row.name + " in " + word_of(all[i].form.element) +
          " with " + all[j].row.name + " in " + word_of(all[j].form.element) + "; no MMA mixes them, so give both the same width" +
          (is(all[j], Operand::d_s) && all[j].form.element == Element::bf16
               ? " (BF16 dS takes operands in FP8 or FP4 whose scales are powers of two or E4M3: BF16 holds their values)"
               : ""));
    }
}

/// Whether BF16 holds code times scale: at most 8 significant bits.
bool bf16_holds(const Quantisation& form) {
  if (form.element == Element::bf16 || form.element == Element::int8 || form.rule == ScaleRule::two_level) return false;
  int exponent = 0;
  const bool power = std::frexp(form.tensor_scale, &exponent) == 0.5f;
  return form.scale == ScaleType::ue8m0 || (form.scale == ScaleType::e4m3 && power);
}

}  // namespace

const OperandPolicy& policy_of(const Recipe& recipe, Operand operand) {
  switch (operand) {
    case Operand::q:
      return recipe.q;
    case Operand::k:
      return recipe.k;
    case Operand::v:
      return recipe.v;
    case Operand::d_out:
      return recipe.d_out;
    case Operand::p:
      return recipe.p;
    case Operand::d_s:
      break;
  }
  return recipe.d_s;
}

std::vector<Place> places(const Recipe& recipe, bool inference) {
  std::vector<Place> all;
  for (const OperandRow& row : kOperands) {
    const OperandPolicy& policy = policy_of(recipe, row.operand);
    for (const bool second : {false, true}) {
      const Use& use = second ? row.second : row.first;
      if (inference && use.product != Product::s && use.product != Product::o) continue;
      const Quantisation& form = second ? policy.second : policy.first;
      const bool times_ds = second && (row.operand == Operand::q || row.operand == Operand::k);
      const Quantisation& d_s = use.product == Product::d_q ? recipe.d_s.first : recipe.d_s.second;
      const bool times_d_out = second && row.operand == Operand::v && recipe.d_out_times_v_bf16 && form.element == Element::int8;
      all.push_back({row, use, form, second, times_d_out || (times_ds && d_s.element == Element::bf16 && bf16_holds(form))});
    }
  }
  return all;
}

const char* name_of(Product product) {
  constexpr const char* kNames[] = {"S", "O", "dP", "dV", "dQ", "dK"};
  return kNames[static_cast<std::size_t>(product)];
}
const char* name_of(Axis axis) {
  constexpr const char* kNames[] = {"channels", "queries", "keys"};
  return kNames[static_cast<std::size_t>(axis)];
}
std::string name_of(const Place& place) { return std::string(place.row.name) + " in " + name_of(place.use.product); }

Element element_of(const Place& place) { return place.widened ? Element::bf16 : place.form.element; }

int changes_along_contraction(const Place& place, int head_dim) {
  const Group& group = place.form.group;
  if (group.kind != Kind::blocks || place.widened) return 0;
  const bool along_columns = place.use.contracts == place.row.columns;
  const int step = along_columns ? group.columns : group.rows;
  const int whole = place.use.contracts == Axis::channels ? head_dim : kPartialSum;
  return step > 0 && step < whole ? step : 0;
}

std::vector<std::string> violations(const Recipe& recipe) {
  std::vector<std::string> found;
  visit(recipe, UnknownWords{"", &found});
  if (!found.empty()) return found;  // the rules speak of the words that there are
  for (const FormRule& rule : kFormRules) {
    std::string where;
    for (const Place& place : places(recipe, !recipe.trains))
      if (rule.broken(place)) where += (where.empty() ? "" : ", ") + name_of(place) + " (" + form_text(place.form) + ")";
    if (!where.empty()) found.push_back(where + ": " + rule.sentence);
  }
  for (const RecipeRule& rule : kRecipeRules)
    if (rule.broken(recipe)) found.emplace_back(rule.sentence);
  check_products(recipe, &found);
  return found;
}

}  // namespace flamia::recipe
