// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/backend/form.hpp"

namespace flamia::cuda {
namespace {

OperandForm operand_form(const OperandPolicy& policy) {
  const Quantisation& form = policy.second;  // the first differs where it is NVFP4
  if (form.group.kind == Group::Kind::tensor) return {quantize::gpu::Group::tensor, false};
  return {form.group.rows == 1 ? quantize::gpu::Group::token : quantize::gpu::Group::block, form.sticky, form.headroom};
}

}  // namespace

HopperForm hopper_form(const Recipe& recipe, bool training) {
  HopperForm form;
  if (recipe.q.first.element == Element::int8) {
    form.int8 = true;
    form.smooth_keys = recipe.smoothing.k;
    return form;
  }
  form.q = operand_form(recipe.q);
  form.k = operand_form(recipe.k);
  form.v = operand_form(recipe.v);
  form.d_out = operand_form(recipe.d_out);
  form.rotate = recipe.rotate;
  if (recipe.smoothing.q) {
    form.sage3 = true;
    form.first_level = recipe.p.first.rule == ScaleRule::two_level ? 0.f : recipe.p.first.tensor_scale;
    return form;
  }
  form.nvfp4 = recipe.q.first.element == Element::e2m1;
  for (const OperandForm* operand : {&form.q, &form.k, &form.v})
    if (operand->group == quantize::gpu::Group::token) form.scale_group = sm90::ScaleGroup::token;
  if (form.nvfp4) {
    form.scale_group = sm90::ScaleGroup::nvfp4;
    if (!training) form.q = form.k = {quantize::gpu::Group::token, false};  // the forward pass needs none of their E4M3 codes
  }
  const bool token = form.d_out.group == quantize::gpu::Group::token && !form.nvfp4;
  form.gradient_scale_group = token ? sm90::ScaleGroup::token : form.scale_group;
  form.ds = recipe.d_s.first.element == Element::bf16 ? sm90::DsFormat::bf16 : sm90::DsFormat::e4m3;
  form.partials = recipe.accumulation.dq_f16 ? sm90::PartialFormat::f16 : sm90::PartialFormat::f32;
  form.reference =
      recipe.softmax.reference == RowReferenceRule::phase32 ? sm90::RowReference::phase32 : sm90::RowReference::tilesum;
  return form;
}

}  // namespace flamia::cuda
