// SPDX-License-Identifier: Apache-2.0
// The C API: the same bits as C++, versioned descriptors, messages by thread.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "call.hpp"
#include "flamia/flamia.h"

extern "C" int flamia_c99_check(void);  // c99.c

namespace flamia::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

struct Handles {
  explicit Handles(const char* text = "mxfp8-exact") {
    EXPECT_EQ(flamia_recipe_parse(text, &recipe), FLAMIA_OK) << flamia_status_message();
    problem.tokens = 140, problem.documents = 3, problem.query_heads = 4, problem.key_heads = 2, problem.head_dim = 32;
  }
  ~Handles() {
    flamia_plan_destroy(plan);
    flamia_recipe_destroy(recipe);
  }
  Handles(const Handles&) = delete;
  Handles& operator=(const Handles&) = delete;
  flamia_status create() { return flamia_plan_create(&problem, recipe, &options, &plan); }
  flamia_recipe* recipe = nullptr;
  flamia_problem problem = FLAMIA_PROBLEM_INIT;
  flamia_plan_options options = FLAMIA_PLAN_OPTIONS_INIT;
  flamia_plan* plan = nullptr;
};

flamia_const_tensor in(const std::vector<float>& data) { return {data.data(), FLAMIA_F32, 0, 0, 0}; }
flamia_tensor out(std::vector<float>& data) { return {data.data(), FLAMIA_F32, 0, 0, 0}; }

flamia_forward_args forward_args(Call& call) {
  flamia_forward_args args = FLAMIA_FORWARD_ARGS_INIT;
  args.q = in(call.q), args.k = in(call.k), args.v = in(call.v), args.o = out(call.o);
  args.cu_seqlens = call.offsets.data(), args.lse = call.lse.data();
  args.saved = call.saved->get(), args.saved_bytes = call.plan.saved_bytes();
  args.workspace = call.workspace->get(), args.workspace_bytes = call.plan.workspace_bytes(Pass::forward);
  return args;
}

flamia_backward_args backward_args(Call& call) {
  flamia_backward_args args = FLAMIA_BACKWARD_ARGS_INIT;
  args.o = in(call.o), args.d_o = in(call.d_o), args.cu_seqlens = call.offsets.data();
  args.d_q = out(call.d_q), args.d_k = out(call.d_k), args.d_v = out(call.d_v);
  args.saved = call.saved->get(), args.saved_bytes = call.plan.saved_bytes();
  args.workspace = call.workspace->get(), args.workspace_bytes = call.plan.workspace_bytes(Pass::backward);
  return args;
}

TEST(CApi, SameBitsAsCpp) {
  Call cpp, c;
  ASSERT_TRUE(cpp.run_forward().ok());
  ASSERT_TRUE(cpp.run_backward().ok());
  Handles handles;
  ASSERT_EQ(handles.create(), FLAMIA_OK) << flamia_status_message();
  EXPECT_EQ(flamia_plan_saved_bytes(handles.plan), cpp.plan.saved_bytes());
  EXPECT_EQ(flamia_plan_workspace_bytes(handles.plan, FLAMIA_FORWARD), cpp.plan.workspace_bytes(Pass::forward));
  EXPECT_EQ(flamia_plan_workspace_bytes(handles.plan, FLAMIA_BACKWARD), cpp.plan.workspace_bytes(Pass::backward));
  const flamia_forward_args forward = forward_args(c);
  const flamia_backward_args backward = backward_args(c);
  ASSERT_EQ(flamia_attention_forward(handles.plan, &forward), FLAMIA_OK) << flamia_status_message();
  ASSERT_EQ(flamia_attention_backward(handles.plan, &backward), FLAMIA_OK) << flamia_status_message();
  EXPECT_TRUE(same_bits(cpp.o, c.o) && same_bits(cpp.lse, c.lse) && same_bits(cpp.d_q, c.d_q) && same_bits(cpp.d_k, c.d_k) &&
              same_bits(cpp.d_v, c.d_v));
}

TEST(CApi, CompilesAsC99) { EXPECT_EQ(flamia_c99_check(), 0); }

TEST(CApi, DescriptorsOfOtherVersions) {
  Handles handles;
  handles.problem.struct_size = 0;
  EXPECT_EQ(handles.create(), FLAMIA_INVALID_ARGUMENT);
  EXPECT_THAT(flamia_status_message(), HasSubstr("problem.struct_size = 0"));
  handles.problem.struct_size = sizeof(flamia_problem) - 8;  // smaller than the first version ever was
  EXPECT_EQ(handles.create(), FLAMIA_INVALID_ARGUMENT);

  struct Newer {
    flamia_problem known;
    std::int64_t added;
  } newer{handles.problem, 0};
  newer.known.struct_size = sizeof(Newer);
  const auto* as_problem = &newer.known;
  EXPECT_EQ(flamia_plan_create(as_problem, handles.recipe, nullptr, &handles.plan), FLAMIA_OK) << flamia_status_message();
  flamia_plan_destroy(handles.plan);
  handles.plan = nullptr;
  newer.added = 5;
  EXPECT_EQ(flamia_plan_create(as_problem, handles.recipe, nullptr, &handles.plan), FLAMIA_UNSUPPORTED);
  EXPECT_THAT(flamia_status_message(), HasSubstr("does not know"));
  EXPECT_EQ(handles.plan, nullptr);
}

TEST(CApi, RefusesWithNothingWritten) {
  Handles handles;
  ASSERT_EQ(handles.create(), FLAMIA_OK);
  Call call;
  const auto refused = [&](auto bend, const char* words) {
    flamia_forward_args args = forward_args(call);
    bend(args);
    EXPECT_EQ(flamia_attention_forward(handles.plan, &args), FLAMIA_INVALID_ARGUMENT);
    EXPECT_THAT(flamia_status_message(), HasSubstr(words));
    EXPECT_TRUE(call.untouched());
  };
  refused([](flamia_forward_args& a) { a.q.dtype = 7; }, "q.dtype = 7");
  refused([](flamia_forward_args& a) { a.o.dtype = FLAMIA_F16; }, "o.dtype");
  refused([](flamia_forward_args& a) { a.saved_bytes -= 1; }, "saved_bytes");
  refused([](flamia_forward_args& a) { a.workspace_bytes = 0; }, "workspace_bytes = 0");
  refused([](flamia_forward_args& a) { a.lse = nullptr; }, "lse is null");
  refused([](flamia_forward_args& a) { a.struct_size = 3; }, "args.struct_size = 3");
  EXPECT_EQ(flamia_attention_forward(handles.plan, nullptr), FLAMIA_INVALID_ARGUMENT);
  EXPECT_EQ(flamia_attention_forward(nullptr, nullptr), FLAMIA_INVALID_ARGUMENT);
  EXPECT_EQ(flamia_attention_backward(handles.plan, nullptr), FLAMIA_INVALID_ARGUMENT);
}

TEST(CApi, ReservedFieldsAreZero) {
  Handles handles;
  handles.problem.reserved = 1;
  EXPECT_EQ(handles.create(), FLAMIA_UNSUPPORTED);
  EXPECT_THAT(flamia_status_message(), HasSubstr("problem.reserved = 1"));
  handles.problem.reserved = 0;
  ASSERT_EQ(handles.create(), FLAMIA_OK);
  Call call;
  flamia_forward_args forward = forward_args(call);
  EXPECT_EQ(flamia_attention_forward(handles.plan, &forward), FLAMIA_OK) << flamia_status_message();
  forward.o.reserved = -7;
  EXPECT_EQ(flamia_attention_forward(handles.plan, &forward), FLAMIA_UNSUPPORTED);
  EXPECT_THAT(flamia_status_message(), HasSubstr("o.reserved = -7"));
  flamia_backward_args backward = backward_args(call);
  backward.d_o.reserved = 2;
  EXPECT_EQ(flamia_attention_backward(handles.plan, &backward), FLAMIA_UNSUPPORTED);
  EXPECT_THAT(flamia_status_message(), HasSubstr("d_o.reserved = 2"));
}

TEST(CApi, Options) {
  Handles handles;
  handles.options.device = 5;
  EXPECT_EQ(handles.create(), FLAMIA_INVALID_ARGUMENT);
  EXPECT_THAT(flamia_status_message(), HasSubstr("options.device = 5"));
  handles.options.device = FLAMIA_CPU;
  handles.options.training = 2;
  EXPECT_EQ(handles.create(), FLAMIA_INVALID_ARGUMENT);
  handles.options.training = 0;
  ASSERT_EQ(handles.create(), FLAMIA_OK);
  EXPECT_EQ(flamia_plan_saved_bytes(handles.plan), 0u);
  handles.problem.causal = -1;
  flamia_plan* other = nullptr;
  EXPECT_EQ(flamia_plan_create(&handles.problem, handles.recipe, nullptr, &other), FLAMIA_INVALID_ARGUMENT);
  EXPECT_EQ(flamia_plan_create(&handles.problem, nullptr, nullptr, &other), FLAMIA_INVALID_ARGUMENT);
  EXPECT_EQ(flamia_plan_create(nullptr, handles.recipe, nullptr, &other), FLAMIA_INVALID_ARGUMENT);
  EXPECT_EQ(other, nullptr);
  EXPECT_EQ(flamia_plan_saved_bytes(nullptr), 0u);
  flamia_plan_destroy(nullptr);
  flamia_recipe_destroy(nullptr);
}

TEST(CApi, RecipesAndTexts) {
  flamia_recipe* recipe = nullptr;
  EXPECT_EQ(flamia_recipe_parse("mxfp9", &recipe), FLAMIA_INVALID_ARGUMENT);
  EXPECT_THAT(flamia_status_message(), HasSubstr("mxfp8"));
  EXPECT_EQ(flamia_recipe_parse(nullptr, &recipe), FLAMIA_INVALID_ARGUMENT);
  EXPECT_EQ(recipe, nullptr);
  Handles handles("mxfp8 ds=32x32");
  std::size_t length = 0;
  ASSERT_EQ(flamia_recipe_name(handles.recipe, nullptr, 0, &length), FLAMIA_OK);
  ASSERT_EQ(length, std::string("mxfp8 ds=32x32").size());
  std::vector<char> text(length + 1, '#');
  EXPECT_EQ(flamia_recipe_name(handles.recipe, text.data(), length, &length), FLAMIA_INVALID_ARGUMENT);
  EXPECT_EQ(text[0], '#');
  ASSERT_EQ(flamia_recipe_name(handles.recipe, text.data(), text.size(), nullptr), FLAMIA_OK);
  EXPECT_STREQ(text.data(), "mxfp8 ds=32x32");
  ASSERT_EQ(flamia_recipe_json(handles.recipe, nullptr, 0, &length), FLAMIA_OK);
  std::vector<char> json(length + 1);
  ASSERT_EQ(flamia_recipe_json(handles.recipe, json.data(), json.size(), nullptr), FLAMIA_OK);
  ASSERT_EQ(flamia_recipe_from_json(json.data(), &recipe), FLAMIA_OK) << flamia_status_message();
  EXPECT_EQ(flamia_recipe_hash(recipe), flamia_recipe_hash(handles.recipe));
  EXPECT_NE(flamia_recipe_hash(recipe), 0u);
  flamia_recipe_destroy(recipe);
  ASSERT_EQ(handles.create(), FLAMIA_OK) << flamia_status_message();
  ASSERT_EQ(flamia_plan_explain(handles.plan, nullptr, 0, &length), FLAMIA_OK);
  EXPECT_GT(length, 100u);
}

// A recipe that breaks the rules is refused where it is written, not by the first plan.
TEST(CApi, NoHandleHoldsABrokenRecipe) {
  flamia_recipe* recipe = nullptr;
  EXPECT_EQ(flamia_recipe_parse("mxfp8 tile=64x64", &recipe), FLAMIA_INVALID_ARGUMENT);
  EXPECT_THAT(flamia_status_message(), AllOf(HasSubstr("recipe \"mxfp8 tile=64x64\""), HasSubstr("use smooth-q=on")));
  EXPECT_EQ(flamia_recipe_parse("mxfp8 exp2=mitchell", &recipe), FLAMIA_INVALID_ARGUMENT);
  EXPECT_THAT(flamia_status_message(), HasSubstr("trains=off"));
  EXPECT_EQ(flamia_recipe_from_json(recipe_named("mxfp8 exp2=mitchell").to_json().c_str(), &recipe), FLAMIA_INVALID_ARGUMENT);
  EXPECT_THAT(flamia_status_message(), HasSubstr("trains=off"));
  EXPECT_EQ(recipe, nullptr);
}

TEST(CApi, MessagesBelongToTheThread) {
  flamia_recipe* recipe = nullptr;
  EXPECT_EQ(flamia_recipe_parse("first", &recipe), FLAMIA_INVALID_ARGUMENT);
  const std::string mine = flamia_status_message();
  std::thread([&] {
    EXPECT_STREQ(flamia_status_message(), "");
    EXPECT_EQ(flamia_recipe_parse("second", &recipe), FLAMIA_INVALID_ARGUMENT);
    EXPECT_THAT(flamia_status_message(), HasSubstr("second"));
  }).join();
  EXPECT_EQ(flamia_status_message(), mine);
  EXPECT_THAT(mine, HasSubstr("first"));
}

}  // namespace
}  // namespace flamia::test
