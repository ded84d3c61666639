// SPDX-License-Identifier: Apache-2.0
#include "recipe/lower.hpp"

#include <algorithm>

#include "numerics/hadamard.hpp"
#include "recipe/execution.hpp"
#include "recipe/named.hpp"
#include "recipe/names.hpp"
#include "recipe/text_fields.hpp"

namespace flamia::recipe {
namespace {

using plan::ArchitectureFacts;
using plan::MmaKind;
using plan::Precision;

bool is_input(Operand operand) { return operand != Operand::p && operand != Operand::d_s; }

/// A scale of V, K, dO or Q that belongs to whole tokens can ride on the exponent of P or dS.
bool foldable(const Place& place) {
  return is_input(place.row.operand) && place.use.contracts != Axis::channels && place.form.group.columns == 0 &&
         place.form.scale == ScaleType::ue8m0;
}

/// Whether `kind` applies the place's scales where they change every `step` elements.
bool applies(const MmaKind& kind, const Place& place, int step) {
  return kind.scales == place.form.scale && kind.scale_group > 0 && step % kind.scale_group == 0;
}

class Lowerer {
 public:
  Lowerer(const Recipe& recipe, const ArchitectureFacts& facts, int head_dim)
      : recipe_(recipe), facts_(facts), head_dim_(head_dim) {}

  Lowering run() {
    made_.architecture = facts_.id;
    made_.refusals = violations(recipe_);
    check_head_dim();
    if (recipe_.rotate && !numerics::rotation_supported(head_dim_))
      made_.notes.push_back("the rotation has no effect at head dim " + std::to_string(head_dim_) +
                            "; it is defined for 64 and 128");
    if (!recipe_.trains)
      made_.no_backward =
          "recipe \"" + recipe_.name() + "\" has no backward pass; for training use \"" + nearest_that_trains() + "\"";
    const std::vector<Place> all = places(recipe_, !recipe_.trains);
    for (int p = 0; p < 6; ++p) {
      std::vector<Place> pair;
      for (const Place& place : all)
        if (static_cast<int>(place.use.product) == p) pair.push_back(place);
      if (pair.size() == 2) plan_product(pair[0], pair[1]);
    }
    for (const Place& place : all)
      if (is_input(place.row.operand)) plan_copy(place);
    check_execution();
    return made_;
  }

 private:
  void refuse(const std::string& sentence) { made_.refusals.push_back(std::string(facts_.name) + ": " + sentence); }

  void check_head_dim() {
    if (facts_.head_dims.empty()) {
      if (head_dim_ <= 0 || head_dim_ % 16 != 0 || head_dim_ > facts_.largest_head_dim)
        refuse("head dim " + std::to_string(head_dim_) + " is not a multiple of 16 up to " +
               std::to_string(facts_.largest_head_dim) + "; pad the channels of q, k and v with zeros");
      return;
    }
    if (std::find(facts_.head_dims.begin(), facts_.head_dims.end(), head_dim_) != facts_.head_dims.end()) return;
    std::string allowed;
    for (const int d : facts_.head_dims) allowed += (allowed.empty() ? "" : " and ") + std::to_string(d);
    refuse("head dim " + std::to_string(head_dim_) + " has no kernel; " + allowed +
           " have. Pad the channels of q, k and v with zeros, or use the CPU");
  }

  ScaleUse scale_use(const Place& place, const MmaKind& kind) const {
    if (place.form.scale == ScaleType::none || place.widened) return ScaleUse::none;
    const int step = changes_along_contraction(place, head_dim_);
    if (step == 0) return ScaleUse::outside;
    if (applies(kind, place, step)) return ScaleUse::hardware;
    if (foldable(place)) return ScaleUse::fold;
    return facts_.any_scales ? ScaleUse::loops : ScaleUse::none;
  }

  /// Whether the kind brings both operands' scales in.
  bool fits(const MmaKind& kind, const Place& a, const Place& b) const {
    if (kind.precision != plan::precision_of(element_of(a)) || kind.precision != plan::precision_of(element_of(b))) return false;
    for (const Place* place : {&a, &b})
      if (place->form.scale != ScaleType::none && !place->widened && scale_use(*place, kind) == ScaleUse::none) return false;
    return true;
  }

  void plan_product(const Place& a, const Place& b) {
    ProductPlan plan{a.use.product, nullptr, {}};
    for (const MmaKind& kind : facts_.kinds)
      if (fits(kind, a, b) && (!plan.mma || better(kind, *plan.mma, a, b))) plan.mma = &kind;
    if (!plan.mma) explain_refusal(a, b);
    plan.operands[0] = {a.row.operand, plan.mma ? scale_use(a, *plan.mma) : ScaleUse::none};
    plan.operands[1] = {b.row.operand, plan.mma ? scale_use(b, *plan.mma) : ScaleUse::none};
    made_.products.push_back(plan);
  }

  /// Of two kinds that fit: the one that leaves less to fold, then the plainer.
  bool better(const MmaKind& x, const MmaKind& y, const Place& a, const Place& b) const {
    const auto folds = [&](const MmaKind& kind) {
      return (scale_use(a, kind) == ScaleUse::fold ? 1 : 0) + (scale_use(b, kind) == ScaleUse::fold ? 1 : 0);
    };
    return folds(x) < folds(y);
  }

  void explain_refusal(const Place& a, const Place& b) {
    const std::string product = name_of(a.use.product);
    const Precision precision = plan::precision_of(element_of(a));
    if (precision != plan::precision_of(element_of(b))) return;  // a broken rule, reported as such
    const auto of_precision = [&](const MmaKind& kind) { return kind.precision == precision; };
    for (const Place* place : {&a, &b}) {
      const int step = changes_along_contraction(*place, head_dim_);
      const auto brings_in = [&](const MmaKind& kind) {
        return of_precision(kind) &&
               (place->form.scale == ScaleType::none || place->widened || scale_use(*place, kind) != ScaleUse::none);
      };
      if (std::any_of(facts_.kinds.begin(), facts_.kinds.end(), brings_in)) continue;
      const bool block_scaled = std::any_of(facts_.kinds.begin(), facts_.kinds.end(), [&](const MmaKind& kind) {
        return of_precision(kind) && kind.scales != ScaleType::none;
      });
      refuse(name_of(*place) + " (" + form_text(place->form) + ") changes its scale every " + std::to_string(step) + " " +
             name_of(place->use.contracts) + " along the contraction; " +
             (block_scaled ? "no MMA here applies such scales" : "no MMA here applies scales along it") +
             ", and they cannot be folded" +
             (place->row.operand == Operand::d_s ? ". Use two payloads of dS, as \"mxfp8\" does"
                                                 : ". Use one scale per token or token-block"));
    }
  }

  /// Whether the product's MMA wants operands contiguous along the contraction; of a refused product: whether any for the operand does.
  bool k_major_only(const Place& place) const {
    for (const ProductPlan& product : made_.products)
      if (product.product == place.use.product && product.mma) return product.mma->k_major_only;
    const Precision precision = plan::precision_of(element_of(place));
    return std::any_of(facts_.kinds.begin(), facts_.kinds.end(),
                       [&](const MmaKind& kind) { return kind.precision == precision && kind.k_major_only; });
  }

  Layout layout_of(const Place& place) const {
    if (place.widened && !facts_.any_scales) return Layout::rows_bf16;
    if (!k_major_only(place)) return Layout::as_given;
    if (place.use.contracts == Axis::channels) return Layout::rows;
    if (facts_.id != plan::Architecture::sm_90) return Layout::transposed;
    return Layout::transposed_pi;  // P and dS are packed from accumulator registers
  }

  void plan_copy(const Place& place) {
    auto found = std::find_if(made_.copies.begin(), made_.copies.end(),
                              [&](const CopyPlan& copy) { return copy.operand == place.row.operand && copy.form == place.form; });
    if (found == made_.copies.end()) found = made_.copies.insert(found, {place.row.operand, place.form, {}, {}});
    found->products.push_back(place.use.product);
    const Layout layout = layout_of(place);
    if (std::find(found->layouts.begin(), found->layouts.end(), layout) == found->layouts.end()) found->layouts.push_back(layout);
  }

  static bool runs_backward(const Recipe& recipe, plan::Architecture architecture) {
    return recipe.trains && execution_gaps(recipe, architecture).empty() && backward_gaps(recipe, architecture).empty();
  }

  /// Of those that have kernels too: the others are there to be measured.
  std::string nearest_that_trains() const {
    return nearest_named(recipe_, [](const Recipe& r) { return runs_backward(r, plan::Architecture::sm_90); })->name;
  }

  void check_execution() {
    const std::string name = recipe_.name();
    const auto joined = [](const std::vector<std::string>& gaps) {
      constexpr std::size_t kShown = 2;  // the first says what matters; a recipe of another kind has ten
      std::string reasons;
      for (std::size_t i = 0; i < gaps.size() && i < kShown; ++i) reasons += (reasons.empty() ? "" : ", ") + gaps[i];
      return gaps.size() <= kShown ? reasons : reasons + ", and " + std::to_string(gaps.size() - kShown) + " more";
    };
    const std::vector<std::string> gaps = execution_gaps(recipe_, facts_.id);
    const std::vector<std::string> backward = backward_gaps(recipe_, facts_.id);
    if (made_.no_backward.empty() && gaps.empty() && !backward.empty())
      made_.no_backward = "recipe \"" + name + "\" has no backward pass on " + facts_.name + " (" + joined(backward) +
                          "); the nearest that has one there: \"" + nearest_that_trains() + "\"; the CPU backend runs that of \"" +
                          name + "\"";
    if (gaps.empty()) return;
    const std::string reasons = joined(gaps);
    made_.not_executed = "recipe \"" + name + "\" is not executed on " + facts_.name + " by this version (" + reasons + ")";
    const NamedRecipe* here = nearest_named(recipe_, [this](const Recipe& r) {
      return execution_gaps(r, facts_.id).empty() && (!recipe_.trains || runs_backward(r, facts_.id));
    });
    const bool on_cpu = facts_.id != plan::Architecture::cpu && execution_gaps(recipe_, plan::Architecture::cpu).empty();
    if (here) made_.not_executed += "; the nearest that runs there: \"" + std::string(here->name) + "\"";
    if (on_cpu) made_.not_executed += "; the CPU backend runs \"" + name + "\"";
  }

  const Recipe& recipe_;
  const ArchitectureFacts& facts_;
  int head_dim_;
  Lowering made_{};
};

}  // namespace

const char* name_of(Layout layout) {
  switch (layout) {
    case Layout::as_given:
      return "as given";
    case Layout::rows:
      return "rows";
    case Layout::transposed_pi:
      return "transposed (pi)";
    case Layout::transposed:
      return "transposed";
    case Layout::rows_bf16:
      return "rows of values in BF16";
  }
  return "";
}

const char* name_of(ScaleUse use) {
  switch (use) {
    case ScaleUse::none:
      return "no scale";
    case ScaleUse::outside:
      return "scale applied after the sum";
    case ScaleUse::fold:
      return "scale folded";
    case ScaleUse::hardware:
      return "scale applied by the MMA";
    case ScaleUse::loops:
      return "summed group by group";
  }
  return "";
}

Lowering lower(const Recipe& recipe, plan::Architecture architecture, int head_dim) {
  return Lowerer(recipe, plan::facts(architecture), head_dim).run();
}

Status can_mask(const Recipe& recipe, const Mask& mask) {
  const bool window = mask.left >= 0 || (!mask.causal && mask.right > 0);
  if (!window || recipe.smoothing == SmoothingPolicy{}) return {};
  Recipe unsmoothed = recipe;
  unsmoothed.smoothing = {};
  unsmoothed.tile.queries = TilePolicy{}.queries;  // they share the mean of Q alone
  return Status::unsupported("recipe \"" + recipe.name() +
                             "\" subtracts means over tokens (smoothing), which a sliding window does not define; use \"" +
                             unsmoothed.name() + "\", or causal or full attention");
}

Status can_run(const Recipe& recipe, plan::Architecture architecture, int head_dim, bool backward) {
  const bool broken = !violations(recipe).empty();
  Lowering lowering = lower(recipe, architecture, head_dim);
  std::vector<std::string> reasons = std::move(lowering.refusals);
  if (backward && !lowering.no_backward.empty()) reasons.push_back(lowering.no_backward);
  if (!lowering.not_executed.empty()) reasons.push_back(lowering.not_executed);
  if (reasons.empty()) return {};
  return {broken ? StatusCode::invalid_argument : StatusCode::unsupported, in_lines(reasons)};
}

}  // namespace flamia::recipe
