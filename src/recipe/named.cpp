// SPDX-License-Identifier: Apache-2.0
#include "recipe/named.hpp"

#include <string>

namespace flamia::recipe {
namespace {

// ---- forms ----

constexpr Group blocks(int rows, int columns) { return {Group::Kind::blocks, rows, columns}; }

constexpr Quantisation kBf16{};

/// E4M3 with a power-of-two scale.
constexpr Quantisation e4m3(Group group, ScaleRule rule = ScaleRule::ceil) {
  return {Element::e4m3, group, ScaleType::ue8m0, rule};
}
constexpr Quantisation nvfp4(Group group, ScaleRule rule = ScaleRule::amax, float tensor_scale = 1.f) {
  return {Element::e2m1, group, ScaleType::e4m3, rule, false, 0, tensor_scale};
}
constexpr Quantisation mxfp4(Group group) { return {Element::e2m1, group, ScaleType::ue8m0, ScaleRule::floor}; }
constexpr Quantisation int8(Group group) { return {Element::int8, group, ScaleType::f32, ScaleRule::amax}; }

constexpr Quantisation kTokenBlock = e4m3(blocks(32, 0));
constexpr Quantisation kToken = e4m3(blocks(1, 0));
/// Two binades above the first token most tiles have one exponent from the first on (numerics.md §2).
constexpr Quantisation kStickyToken{Element::e4m3, blocks(1, 0), ScaleType::ue8m0, ScaleRule::ceil, true, 2};
constexpr Quantisation kTensor = e4m3({Group::Kind::tensor});
/// P lies in [0, 1]: its scale is the constant 2^B of the row reference's rule.
constexpr Quantisation kConstantP{Element::e4m3, {Group::Kind::constant}};

constexpr OperandPolicy both(Quantisation form) { return {form, form}; }

/// dS in E4M3. dQ: one exponent per query row and key tile; dK: one per key and 64 queries.
constexpr OperandPolicy kTwoPayloads{e4m3(blocks(1, 128)), e4m3(blocks(64, 1))};

/// Along the contraction of either product: 1 x n where that is the columns' axis, n x 1 where it is the rows'.
template <class Form>
constexpr OperandPolicy columns_then_rows(int n, Form form) {
  return {form(blocks(1, n)), form(blocks(n, 1))};
}
template <class Form>
constexpr OperandPolicy rows_then_columns(int n, Form form) {
  return {form(blocks(n, 1)), form(blocks(1, n))};
}

// ---- recipes ----

Recipe bf16() {
  Recipe r;  // every operand BF16
  r.one_ds_payload = true;
  return r;
}

/// E4M3 training: the operands given, dS rounded once to BF16, the rest as numerics.md §0 settles it for every recipe.
Recipe fp8(OperandPolicy q, OperandPolicy k, OperandPolicy v, OperandPolicy d_out) {
  Recipe r;
  r.q = q, r.k = k, r.v = v, r.d_out = d_out;
  r.p = both(kConstantP);
  r.softmax.reference = RowReferenceRule::tilesum;
  r.one_ds_payload = true;
  r.rotate = true;
  r.accumulation.dq_f16 = true;
  return r;
}

Recipe mxfp8() { return fp8(both(kTokenBlock), both(kTokenBlock), both(kTokenBlock), both(kTokenBlock)); }
Recipe mxfp8_exact() { return fp8(both(kToken), both(kStickyToken), both(kStickyToken), both(kToken)); }

/// Q and K of the scores in NVFP4, 16 channels a scale.
Recipe with_nvfp4_scores(Recipe r) {
  r.q.first = r.k.first = nvfp4(blocks(1, 16), ScaleRule::amax_or_smaller);
  return r;
}

/// P lies in [0, 1]: the constant 2^-11 puts its scales into E4M3's range. dO and dS have no size of their own: two levels. O and dP have a
/// copy of V each: with D from O, dP - D keeps what the copies do not share, one sign in a row, and training diverges.
Recipe nvfp4_full() {
  const auto form = [](Group group) { return nvfp4(group); };
  const auto two_levels = [](Group group) { return nvfp4(group, ScaleRule::two_level); };
  Recipe r = mxfp8();
  r.q = r.k = columns_then_rows(16, form);
  r.v = rows_then_columns(16, form);
  r.p = columns_then_rows(16, [](Group group) { return nvfp4(group, ScaleRule::amax, 0x1p-11f); });
  r.softmax.reference = RowReferenceRule::phase32;  // P has scales of its own: no sum of codes proves that nothing saturated
  r.d_out = r.d_s = columns_then_rows(16, two_levels);
  r.one_ds_payload = false;
  r.gradient_d = GradientD::scores;
  return r;
}

Recipe sage3() {
  Recipe r;
  r.q = r.k = both(nvfp4(blocks(1, 16)));
  r.v = both(nvfp4(blocks(16, 1)));
  r.p = both({Element::e2m1, blocks(1, 16), ScaleType::e4m3, ScaleRule::two_level});
  r.smoothing = {true, true};
  r.trains = false;
  return r;
}

/// P and dS have a scale a row of the product that takes them. The published blocks of 128 x 64 leave dQ below .999: few great elements of a block
/// set the step of all others. dP takes the V that O was made of, not V itself as published: D is the sum of dO and that O, and dP - D is small where
/// few keys decide a row.
Recipe sagebwd() {
  const Quantisation tokens = int8(blocks(128, 0));
  Recipe r;
  r.q = r.k = r.v = both(tokens);
  r.d_out = {kBf16, tokens};
  r.p = r.d_s = columns_then_rows(128, int8);
  r.d_out_times_v_bf16 = true;
  r.smoothing.k = true;
  return r;
}

/// One power of two per tensor, so that every tile of every operand has the same exponent. dS cannot be scaled by a maximum over all
/// tiles in one pass: it has two payloads.
Recipe fp8_tensor() {
  Recipe r = fp8(both(kTensor), both(kTensor), both(kTensor), both(kTensor));
  r.d_s = kTwoPayloads;
  r.one_ds_payload = false;
  r.rotate = false;
  return r;
}

Recipe mxfp8_floor() {
  const auto form = [](Group group) { return e4m3(group, ScaleRule::floor); };
  Recipe r =
      fp8(columns_then_rows(32, form), columns_then_rows(32, form), rows_then_columns(32, form), columns_then_rows(32, form));
  r.p = r.d_s = columns_then_rows(32, form);
  r.one_ds_payload = false;
  r.softmax.reference = RowReferenceRule::phase32;
  r.rotate = false;
  return r;
}

Recipe hwfp4_direct() {
  Recipe r;
  r.q = r.k = both(nvfp4(blocks(1, 16)));
  r.v = both(mxfp4(blocks(32, 1)));
  r.p = both(mxfp4(blocks(1, 32)));
  r.softmax.exp2 = Exp2::direct;
  r.trains = false;
  return r;
}

/// FP32 scales per head, P summed before rounding, products left in the tensor core's accumulator.
Recipe fp8_head() {
  Recipe r;
  r.q = r.k = r.v = both({Element::e4m3, {Group::Kind::head}, ScaleType::f32, ScaleRule::amax});
  r.p = both(kConstantP);
  r.softmax.sum = SumOf::unrounded;
  r.accumulation.model = AccumulatorModel::hopper13;
  r.accumulation.promote_keys = 0;
  r.trains = false;
  return r;
}

/// No mean over tokens: the rotation instead. V per key where the mask cuts a tile, elsewhere along tokens.
Recipe sage3_exact() {
  Recipe r = sage3();
  r.smoothing = {};
  r.rotate = true;
  r.safety.fold_v_diagonal = true;
  return r;
}

}  // namespace

std::span<const NamedRecipe> named_recipes() {
  static const NamedRecipe table[] = {
      {"bf16", "every operand in BF16: the baseline", bf16()},
      {"mxfp8", "E4M3, one power-of-two scale per 32 tokens, dS in BF16 (FLAMIA 8-bit, dS ours)", mxfp8()},
      {"mxfp8-exact",
       "as mxfp8, scaled per token with sticky K and V: no later token reaches a query, in packed rows too (FLAMIA exact, ours)",
       mxfp8_exact()},
      {"nvfp4", "scores from NVFP4 Q and K, the other products as mxfp8 (FLAMIA mixed)", with_nvfp4_scores(mxfp8())},
      {"nvfp4-exact", "scores from NVFP4 Q and K, the other products as mxfp8-exact (ours)", with_nvfp4_scores(mxfp8_exact())},
      {"nvfp4-full", "NVFP4 everywhere, two copies of each of Q, K, V and dO (FLAMIA's ablation)", nvfp4_full()},
      {"sage3", "NVFP4, K and Q smoothed, two-level P; inference only (SageAttention3)", sage3()},
      {"sage3-exact",
       "as sage3, rotated instead of smoothed, V per key where the mask cuts a tile: no later token reaches a query; inference "
       "only (ours)",
       sage3_exact()},
      {"sagebwd", "INT8, K smoothed, dO times V in BF16, P and dS scaled per row (8-bit training of SageAttention3, rows ours)",
       sagebwd()},
      {"fp8-tensor", "E4M3, one power-of-two scale per tensor: leaks, for comparison (cuDNN FP8, FlashAttention-3 FP8)",
       fp8_tensor()},
      {"mxfp8-floor", "E4M3, 32 elements a scale along each contraction, OCP floor rule: leaks, for comparison (cuDNN MXFP8)",
       mxfp8_floor()},
      {"hwfp4-direct",
       "NVFP4 scores, MXFP4 V and P, P's codes cut from the bits of the scores; inference only, for comparison (HW-FP4 "
       "FlashAttention-4)",
       hwfp4_direct()},
      {"fp8-head", "E4M3, one FP32 scale per head, no promotion; leaks, inference only, for comparison (FlashAttention-3 FP8)",
       fp8_head()},
  };
  return table;
}

const NamedRecipe* find_named(std::string_view name) {
  for (const NamedRecipe& named : named_recipes())
    if (name == named.name) return &named;
  return nullptr;
}

}  // namespace flamia::recipe

namespace flamia {

std::vector<std::string> recipe_names() {
  std::vector<std::string> names;
  for (const recipe::NamedRecipe& named : recipe::named_recipes()) names.emplace_back(named.name);
  return names;
}

std::string recipe_summary(std::string_view name) {
  const recipe::NamedRecipe* named = recipe::find_named(name);
  return named ? named->summary : "";
}

}  // namespace flamia
