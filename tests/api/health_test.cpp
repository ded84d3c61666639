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
