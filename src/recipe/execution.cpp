// SPDX-License-Identifier: Apache-2.0
#include "recipe/execution.hpp"

#include <array>
#include <utility>

#include "recipe/named.hpp"
#include "recipe/rules.hpp"

namespace flamia::recipe {
namespace {

class Gaps {
 public:
  void unless(bool computed, std::string sentence) {
    if (!computed) gaps_.push_back(std::move(sentence));
  }
  std::vector<std::string> take() { return std::move(gaps_); }

 private:
  std::vector<std::string> gaps_;
};

std::vector<std::string> cpu_gaps(const Recipe& recipe) {
  Gaps gaps;
  bool elements = true, scales = true;
  for (const Place& place : places(recipe, !recipe.trains)) {
    const bool of_tile = place.row.operand == Operand::p || place.row.operand == Operand::d_s;
    elements = elements && !(of_tile && place.form.element == Element::e5m2);
    scales = scales && !(!of_tile && place.form.scale == ScaleType::f32 && place.form.group.columns != 0);
  }
  gaps.unless(elements, "P or dS is E5M2");
  gaps.unless(scales, "an operand has FP32 scales per group of channels");
  return gaps.take();
}

/// NVFP4 as the quantiser of the GPU writes it for the scores, beside the E4M3 codes of the other product.
constexpr Quantisation kHopperNvfp4{Element::e2m1, {Group::Kind::blocks, 1, 16}, ScaleType::e4m3, ScaleRule::amax_or_smaller};

/// One quantised form that serves both products, as the quantiser of the GPU writes it; or NVFP4 for the scores.
void check_hopper_operand(const char* name, const OperandPolicy& policy, bool may_be_sticky, bool nvfp4, Gaps& gaps) {
  const Quantisation& form = policy.second;
  const bool group = form.group == Group{Group::Kind::tensor, 0, 0} || form.group == Group{Group::Kind::blocks, 32, 0} ||
                     form.group == Group{Group::Kind::blocks, 1, 0};
  const std::string operand(name);
  gaps.unless(policy.first == policy.second || nvfp4, operand + " has two forms");
  gaps.unless(form.element == Element::e4m3 && form.scale == ScaleType::ue8m0 && form.rule == ScaleRule::ceil,
              operand + " is not E4M3 with power-of-two scales by the ceil rule");
  gaps.unless(group, operand + " shares its scales by another group than a tensor, 32 tokens or one token");
  gaps.unless(!form.sticky || (may_be_sticky && form.group.kind == Group::Kind::blocks), operand + " is sticky");
}

/// The INT8 kernels compute one recipe, with K smoothed or not.
std::vector<std::string> hopper_int8_gaps(const Recipe& recipe) {
  Recipe known = find_named("sagebwd")->recipe;
  known.smoothing.k = recipe.smoothing.k;
  known.gradient_d = recipe.gradient_d;  // the backward pass asks for it
  Gaps gaps;
  gaps.unless(!recipe.smoothing.q, "Q is smoothed (smooth-q=on)");
  gaps.unless(recipe == known, "with Q in INT8 only \"sagebwd\" and \"sagebwd smooth-k=off\" have kernels");
  return gaps.take();
}

/// NVFP4 with smoothing: a kernel of its own, for inference.
std::vector<std::string> hopper_smoothed_gaps(const Recipe& recipe) {
  const auto nvfp4 = [](int rows, int columns, ScaleRule rule) {
    return Quantisation{Element::e2m1, {Group::Kind::blocks, rows, columns}, ScaleType::e4m3, rule};
  };
  Gaps gaps;
  gaps.unless(recipe.smoothing.q && recipe.smoothing.k, "one of Q and K is smoothed and the other is not");
  gaps.unless(!recipe.trains || !recipe.smoothing.q, "Q is smoothed (smooth-q=on) in a recipe that trains");
  gaps.unless(recipe.q.first == nvfp4(1, 16, ScaleRule::amax) && recipe.k.first == recipe.q.first,
              "Q and K are smoothed but not NVFP4 in blocks of 16 channels by amax / 6");
  gaps.unless(recipe.v.first == nvfp4(16, 1, ScaleRule::amax), "Q and K are smoothed but V is not NVFP4 in blocks of 16 tokens");
  Quantisation p = recipe.p.first;
  p.tensor_scale = 1.f;
  gaps.unless(p == nvfp4(1, 16, ScaleRule::two_level) || p == nvfp4(1, 16, ScaleRule::amax),
              "Q and K are smoothed but P is not NVFP4 in blocks of 16 keys");
  gaps.unless(!recipe.rotate, "Q and K are rotated and smoothed");
  gaps.unless(recipe.tile == TilePolicy{}, "its tiles are not 128 x 128");
  gaps.unless(recipe.softmax.reference == RowReferenceRule::phase32, "Q and K are smoothed and the row reference is not phase32");
  gaps.unless(recipe.softmax.exp2 == Exp2::hardware, "exp2 is not the hardware's");
  gaps.unless(recipe.softmax.sum == SumOf::codes, "l sums unrounded probabilities");
  gaps.unless(recipe.accumulation.promote_keys == 128, "O is not promoted every 128 keys");
  gaps.unless(recipe.safety == SafetyPolicy{}, "exponents are folded per key on the diagonal tile");
  return gaps.take();
}

std::vector<std::string> hopper_gaps(const Recipe& recipe) {
  if (recipe.q.first.element == Element::int8) return hopper_int8_gaps(recipe);
  if (recipe.smoothing != SmoothingPolicy{}) return hopper_smoothed_gaps(recipe);
  Gaps gaps;
  const bool nvfp4 = recipe.q.first == kHopperNvfp4 && recipe.k.first == kHopperNvfp4;
  check_hopper_operand("Q", recipe.q, false, nvfp4, gaps);
  check_hopper_operand("K", recipe.k, true, nvfp4, gaps);
  check_hopper_operand("V", recipe.v, true, false, gaps);
  if (recipe.trains) check_hopper_operand("dO", recipe.d_out, false, false, gaps);
  gaps.unless(!nvfp4 || recipe.rotate, "Q and K in NVFP4 are not rotated");
  gaps.unless(recipe.p.first.element == Element::e4m3 && recipe.p.first.group.kind == Group::Kind::constant &&
                  recipe.p.first == recipe.p.second,
              "P is not E4M3 with a constant scale");
  gaps.unless(recipe.softmax.exp2 == Exp2::hardware, "exp2 is not the hardware's");
  gaps.unless(recipe.softmax.sum == SumOf::codes, "l sums unrounded probabilities");
  gaps.unless(recipe.accumulation.promote_keys == 128, "O is not promoted every 128 keys");
  gaps.unless(recipe.safety == SafetyPolicy{}, "exponents are folded per key on the diagonal tile");
  return gaps.take();
}

/// What the backward kernel asks beyond what the forward kernel does.
std::vector<std::string> hopper_backward_gaps(const Recipe& recipe) {
  Gaps gaps;
  gaps.unless(recipe.gradient_d == GradientD::output,
              "D is the row sum of P and dP (d=scores), which needs a second pass over the keys");
  if (recipe.q.first.element == Element::int8) return gaps.take();  // else both passes or none
  const bool bf16 = recipe.d_s == OperandPolicy{};
  const auto payload = [](const Quantisation& form, int rows, int columns) {
    return form.element == Element::e4m3 && form.scale == ScaleType::ue8m0 && form.rule == ScaleRule::ceil &&
           form.group == Group{Group::Kind::blocks, rows, columns};
  };
  gaps.unless(recipe.q.first.element != Element::e2m1 || bf16,
              "its scores are NVFP4, which the backward kernels recompute only with dS in BF16 (ds=bf16)");
  gaps.unless(bf16 || !recipe.one_ds_payload, "dS is one payload for both products");
  gaps.unless(bf16 || payload(recipe.d_s.first, 1, 128), "dS for dQ is not E4M3 with one exponent per query and 128 keys");
  gaps.unless(recipe.one_ds_payload || payload(recipe.d_s.second, 64, 1),
              "dS for dK is not E4M3 with one exponent per key and 64 queries (dk=key64)");
  gaps.unless(recipe.gradient_p == GradientP::unrounded, "dS uses the codes of P");
  gaps.unless(recipe.accumulation.promote_queries == 64, "dK and dV are not promoted every 64 queries");
  gaps.unless(!recipe.accumulation.dq_f16 || recipe.accumulation.dq_prescale == PreScale::causal_row,
              "the pre-scale of dQ is one per sequence");
  gaps.unless(!recipe.d_out_times_v_bf16, "dO times V stays in BF16");
  return gaps.take();
}

}  // namespace

std::vector<std::string> execution_gaps(const Recipe& recipe, plan::Architecture architecture) {
  switch (architecture) {
    case plan::Architecture::cpu:
      return cpu_gaps(recipe);
    case plan::Architecture::sm_90:
      return hopper_gaps(recipe);
    case plan::Architecture::sm_100:
      return {"no kernel for it exists"};
  }
  return {};
}

std::vector<std::string> backward_gaps(const Recipe& recipe, plan::Architecture architecture) {
  switch (architecture) {
    case plan::Architecture::cpu:
      return {};
    case plan::Architecture::sm_90:
      return hopper_backward_gaps(recipe);
    case plan::Architecture::sm_100:
      return {"no backward pass for it exists"};
  }
  return {};
}

}  // namespace flamia::recipe
