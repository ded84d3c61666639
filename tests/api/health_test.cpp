// SPDX-License-Identifier: Apache-2.0
// The health figures by hand, and the same through the C API.
#include "flamia/health.hpp"

#include <gmock/gmock.h>

#include <limits>

#include "call.hpp"
#include "flamia/flamia.h"

namespace flamia::test {
namespace {

using testing::HasSubstr;

Health measured(Call& call, const char* recipe = "mxfp8", bool gradient = true) {
  Health health;
  const Status s =
      attention_health(call.problem, recipe_named(recipe), call.forward, gradient ? &call.backward.d_o : nullptr, 1, &health);
  EXPECT_TRUE(s.ok()) << s.message();
  return health;
}

TEST(Health, CountsElementsOfDocuments) {
  Call call;
  const Health h = measured(call);
  const std::int64_t tokens = call.offsets.back();
  EXPECT_EQ(h.q.elements, tokens * 4 * 32);
  EXPECT_EQ(h.v.elements, tokens * 2 * 32);
  EXPECT_EQ(h.d_out.elements, tokens * 4 * 32);
  EXPECT_EQ(h.pairs.pairs, 4 * (70 * 71 / 2 + 1 + 59 * 60 / 2));
  EXPECT_EQ(h.q.flagged + h.v.flagged + h.q.saturated, 0);
  EXPECT_GT(h.pairs.ds_mass, 0);
  EXPECT_TRUE(call.untouched());
}

TEST(Health, ZerosSaturationExponents) {
  Call call;
  std::fill(call.v.begin(), call.v.end(), 0x1p-20f);
  for (std::size_t i = 0; i < call.v.size(); i += 32) call.v[i] = 448.f;
  Health h = measured(call);
  EXPECT_EQ(h.v.zeros, h.v.elements / 32 * 31);
  EXPECT_EQ(h.v.least_exponent, 0);
  EXPECT_EQ(h.v.greatest_exponent, 0);
  std::fill(call.v.begin(), call.v.end(), 511.f);
  EXPECT_EQ(measured(call).v.saturated, 0);
  h = measured(call, "mxfp8-floor");
  EXPECT_EQ(h.v.saturated, h.v.elements);
  call.v[0] = std::numeric_limits<float>::quiet_NaN();
  h = measured(call, "mxfp8-exact");
  EXPECT_EQ(h.v.flagged, 32);
}

TEST(Health, WithoutGradient) {
  Call call;
  const Health h = measured(call, "mxfp8", false);
  EXPECT_EQ(h.d_out.elements, 0);
  EXPECT_EQ(h.pairs.ds_pairs, 0);
  EXPECT_GT(h.pairs.pairs, 0);
}

// An inference recipe has no backward pass, and needs none for the figures of its forward pass.
TEST(Health, EveryRecipeWithoutGradient) {
  Call call;
  for (const std::string& name : recipe_names()) {
    const Health h = measured(call, name.c_str(), false);
    EXPECT_EQ(h.v.elements, call.offsets.back() * 2 * 32) << name;
    EXPECT_EQ(h.pairs.pairs, 4 * (70 * 71 / 2 + 1 + 59 * 60 / 2)) << name;
  }
  Health h;
  const Status s = attention_health(call.problem, recipe_named("sage3"), call.forward, &call.backward.d_o, 1, &h);
  EXPECT_EQ(s.code(), StatusCode::unsupported);
  EXPECT_THAT(s.message(), HasSubstr("no backward pass"));
}

// What attention_forward refuses, with the same words; none of it may be read.
TEST(Health, RefusesWhatForwardRefuses) {
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max() / 2;
  flamia_recipe* recipe = nullptr;
  ASSERT_EQ(flamia_recipe_parse("mxfp8-exact", &recipe), FLAMIA_OK);
  flamia_problem problem = FLAMIA_PROBLEM_INIT;
  problem.tokens = 140, problem.documents = 3, problem.query_heads = 4, problem.key_heads = 2, problem.head_dim = 32;
  const auto refused = [&](auto bend, const char* words) {
    Call call;
    std::vector<TensorView> t{call.forward.q, call.forward.k, call.forward.v, call.backward.d_o};
    bend(t);
    ForwardTensors forward = call.forward;
    forward.q = t[0], forward.k = t[1], forward.v = t[2];
    Health health;
    const Status s = attention_health(call.problem, recipe_named("mxfp8-exact"), forward, &t[3], 1, &health);
    EXPECT_EQ(s.code(), StatusCode::invalid_argument) << words;
    EXPECT_THAT(s.message(), HasSubstr(words));

    std::vector<flamia_const_tensor> c;
    for (const TensorView& x : t) c.push_back({x.data, static_cast<flamia_dtype>(x.dtype), 0, x.token_stride, x.head_stride});
    flamia_health got{};
    got.struct_size = sizeof got;
    EXPECT_EQ(flamia_attention_health(&problem, recipe, &c[0], &c[1], &c[2], call.offsets.data(), &c[3], 1, &got),
              FLAMIA_INVALID_ARGUMENT);
    EXPECT_THAT(flamia_status_message(), HasSubstr(words));
  };
  using Tensors = std::vector<TensorView>;
  refused([](Tensors& t) { t[0].token_stride = -128; }, "q has token_stride -128");
  refused([](Tensors& t) { t[3].head_stride = -32; }, "d_out has token_stride 0 and head_stride -32");
  refused([](Tensors& t) { t[1].dtype = DType::bf16; }, "k.dtype differs from q.dtype");
  refused([](Tensors& t) { t[2].dtype = DType::f16; }, "v.dtype differs from q.dtype");
  refused([](Tensors& t) { t[0].dtype = static_cast<DType>(9); }, "q.dtype = 9");
  refused([](Tensors& t) { t[3].dtype = static_cast<DType>(9); }, "d_out.dtype = 9");
  refused([](Tensors& t) { t[2].data = static_cast<const char*>(t[2].data) + 1; }, "v is not aligned");
  refused([](Tensors& t) { t[1].token_stride = kHuge; }, "k with token_stride");
  refused([](Tensors& t) { t[3].head_stride = kHuge; }, "d_out with token_stride");
  refused([](Tensors& t) { t[3].data = nullptr; }, "d_out is null");
  flamia_recipe_destroy(recipe);
}

TEST(Health, CApi) {
  Call call;
  const Health want = measured(call, "mxfp8-exact");
  flamia_recipe* recipe = nullptr;
  ASSERT_EQ(flamia_recipe_parse("mxfp8-exact", &recipe), FLAMIA_OK);
  flamia_problem problem = FLAMIA_PROBLEM_INIT;
  problem.tokens = 140, problem.documents = 3, problem.query_heads = 4, problem.key_heads = 2, problem.head_dim = 32;
  const auto in = [](const std::vector<float>& data) { return flamia_const_tensor{data.data(), FLAMIA_F32, 0, 0, 0}; };
  const flamia_const_tensor q = in(call.q), k = in(call.k), v = in(call.v), d_out = in(call.d_o);
  flamia_health got{};
  EXPECT_EQ(flamia_attention_health(&problem, recipe, &q, &k, &v, call.offsets.data(), &d_out, 1, &got), FLAMIA_INVALID_ARGUMENT);
  EXPECT_THAT(flamia_status_message(), HasSubstr("struct_size"));
  got.struct_size = sizeof got;
  EXPECT_EQ(flamia_attention_health(&problem, recipe, &q, nullptr, &v, call.offsets.data(), &d_out, 1, &got),
            FLAMIA_INVALID_ARGUMENT);
  EXPECT_THAT(flamia_status_message(), HasSubstr("k is null"));
  ASSERT_EQ(flamia_attention_health(&problem, recipe, &q, &k, &v, call.offsets.data(), &d_out, 1, &got), FLAMIA_OK)
      << flamia_status_message();
  EXPECT_EQ(got.struct_size, sizeof got);
  EXPECT_EQ(got.d_out.elements, want.d_out.elements);
  EXPECT_EQ(got.v.greatest_exponent, want.v.greatest_exponent);
  EXPECT_EQ(got.ds_pairs, want.pairs.ds_pairs);
  EXPECT_EQ(got.ds_zero_k, want.pairs.ds_zero_k);
  EXPECT_EQ(got.ds_mass, want.pairs.ds_mass);
  EXPECT_EQ(got.ds_lost_k, want.pairs.ds_lost_k);
  flamia_recipe_destroy(recipe);
}

}  // namespace
}  // namespace flamia::test
