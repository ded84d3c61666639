// SPDX-License-Identifier: Apache-2.0
// What of a recipe the Hopper kernels execute, as their own configuration.
#pragma once
#include "flamia/recipe.hpp"
#include "flamia/types.hpp"
#include "kernels/cuda/sm90/backward/backward.hpp"
#include "kernels/cuda/sm90/forward/forward.hpp"
#include "quantize/cuda/quantise.hpp"

namespace flamia::cuda {

/// How one operand is quantised on the GPU.
struct OperandForm {
  quantize::gpu::Group group = quantize::gpu::Group::block;
  bool sticky = false;
  int headroom = 0;
};

struct HopperForm {
  OperandForm q, k, v, d_out;
  bool rotate = false;
  bool nvfp4 = false;        // Q and K of the scores
  bool int8 = false;         // everything but dO Vt in INT8: kernels of their own (sm90/int8), of which none of the rest is true
  bool smooth_keys = false;  // INT8: K less its mean over the document
  bool sage3 = false;        // a kernel and quantisers of its own (sm90/sage3), of which none of the rest is true
  float first_level = 0.f;   // of P's scales there
  sm90::ScaleGroup scale_group = sm90::ScaleGroup::block;           // what the forward kernel is compiled for
  sm90::ScaleGroup gradient_scale_group = sm90::ScaleGroup::block;  // the same of the backward kernel, which reads dO too
  sm90::DsFormat ds = sm90::DsFormat::e4m3;
  sm90::PartialFormat partials = sm90::PartialFormat::f16;  // in which dQ is summed
  sm90::RowReference reference = sm90::RowReference::phase32;
};

/// Of a recipe that recipe::can_run accepts for sm_90.
HopperForm hopper_form(const Recipe& recipe, bool training);

}  // namespace flamia::cuda
