// SPDX-License-Identifier: Apache-2.0
// Plan::create checks every argument and says which one is wrong, what it is, what is allowed and what to do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "call.hpp"

namespace flamia::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

Status create(const Problem& problem, const PlanOptions& options = {}, const char* recipe = "mxfp8") {
  Plan plan;
  Status s = Plan::create(problem, recipe_named(recipe), options, &plan);
  EXPECT_EQ(s.ok(), plan.impl != nullptr);
  return s;
}

/// `bend` makes one thing wrong.
template <class Bend>
void expect_invalid(Bend bend, const std::vector<std::string>& words, StatusCode code = StatusCode::invalid_argument) {
  Problem problem = small_problem();
  PlanOptions options;
  bend(problem, options);
  const Status s = create(problem, options);
  EXPECT_EQ(s.code(), code);
  for (const std::string& word : words) EXPECT_THAT(s.message(), HasSubstr(word));
}

TEST(Plan, Accepts) {
  ASSERT_TRUE(create(small_problem()).ok());
  Problem problem = small_problem();
  for (int dim = 16; dim <= 256; dim += 16) {
    problem.head_dim = dim;
    EXPECT_TRUE(create(problem).ok()) << dim;
  }
  problem.tokens = 0, problem.documents = 0;
  EXPECT_TRUE(create(problem).ok());
  problem.tokens = std::int64_t{1} << 33;  // more than 2^31 elements
  EXPECT_TRUE(create(problem).ok());
}

TEST(Plan, RefusesDimensions) {
  expect_invalid([](Problem& p, PlanOptions&) { p.tokens = -1; }, {"tokens = -1"});
  expect_invalid([](Problem& p, PlanOptions&) { p.documents = -1; }, {"documents = -1"});
  expect_invalid([](Problem& p, PlanOptions&) { p.query_heads = 0; }, {"query_heads = 0"});
  expect_invalid([](Problem& p, PlanOptions&) { p.key_heads = 0; }, {"key_heads = 0"});
  expect_invalid([](Problem& p, PlanOptions&) { p.query_heads = -4; }, {"query_heads = -4"});
  expect_invalid([](Problem& p, PlanOptions&) { p.query_heads = 3; }, {"query_heads = 3", "key_heads = 2"});
  expect_invalid([](Problem& p, PlanOptions&) { p.head_dim = 0; }, {"head_dim = 0"});
  expect_invalid([](Problem& p, PlanOptions&) { p.head_dim = 24; }, {"head_dim = 24", "multiples of 16"});
  expect_invalid([](Problem& p, PlanOptions&) { p.head_dim = 272; }, {"head_dim = 272", "256"});
}

TEST(Plan, RefusesMaskScaleAndOptions) {
  expect_invalid([](Problem& p, PlanOptions&) { p.mask.left = -2; }, {"mask.left = -2", "-1"});
  expect_invalid([](Problem& p, PlanOptions&) { p.mask.right = std::numeric_limits<std::int64_t>::min(); }, {"mask.right"});
  for (const float scale : {std::nanf(""), std::numeric_limits<float>::infinity(), -1.f, 1e-38f, 3e38f})
    expect_invalid([&](Problem& p, PlanOptions&) { p.scale = scale; }, {"scale = "});
  expect_invalid([](Problem&, PlanOptions& o) { o.threads = -1; }, {"threads = -1"});
  expect_invalid([](Problem&, PlanOptions& o) { o.threads = 5000; }, {"threads = 5000"});
}

TEST(Plan, RefusesSizesBeyond64Bits) {
  expect_invalid([](Problem& p, PlanOptions&) { p.tokens = std::numeric_limits<std::int64_t>::max(); },
                 {"tokens = 9223372036854775807"});
  expect_invalid([](Problem& p, PlanOptions&) { p.documents = std::numeric_limits<std::int64_t>::max(); }, {"documents = "});
  expect_invalid(
      [](Problem& p, PlanOptions&) {
        p.tokens = std::int64_t{1} << 40;
        p.query_heads = p.key_heads = std::numeric_limits<int>::max();
      },
      {"tokens * query_heads * head_dim", "2^58"});
}

TEST(Plan, RefusesRecipes) {
  PlanOptions inference;
  inference.training = false;
  const Status no_backward = create(small_problem(), {}, "sage3");
  EXPECT_EQ(no_backward.code(), StatusCode::unsupported);
  EXPECT_THAT(no_backward.message(), AllOf(HasSubstr("sage3"), HasSubstr("nvfp4")));
  EXPECT_EQ(create(small_problem(), {}, "mxfp8 ref=phase32 p1=e5m2/constant/none/none p2=e5m2/constant/none/none").code(),
            StatusCode::unsupported);
  Recipe broken = recipe_named("mxfp8");
  broken.q.first.group = {Group::Kind::blocks, -3, 0};
  Plan plan;
  EXPECT_EQ(Plan::create(small_problem(), broken, {}, &plan).code(), StatusCode::invalid_argument);
  EXPECT_EQ(Plan::create(small_problem(), recipe_named("mxfp8"), {}, nullptr).code(), StatusCode::invalid_argument);
}

#if !defined(FLAMIA_TESTS_WITH_CUDA)
TEST(Plan, SaysThatThereIsNoCudaPart) {
  expect_invalid([](Problem&, PlanOptions& o) { o.device = Device::cuda; }, {"cuda", "FLAMIA_CUDA"}, StatusCode::unsupported);
}
#endif

TEST(Plan, AnEmptyOneNeedsNothing) {
  const Plan plan;
  EXPECT_EQ(plan.saved_bytes() + plan.workspace_bytes(Pass::forward) + plan.workspace_bytes(Pass::backward), 0u);
  EXPECT_EQ(plan.problem().tokens, 0);
  EXPECT_EQ(plan.recipe(), Recipe());
  EXPECT_EQ(plan.options().threads, 0);
  EXPECT_THAT(plan.explain(), HasSubstr("empty plan"));
}

TEST(Plan, RefusesEnumeratorsThatDoNotExist) {
  Recipe recipe = recipe_named("mxfp8");
  recipe.k.second.group.kind = static_cast<Group::Kind>(9);
  recipe.softmax.exp2 = static_cast<Exp2>(200);
  Plan plan;
  const Status s = Plan::create(small_problem(), recipe, {}, &plan);
  EXPECT_EQ(s.code(), StatusCode::invalid_argument);
  EXPECT_THAT(s.message(), AllOf(HasSubstr("k.second.group.kind = 9"), HasSubstr("\"blocks\""), HasSubstr("softmax.exp2 = 200")));
  EXPECT_THAT(recipe.to_json(), HasSubstr("200"));
}

TEST(Plan, TellsWhatItIs) {
  Plan plan;
  PlanOptions inference;
  inference.training = false;
  ASSERT_TRUE(Plan::create(small_problem(), recipe_named("mxfp8"), inference, &plan).ok());
  EXPECT_EQ(plan.saved_bytes(), 0u);
  EXPECT_EQ(plan.workspace_bytes(Pass::backward), 0u);
  ASSERT_TRUE(Plan::create(small_problem(), recipe_named("mxfp8"), {}, &plan).ok());
  EXPECT_FLOAT_EQ(plan.problem().scale, 1.f / std::sqrt(32.f));
  EXPECT_EQ(plan.recipe(), recipe_named("mxfp8"));
  EXPECT_THAT(plan.explain(), HasSubstr("mxfp8"));
  // what backward needs is codes and a few numbers a row: less than q, k, v and o in 16 bits
  EXPECT_GT(plan.saved_bytes(), 140u * 8 * 32);
  Problem large = small_problem();
  large.tokens = 4096, large.head_dim = 128;
  ASSERT_TRUE(Plan::create(large, recipe_named("mxfp8-exact"), {}, &plan).ok());
  EXPECT_LT(plan.saved_bytes(), 2u * 4096 * 128 * (4 + 2 + 2 + 4));
}

}  // namespace
}  // namespace flamia::test
