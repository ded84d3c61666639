// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/backend/form.hpp"

#include <string>

namespace flamia::cuda {
namespace {

constexpr Group kTensor{Group::Kind::tensor, 0, 0};
constexpr Group kTokenBlock{Group::Kind::blocks, 32, 0};
constexpr Group kToken{Group::Kind::blocks, 1, 0};

/// Collects every reason at once, so that a user mends a recipe in one go.
class Refusals {
 public:
  void unless(bool supported, const std::string& what) {
    if (supported) return;
    text_ += text_.empty() ? "" : "; ";
    text_ += what;
  }
  bool empty() const { return text_.empty(); }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

OperandForm operand_form(const char* name, const OperandPolicy& policy, Refusals& refusals) {
  const Quantisation& form = policy.first;
  refusals.unless(policy.first == policy.second, std::string(name) + " has two forms (one copy serves both products here)");
  refusals.unless(form.element == Element::e4m3 && form.scale == ScaleType::ue8m0 && form.rule == ScaleRule::ceil,
                  std::string(name) + " is not E4M3 with power-of-two scales by the ceil rule");
  refusals.unless(form.group == kTensor || form.group == kTokenBlock || form.group == kToken,
                  std::string(name) + " shares scales by another group than a tensor, 32 tokens or one token");
  refusals.unless(!form.sticky || form.group != kTensor, std::string(name) + " is sticky, but has one scale only");
  const quantize::gpu::Group group = form.group == kTensor       ? quantize::gpu::Group::tensor
                                     : form.group == kTokenBlock ? quantize::gpu::Group::block
                                                                 : quantize::gpu::Group::token;
  return {group, form.sticky};
}

}  // namespace

Status hopper_form(const Recipe& recipe, HopperForm* form) {
  Refusals refusals;
  HopperForm made;
  made.q = operand_form("Q", recipe.q, refusals);
  made.k = operand_form("K", recipe.k, refusals);
  made.v = operand_form("V", recipe.v, refusals);
  made.d_out = operand_form("dO", recipe.d_out, refusals);
  made.rotate = recipe.rotate;
  const bool tokens = made.q.group == quantize::gpu::Group::token || made.k.group == quantize::gpu::Group::token ||
                      made.v.group == quantize::gpu::Group::token;
  made.scale_group = tokens ? sm90::ScaleGroup::token : sm90::ScaleGroup::block;
  made.reference =
      recipe.softmax.reference == RowReferenceRule::phase32 ? sm90::RowReference::phase32 : sm90::RowReference::tilesum;

  refusals.unless(!made.q.sticky && !made.d_out.sticky, "Q or dO is sticky");
  refusals.unless(recipe.p.first.element == Element::e4m3 && recipe.p.first.group.kind == Group::Kind::constant &&
                      recipe.p.first == recipe.p.second,
                  "P is not E4M3 with a constant scale");
  refusals.unless(recipe.softmax.exp2 == Exp2::hardware, "exp2 is not the hardware's");
  refusals.unless(recipe.softmax.sum == SumOf::codes, "l sums unrounded probabilities");
  refusals.unless(recipe.accumulation.promote_keys == 128, "O is not promoted every 128 keys");
  refusals.unless(recipe.safety == SafetyPolicy{}, "diagonal tiles fold exponents per key");
  refusals.unless(recipe.smoothing == SmoothingPolicy{}, "Q or K is smoothed");
  if (!refusals.empty())
    return Status::unsupported("recipe \"" + recipe.name() + "\" does not run on sm_90: " + refusals.text() +
                               "; the kernels run \"mxfp8\", \"mxfp8-exact\" and \"fp8-tensor\", the CPU backend runs more");
  *form = made;
  return {};
}

}  // namespace flamia::cuda
