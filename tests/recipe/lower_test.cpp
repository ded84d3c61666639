// SPDX-License-Identifier: Apache-2.0
// Rules, lowering to machines, guarantees and the text that explains them.
#include "recipe/lower.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "plan/explain.hpp"
#include "random_recipe.hpp"
#include "recipe/guarantee.hpp"
#include "recipe/rules.hpp"

namespace flamia::recipe {
namespace {

using plan::Architecture;
using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

Recipe parsed(const std::string& text) {
  Recipe recipe;
  const Status status = Recipe::parse(text, &recipe);
  EXPECT_TRUE(status.ok()) << text << ": " << status.message();
  return recipe;
}

// ---- rules ----

TEST(Rules, NamedRecipesBreakNone) {
  for (const NamedRecipe& named : named_recipes()) EXPECT_THAT(violations(named.recipe), IsEmpty()) << named.name;
}

struct Broken {
  const char* recipe;
  const char* sentence;
};
class BrokenRecipes : public testing::TestWithParam<Broken> {};
TEST_P(BrokenRecipes, AreReported) {
  EXPECT_THAT(violations(parsed(GetParam().recipe)), Contains(HasSubstr(GetParam().sentence))) << GetParam().recipe;
}
INSTANTIATE_TEST_SUITE_P(
    Rules, BrokenRecipes,
    testing::Values(
        Broken{"mxfp8 q1=e4m3/32xall/ue8m0/ceil/sticky", "Q in S (e4m3/32xall/ue8m0/ceil/sticky): sticky exponents of Q or dO"},
        Broken{"mxfp8 do2=e4m3/1xall/ue8m0/ceil/sticky", "dO in dV"},
        Broken{"mxfp8 ds1=e4m3/1x128/ue8m0/ceil/sticky", "P and dS live in one tile"},
        Broken{"mxfp8-exact headroom=5", "0 to 4 binades"}, Broken{"mxfp8-exact headroom=-1", "0 to 4 binades"},
        Broken{"mxfp8 headroom=1", "give it with sticky=on"},
        Broken{"fp8-tensor ds1=e4m3/tensor/ue8m0/floor ds2=e4m3/64x1/ue8m0/ceil", "give it to ds1 and ds2, or to neither"},
        Broken{"mxfp8-exact ds=e4m3 ds2=e4m3/tensor/ue8m0/ceil", "give it to ds1 and ds2, or to neither"},
        Broken{"mxfp8 k1=e4m3/1xall/f32/amax/sticky+1 k2=e4m3/1xall/f32/amax/sticky+1", "power-of-two scales (ue8m0)"},
        Broken{"mxfp8 exp2=mitchell", "approximations for inference"}, Broken{"mxfp8 exp2=direct", "approximations for inference"},
        Broken{"mxfp8 poly=5:2", "degree 2, 3 or 4"}, Broken{"mxfp8 poly=3:17", "0 to 16 sixteenths"},
        Broken{"bf16 ref=tilesum", "ref=tilesum reads the sum of E4M3 codes"}, Broken{"mxfp8 l=unrounded", "needs l=codes"},
        Broken{"mxfp8 ds=e4m3 payloads=1", "both forms must be equal"},
        Broken{"mxfp8 dov-bf16=on", "dO (do1) and V (v2) stay BF16"},
        Broken{"mxfp8 v2=bf16 do1=bf16", "dO (do1) and V (v2) stay BF16"},
        Broken{"mxfp8 promote=100:64", "0 (never), 32, 64 or 128"}, Broken{"bf16 acc=hopper13", "models the FP8 accumulator"},
        Broken{"mxfp8 k1=bf16", "S multiplies Q in e4m3 with K in bf16"},
        Broken{"mxfp8 v1=int8/32xall/f32/amax", "O multiplies V in int8 with P in e4m3"},
        Broken{"mxfp8 q1=int8/32xall/ue8m0/ceil k1=int8/32xall/ue8m0/ceil", "INT8 takes scale f32"},
        Broken{"mxfp8 ds=bf16 payloads=2", "two payloads of it are a contradiction"},
        Broken{"mxfp8 ds=bf16 ds1=bf16/1x128/ue8m0/ceil", "dS in dQ (bf16/1x128/ue8m0/ceil): BF16 has no scale"},
        Broken{"mxfp8 ds=bf16 ds2=e4m3/64x1/ue8m0/ceil", "both forms must be equal"},
        Broken{"sagebwd ds=bf16",
               "dQ multiplies K in int8 with dS in bf16; no MMA mixes them, so give both the same width (BF16 dS"},
        Broken{"mxfp8 ds1=e4m3/constant/none/none", "a constant loses 99 %"}, Broken{"mxfp8 q1=e4m3/constant/none/none", "fits P"},
        Broken{"mxfp8 v1=e4m3/none/none/none", "needs a scale group"},
        Broken{"mxfp8 q1=e4m3/32xall/none/none", "needs a scale type"},
        Broken{"mxfp8 q1=e4m3/32xall/f32/ceil", "make powers of two"},
        Broken{"mxfp8 q1=bf16/tensor/f32/amax k1=bf16", "BF16 has no scale"},
        Broken{"mxfp8 q1=e4m3/tensor@3x4/f32/amax", "rows and columns belong to blocks"},
        Broken{"mxfp8 q1=e4m3/-3xall/ue8m0/ceil", "at least 0"},
        Broken{"mxfp8 q1=e4m3/32xall/ue8m0/ceil/x2", "goes with scales of type e4m3"},
        Broken{"nvfp4 q1=e2m1/1x16/e4m3/amax/x0", "positive and finite"}, Broken{"mxfp8 ds=48x48", "divide the 128 x 128 tile"},
        Broken{"mxfp8 p1=e4m3/head/f32/amax", "no scale per head"},
        Broken{"mxfp8 ds=e4m3 k2=e4m3/1x32/ue8m0/ceil", "K in dQ (e4m3/1x32/ue8m0/ceil): the scale changes along the contraction"},
        Broken{"mxfp8 q1=e4m3/1x8/ue8m0/ceil", "in steps that no MMA applies"},
        Broken{"nvfp4 nvfp4=amax v1=e2m1/1xall/e4m3/amax_or_smaller", "O multiplies"},
        Broken{"mxfp8 p1=e2m1/1x16/e4m3/two_level p2=e2m1/1x16/e4m3/two_level", "two-level P is for inference"},
        Broken{"sage3 tile=48x64", "32, 64 or 128 queries and keys"}, Broken{"sage3-exact tile=64x128", "Q is not smoothed"},
        Broken{"nvfp4 tile=128x64", "two-level P alone"}, Broken{"sage3 p1=e2m1/1x16/e4m3/amax tile=128x64", "two-level P alone"},
        Broken{"mxfp8 q1=e2m1/32xall/e4m3/amax_or_smaller k1=e2m1/32xall/e4m3/amax", "amax_or_smaller is for E2M1"}));

TEST(Rules, AllAreReportedAtOnce) {
  const std::vector<std::string> found =
      violations(parsed("mxfp8 q1=e4m3/32xall/ue8m0/ceil/sticky exp2=direct promote=7:64 ds=48x48"));
  EXPECT_EQ(found.size(), 6u) << testing::PrintToString(found);  // ds=48x48 and exp2=direct break two each
}

TEST(Rules, InferenceRecipesMayApproximate) { EXPECT_THAT(violations(parsed("mxfp8 exp2=mitchell trains=off")), IsEmpty()); }

TEST(Rules, RandomRecipesNeverCrashAnything) {
#if defined(__SANITIZE_ADDRESS__)
  constexpr int kCases = 600;  // eight times as slow
#else
  constexpr int kCases = 3000;
#endif
  std::mt19937 bits(1);
  int sound = 0;
  for (int i = 0; i < kCases; ++i) {
    const Recipe recipe = testing_support::random_recipe(bits, static_cast<int>(bits() % 8));
    sound += violations(recipe).empty();
    for (const plan::ArchitectureFacts& machine : plan::architectures())
      EXPECT_FALSE(plan::explain(recipe, machine.id, 128).empty());
  }
  EXPECT_GT(sound, kCases / 10);
  EXPECT_LT(sound, kCases * 9 / 10);
}

// ---- machines ----

std::vector<std::string> layouts(const Lowering& lowering, Operand operand) {
  std::vector<std::string> found;
  for (const CopyPlan& copy : lowering.copies)
    if (copy.operand == operand)
      for (const Layout layout : copy.layouts) found.emplace_back(name_of(layout));
  std::sort(found.begin(), found.end());
  return found;
}
ScaleUse scale_use(const Lowering& lowering, Product product, Operand operand) {
  for (const ProductPlan& plan : lowering.products)
    for (const OperandUse& use : plan.operands)
      if (plan.product == product && use.operand == operand) return use.scale;
  ADD_FAILURE() << "no such use";
  return ScaleUse::none;
}
using Strings = std::vector<std::string>;

TEST(Lower, HopperTakesFp8KMajorOnly) {
  const Lowering l = lower(parsed("mxfp8 ds=e4m3"), Architecture::sm_90, 128);
  EXPECT_THAT(l.refusals, IsEmpty());
  EXPECT_EQ(l.copies.size(), 4u);                                           // one quantisation of each operand ...
  EXPECT_EQ(layouts(l, Operand::v), (Strings{"rows", "transposed (pi)"}));  // ... in two layouts
  EXPECT_EQ(layouts(l, Operand::d_out), (Strings{"rows", "transposed (pi)"}));
  EXPECT_EQ(layouts(l, Operand::q), (Strings{"rows", "transposed (pi)"}));
  EXPECT_EQ(layouts(l, Operand::k), (Strings{"rows", "transposed (pi)"}));
  EXPECT_EQ(scale_use(l, Product::o, Operand::v), ScaleUse::fold);
  EXPECT_EQ(scale_use(l, Product::d_v, Operand::d_out), ScaleUse::fold);
  EXPECT_EQ(scale_use(l, Product::s, Operand::k), ScaleUse::outside);
  EXPECT_EQ(scale_use(l, Product::d_q, Operand::d_s), ScaleUse::outside);
  EXPECT_EQ(layouts(lower(parsed("bf16"), Architecture::sm_90, 128), Operand::v),
            (Strings{"as given"}));  // 16 bits come in either order
  EXPECT_EQ(layouts(lower(parsed("mxfp8 trains=off"), Architecture::sm_90, 128), Operand::q),
            (Strings{"rows"}));  // no backward pass, no copy
}

/// dS in BF16 makes dQ and dK BF16 products; K and Q come to them as values, in a copy that replaces the transposed codes.
TEST(Lower, DsInBf16TakesValuesOfKAndQ) {
  const auto mma = [](const Lowering& l, Product product) {
    for (const ProductPlan& plan : l.products)
      if (plan.product == product && plan.mma) return std::string(plan.mma->name);
    return std::string("refused");
  };
  for (const char* text : {"mxfp8 ds=bf16", "mxfp8-exact ds=bf16", "fp8-tensor ds=bf16"}) {
    const Lowering hopper = lower(parsed(text), Architecture::sm_90, 128);
    EXPECT_THAT(hopper.refusals, IsEmpty()) << text;
    EXPECT_EQ(hopper.copies.size(), 4u) << text;
    for (const Operand operand : {Operand::q, Operand::k})
      EXPECT_EQ(layouts(hopper, operand), (Strings{"rows", "rows of values in BF16"})) << text;
    EXPECT_EQ(layouts(hopper, Operand::d_out), (Strings{"rows", "transposed (pi)"})) << text;
    EXPECT_EQ(mma(hopper, Product::d_q), "wgmma bf16");
    EXPECT_EQ(mma(hopper, Product::d_k), "wgmma bf16");
    EXPECT_EQ(mma(hopper, Product::d_v), "wgmma e4m3");
    EXPECT_EQ(scale_use(hopper, Product::d_q, Operand::k), ScaleUse::none);
    const Lowering blackwell = lower(parsed(text), Architecture::sm_100, 128);
    EXPECT_THAT(blackwell.refusals, IsEmpty()) << text;
    EXPECT_EQ(mma(blackwell, Product::d_q), "tcgen05 kind::f16");
    EXPECT_EQ(layouts(blackwell, Operand::k), (Strings{"as given", "rows of values in BF16"})) << text;
    EXPECT_EQ(layouts(lower(parsed(text), Architecture::cpu, 128), Operand::k), (Strings{"as given"})) << text;
    EXPECT_TRUE(can_run(parsed(text), Architecture::cpu, 128, true).ok()) << text;
  }
  EXPECT_THAT(lower(parsed("nvfp4 ds=bf16"), Architecture::sm_100, 128).refusals, IsEmpty());
  const std::string text = plan::explain(parsed("mxfp8 ds=bf16"), Architecture::sm_90, 128);
  EXPECT_THAT(text, HasSubstr("dS  bf16, no scale; for dQ and dK, one payload, rounded to nearest even"));
  EXPECT_THAT(text, HasSubstr("layout rows and rows of values in BF16 (the same numbers)"));
}

TEST(Lower, HopperRefusesWhatItHasNoMmaFor) {
  EXPECT_THAT(lower(parsed("nvfp4"), Architecture::sm_90, 128).refusals, IsEmpty());  // NVFP4 values, exact in FP16
  EXPECT_THAT(lower(parsed("nvfp4 q1=e2m1/1x32/ue8m0/floor k1=e2m1/1x32/ue8m0/floor"), Architecture::sm_90, 128).refusals,
              Contains(HasSubstr("changes its scale every 32 channels")));
  EXPECT_THAT(lower(parsed("mxfp8 ds=32x32"), Architecture::sm_90, 128).refusals,
              Contains(AllOf(HasSubstr("dS in dQ"), HasSubstr("every 32 keys"), HasSubstr("Use two payloads"))));
  EXPECT_THAT(lower(parsed("mxfp8-exact ds=row32"), Architecture::sm_90, 128).refusals, Not(IsEmpty()));
  EXPECT_THAT(lower(parsed("mxfp8 dk=64x32"), Architecture::sm_90, 128).refusals, IsEmpty());
  EXPECT_THAT(lower(parsed("mxfp8-floor"), Architecture::sm_90, 128).refusals, Not(IsEmpty()));
  EXPECT_THAT(lower(parsed("fp8-tensor"), Architecture::sm_90, 128).refusals, IsEmpty());
  EXPECT_THAT(lower(parsed("mxfp8"), Architecture::sm_90, 96).refusals, Contains(HasSubstr("head dim 96 has no kernel")));
}

TEST(Lower, BlackwellAppliesScalesAndNeedsTwoCopiesOfFourBits) {
  const Lowering l = lower(parsed("nvfp4-full"), Architecture::sm_100, 128);
  EXPECT_THAT(l.refusals, IsEmpty());
  EXPECT_EQ(l.copies.size(), 8u);
  for (const Operand operand : {Operand::q, Operand::k, Operand::v, Operand::d_out})
    EXPECT_EQ(layouts(l, operand), (Strings{"rows", "transposed"})) << row_of(operand).name;
  EXPECT_EQ(scale_use(l, Product::s, Operand::q), ScaleUse::hardware);
  const Lowering eight = lower(parsed("mxfp8 ds=32x32"), Architecture::sm_100, 128);
  EXPECT_THAT(eight.refusals, IsEmpty());
  EXPECT_EQ(scale_use(eight, Product::d_q, Operand::d_s), ScaleUse::hardware);
  EXPECT_EQ(scale_use(eight, Product::o, Operand::v), ScaleUse::hardware);
  EXPECT_EQ(layouts(eight, Operand::v), (Strings{"as given"}));  // 8 bits come in either order
  EXPECT_THAT(lower(parsed("mxfp8-floor"), Architecture::sm_100, 128).refusals, IsEmpty());
  EXPECT_THAT(plan::explain(parsed("mxfp8"), Architecture::sm_100, 128), HasSubstr("never run"));
}

TEST(Lower, TheCpuExecutesEveryNamedRecipeAndVariants) {
  const auto check = [](const std::string& text) {
    const Recipe recipe = parsed(text);
    const Status status = can_run(recipe, Architecture::cpu, 128, recipe.trains);
    EXPECT_TRUE(status.ok()) << text << ": " << status.message();
  };
  for (const std::string& name : recipe_names()) check(name);
  for (const char* text : {"mxfp8 ds=32x32", "mxfp8-exact ds=row32", "nvfp4 nvfp4=amax", "mxfp8 dk=64x32 dq=f32",
                           "mxfp8 ref=phase32 l=unrounded", "mxfp8 rule=floor", "mxfp8 ref=phase32", "mxfp8 exp2=poly3:2/16",
                           "nvfp4-full ds=32x32", "nvfp4-full fold-v=on", "sage3 exp2=mitchell", "sage3 smooth-q=off",
                           "sage3 p1=e2m1/1x16/e4m3/amax/x0.00037202382", "sage3 v1=e2m1/32x1/ue8m0/ceil"})
    check(text);
  EXPECT_FALSE(can_run(parsed("mxfp8 p1=e5m2/constant/none/none p2=e5m2/constant/none/none"), Architecture::cpu, 128, true).ok());
}

TEST(Lower, HopperExecutesSomeRecipesAndVariants) {
  const auto status = [](const std::string& text, bool backward) {
    return can_run(parsed(text), Architecture::sm_90, 128, backward);
  };
  for (const char* text :
       {"mxfp8", "mxfp8-exact", "fp8-tensor", "mxfp8 sticky=on", "mxfp8 sticky=on headroom=3", "mxfp8-exact headroom=0",
        "mxfp8 dq=f32", "mxfp8 rotate=off", "mxfp8 ds=e4m3", "mxfp8-exact ds=e4m3", "fp8-tensor ds=bf16", "mxfp8-exact ref=phase32",
        "nvfp4", "nvfp4-exact", "nvfp4-exact dq=f32", "sagebwd", "sagebwd smooth-k=off"})
    EXPECT_TRUE(status(text, true).ok()) << text << ": " << status(text, true).message();
  const std::pair<const char*, const char*> forward_only[] = {{"mxfp8 dk=64x32", "dk=key64"},
                                                              {"mxfp8 ds=row128", "per key and 64 queries"},
                                                              {"mxfp8 p-in-ds=codes", "codes of P"},
                                                              {"mxfp8 promote=128:128", "every 64"},
                                                              {"mxfp8 prescale=sequence", "per sequence"},
                                                              {"nvfp4 ds=e4m3", "with dS in BF16"},
                                                              {"nvfp4-exact ds=e4m3 ref=phase32", "with dS in BF16"},
                                                              {"mxfp8-exact d=scores", "a second pass over the keys"},
                                                              {"sagebwd d=scores", "a second pass over the keys"}};
  for (const auto& [text, reason] : forward_only) {
    EXPECT_TRUE(status(text, false).ok()) << text << ": " << status(text, false).message();
    const Status refused = status(text, true);
    EXPECT_EQ(refused.code(), StatusCode::unsupported) << text;
    EXPECT_THAT(
        refused.message(),
        AllOf(HasSubstr(std::string("recipe \"") + text + "\" has no backward pass on sm_90"), HasSubstr(reason),
              HasSubstr("; the nearest that has one there: \"" + std::string(text).substr(0, std::string(text).find(' ')) + "\"")));
    EXPECT_TRUE(can_run(parsed(text), Architecture::cpu, 128, true).ok()) << text;
  }
  for (const char* text : {"bf16", "mxfp8-floor", "nvfp4-full", "nvfp4 rotate=off", "nvfp4 nvfp4=amax",
                           "nvfp4 q1=e4m3/32xall/ue8m0/ceil", "nvfp4 q2=e4m3/tensor/ue8m0/ceil v1=e2m1/1x16/e4m3/amax_or_smaller"})
    EXPECT_FALSE(status(text, false).ok()) << text;
  for (const char* text : {"sagebwd smooth-q=on", "sagebwd p2=int8/64x64/f32/amax", "sagebwd exp2=poly3:2/16", "sagebwd ds=128x64",
                           "sagebwd v2=bf16", "sagebwd do1=int8/128xall/f32/amax dov-bf16=off"})
    EXPECT_THAT(status(text, true).message(), HasSubstr("only \"sagebwd\" and \"sagebwd smooth-k=off\" have kernels")) << text;
  for (const auto& [text, nearest] : {std::pair{"sagebwd smooth-q=on", "sagebwd"}, {"mxfp8 smooth-q=on smooth-k=on", "mxfp8"}})
    EXPECT_THAT(status(text, true).message(), AllOf(HasSubstr("Q is smoothed (smooth-q=on)"),
                                                    HasSubstr(std::string("the nearest that runs there: \"") + nearest + "\"")));
}

TEST(Lower, MeansHaveNoPlaceInAWindow) {
  for (const Mask& mask : {Mask{true, 20, -1}, Mask{false, -1, 5}}) {
    EXPECT_THAT(can_mask(parsed("sagebwd"), mask).message(), HasSubstr("use \"sagebwd smooth-k=off\""));
    EXPECT_TRUE(can_mask(parsed("sagebwd smooth-k=off"), mask).ok());
    const std::string hint = can_mask(parsed("sage3 tile=64x64"), mask).message();  // names a recipe that runs
    const std::size_t begin = hint.find("use \"") + 5;
    EXPECT_TRUE(can_run(parsed(hint.substr(begin, hint.find('"', begin) - begin)), Architecture::cpu, 128, false).ok()) << hint;
  }
  for (const Mask& mask : {Mask{true, -1, -1}, Mask{false, -1, -1}, Mask{true, -1, 5}})
    EXPECT_TRUE(can_mask(parsed("sagebwd"), mask).ok());
}

TEST(Lower, RefusalsNameTheNearestThatRuns) {
  const auto message = [](const std::string& text, bool backward) {
    const Status status = can_run(parsed(text), Architecture::cpu, 128, backward);
    EXPECT_EQ(status.code(), StatusCode::unsupported) << text;
    return status.message();
  };
  EXPECT_THAT(message("nvfp4-full p1=e5m2/constant/none/none v1=e5m2/1xall/ue8m0/ceil", true),
              AllOf(HasSubstr("is not executed on cpu by this version (P or dS is E5M2)"),
                    HasSubstr("the nearest that runs there: \"nvfp4-full\"")));
  for (const auto& [inference, trains] : {std::pair{"sage3", "nvfp4"},
                                          {"sage3-exact", "nvfp4"},
                                          {"hwfp4-direct", "nvfp4"},
                                          {"fp8-head", "mxfp8"},
                                          {"sagebwd smooth-q=on trains=off", "sagebwd"},
                                          {"mxfp8-exact trains=off exp2=mitchell", "mxfp8-exact"}})
    EXPECT_THAT(message(inference, true), HasSubstr(std::string("has no backward pass; for training use \"") + trains + "\""));
  for (const auto& [here, there] :
       {std::pair{"sage3-exact", "sage3"}, {"nvfp4-full", "nvfp4"}, {"mxfp8-floor", "mxfp8"}, {"sagebwd rotate=on", "sagebwd"}})
    EXPECT_THAT(lower(parsed(here), Architecture::sm_90, 128).not_executed,
                AllOf(HasSubstr(std::string("the nearest that runs there: \"") + there + "\""),
                      HasSubstr(std::string("the CPU backend runs \"") + here)));
  EXPECT_TRUE(can_run(parsed("sage3"), Architecture::cpu, 128, false).ok());
  EXPECT_THAT(message("mxfp8 trains=off", true), HasSubstr("has no backward pass"));
  EXPECT_TRUE(can_run(parsed("mxfp8 trains=off"), Architecture::cpu, 128, false).ok());
  const Status broken = can_run(parsed("mxfp8 promote=7:64"), Architecture::cpu, 24, true);
  EXPECT_EQ(broken.code(), StatusCode::invalid_argument);
  EXPECT_THAT(broken.message(), AllOf(HasSubstr("promotion"), HasSubstr("head dim 24")));  // both at once
}

TEST(Lower, RefusalsAreShort) {
  for (const char* text : {"bf16", "nvfp4-full", "hwfp4-direct", "mxfp8-floor"}) {
    const std::string reasons = lower(parsed(text), Architecture::sm_90, 128).not_executed;
    EXPECT_LT(reasons.size(), 420u) << reasons;
    EXPECT_THAT(reasons, AllOf(HasSubstr("Q "), HasSubstr(" more)")));
  }
  EXPECT_THAT(lower(parsed("sage3 rotate=on"), Architecture::sm_90, 128).not_executed, HasSubstr("rotated and smoothed"));
}

TEST(Lower, HeadDims) {
  for (const int d : {16, 48, 64, 80, 128, 256}) EXPECT_TRUE(can_run(parsed("mxfp8"), Architecture::cpu, d, true).ok()) << d;
  for (const int d : {-16, 0, 24, 272}) EXPECT_FALSE(can_run(parsed("mxfp8"), Architecture::cpu, d, true).ok()) << d;
  EXPECT_THAT(lower(parsed("mxfp8"), Architecture::cpu, 80).notes, Contains(HasSubstr("rotation has no effect at head dim 80")));
  EXPECT_THAT(lower(parsed("mxfp8"), Architecture::cpu, 64).notes, IsEmpty());
}

TEST(Architectures, ParseAndSuggest) {
  Architecture architecture{};
  ASSERT_TRUE(plan::parse_architecture("sm_90", &architecture).ok());
  EXPECT_EQ(architecture, Architecture::sm_90);
  EXPECT_THAT(plan::parse_architecture("sm90", &architecture).message(), HasSubstr("nearest: \"sm_90\""));
  for (const plan::ArchitectureFacts& machine : plan::architectures()) EXPECT_EQ(plan::facts(machine.id).id, machine.id);
}

// ---- guarantees (numerics.md §2; measured by tests/kernels) ----

constexpr Reach kNone{};
constexpr Reach kBlock32{Reach::Kind::block, 32};

TEST(Guarantees, ExactRecipes) {
  for (const char* text :
       {"bf16", "mxfp8-exact", "nvfp4-exact", "sage3-exact", "mxfp8-exact ds=row32", "mxfp8-exact ds=bf16", "mxfp8 block=1"}) {
    const Guarantee g = guarantee(parsed(text));
    EXPECT_EQ(g.outputs, kNone) << text;
    EXPECT_EQ(g.d_q, kNone) << text;
    EXPECT_EQ(g.look_back, kNone) << text;
    EXPECT_TRUE(g.documents_isolated && g.reasons.empty()) << text;
    EXPECT_THAT(g.sentence(true), HasSubstr("exact: no bit of O or dQ")) << text;
  }
}

TEST(Guarantees, BlocksTensorsAndTraps) {
  const Guarantee mxfp8 = guarantee(parsed("mxfp8"));
  EXPECT_EQ(mxfp8.outputs, kBlock32);
  EXPECT_EQ(mxfp8.d_q, kBlock32);
  EXPECT_TRUE(mxfp8.documents_isolated);
  EXPECT_THAT(mxfp8.reasons, Contains(HasSubstr("V in O")));

  const Guarantee nvfp4 = guarantee(parsed("nvfp4"));  // the scores know nothing later, the gradients' K does
  EXPECT_EQ(nvfp4.d_q, kBlock32);

  EXPECT_EQ(guarantee(parsed("mxfp8-exact ds=32x32")).outputs, kNone);
  EXPECT_EQ(guarantee(parsed("mxfp8-exact ds=32x32")).d_q, kBlock32);
  EXPECT_EQ(guarantee(parsed("mxfp8-exact ds=32x32")).look_back, kBlock32);
  EXPECT_EQ(guarantee(parsed("mxfp8-exact ds=128x128")).d_q, (Reach{Reach::Kind::block, 128}));

  const Guarantee tensor = guarantee(parsed("fp8-tensor"));
  EXPECT_EQ(tensor.outputs.kind, Reach::Kind::tensor);
  EXPECT_FALSE(tensor.documents_isolated);
  EXPECT_THAT(tensor.sentence(true), HasSubstr("NOT isolated"));

  EXPECT_EQ(guarantee(parsed("mxfp8-floor")).outputs, kBlock32);
  EXPECT_EQ(guarantee(parsed("mxfp8-exact prescale=sequence")).d_q.kind, Reach::Kind::document);
  EXPECT_EQ(guarantee(parsed("mxfp8-exact prescale=sequence dq=f32")).d_q, kNone);
  EXPECT_EQ(guarantee(parsed("sage3")).outputs.kind, Reach::Kind::document);
  EXPECT_EQ(guarantee(parsed("sage3-exact fold-v=off")).outputs, (Reach{Reach::Kind::block, 16}));
  EXPECT_EQ(guarantee(parsed("mxfp8 fold-v=on fold-k=on")).outputs, kBlock32);  // K in S
  EXPECT_EQ(guarantee(parsed("mxfp8-exact v1=e4m3/32xall/ue8m0/ceil v2=e4m3/32xall/ue8m0/ceil fold-v=on")).outputs, kNone);
  EXPECT_EQ(guarantee(parsed("mxfp8-exact v1=e4m3/32xall/ue8m0/ceil v2=e4m3/32xall/ue8m0/ceil fold-v=on")).d_q,
            kBlock32);  // FP16's pre-scale
  EXPECT_EQ(guarantee(parsed("mxfp8-exact k2=e4m3/32xall/ue8m0/ceil fold-k=on")).d_q, kBlock32);
  EXPECT_EQ(guarantee(parsed("mxfp8-exact k2=e4m3/32xall/ue8m0/ceil fold-k=on dq=f32")).d_q, kNone);
  EXPECT_EQ(guarantee(parsed("nvfp4-full")).outputs, (Reach{Reach::Kind::block, 16}));
  EXPECT_EQ(guarantee(parsed("nvfp4-full")).d_q, (Reach{Reach::Kind::block, 128}));  // the first level of dO
  EXPECT_EQ(guarantee(parsed("sagebwd smooth-k=off")).look_back, (Reach{Reach::Kind::block, 128}));
  EXPECT_EQ(guarantee(parsed("bf16 smooth-q=on tile=64x128")).outputs, (Reach{Reach::Kind::block, 64}));
  EXPECT_EQ(guarantee(parsed("bf16 smooth-q=on tile=64x128")).look_back, (Reach{Reach::Kind::block, 64}));
  EXPECT_EQ(guarantee(parsed("sagebwd smooth-k=off smooth-q=on")).d_q, (Reach{Reach::Kind::block, 128}));
  EXPECT_EQ(guarantee(parsed("mxfp8 q1=e4m3/allxall/ue8m0/ceil")).outputs.kind, Reach::Kind::document);
}

TEST(Guarantees, OneFirstLevelOfATileIsSharedByItsRows) {
  constexpr Reach kTile{Reach::Kind::block, 128};
  const char* two_levels = "nvfp4-full do1=e2m1/1x16/e4m3/amax do2=e2m1/16x1/e4m3/amax";  // of dS alone
  EXPECT_EQ(guarantee(parsed(two_levels)).d_q, (Reach{Reach::Kind::block, 16}));          // dS by the row: a line of its own
  EXPECT_EQ(guarantee(parsed(std::string(two_levels) + " ds1=e2m1/16x16/e4m3/two_level")).d_q, kTile);
  EXPECT_EQ(guarantee(parsed("sage3-exact p1=e2m1/64xall/e4m3/two_level fold-k=on")).outputs, kTile);
  EXPECT_EQ(guarantee(parsed("sage3-exact v1=e2m1/1xall/e4m3/two_level")).outputs, kTile);  // per key, and yet of 128 tokens
  EXPECT_EQ(guarantee(parsed("nvfp4-exact k1=e2m1/allx16/e4m3/two_level")).outputs.kind, Reach::Kind::document);
}

/// NaN and infinity of a form that dK or dV takes reach dQ of its group's rows (measured in tests/kernels/exactness_test.cpp).
TEST(Guarantees, FlagsOfTheSecondFormsReachDq) {
  for (const char* text : {"mxfp8-exact q2=e4m3/32xall/ue8m0/ceil", "mxfp8-exact do2=e4m3/32xall/ue8m0/ceil"}) {
    EXPECT_EQ(guarantee(parsed(text)).outputs, kNone) << text;
    EXPECT_EQ(guarantee(parsed(text)).d_q, kBlock32) << text;
    EXPECT_EQ(guarantee(parsed(text)).look_back, kBlock32) << text;
  }
  EXPECT_EQ(guarantee(parsed("bf16 q2=e4m3/32x16/e4m3/amax fold-v=on")).d_q, kBlock32);
}

TEST(Guarantees, BlocksThatDoNotNestReachTheLeastThatHoldsBoth) {
  EXPECT_EQ(guarantee(parsed("mxfp8 k1=e4m3/48xall/ue8m0/ceil")).outputs, (Reach{Reach::Kind::block, 96}));
  EXPECT_EQ(farther({Reach::Kind::block, 16}, {Reach::Kind::block, 128}), (Reach{Reach::Kind::block, 128}));
  EXPECT_EQ(farther({Reach::Kind::block, 2147483647}, {Reach::Kind::block, 128}).kind, Reach::Kind::document);
}

TEST(Explain, SaysWhatIsQuantisedAndRefused) {
  const std::string text = plan::explain(parsed("mxfp8-exact"), Architecture::sm_90, 128);
  for (const char* part :
       {"recipe mxfp8-exact: ", "K   e4m3, one scale per token x all channels (ue8m0, ceil), sticky, begins 2 binades higher",
        "transposed (pi)", "wgmma e4m3", "V: scale folded", "exact: no bit of O or dQ",
        "dS  bf16, no scale; for dQ and dK, one payload"})
    EXPECT_THAT(text, HasSubstr(part));
  EXPECT_THAT(plan::explain(parsed("sage3"), Architecture::cpu, 128), HasSubstr("has no backward pass"));
  EXPECT_THAT(plan::explain(parsed("mxfp8"), Architecture::cpu, 128), HasSubstr("rotated back"));
  EXPECT_THAT(plan::explain(parsed("sage3-exact"), Architecture::cpu, 128), Not(HasSubstr("rotated back")));
}

}  // namespace
}  // namespace flamia::recipe
