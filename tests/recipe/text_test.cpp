// SPDX-License-Identifier: Apache-2.0
// Recipes as text and JSON: parse(name()) and from_json(to_json()) are the identity on every recipe; every mistake is named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>

#include "flamia/recipe.hpp"
#include "random_recipe.hpp"
#include "recipe/fields.hpp"
#include "recipe/names.hpp"
#include "recipe/text_fields.hpp"

namespace flamia {
namespace {

using testing::AllOf;
using testing::HasSubstr;

Recipe parsed(const std::string& text) {
  Recipe recipe;
  const Status status = Recipe::parse(text, &recipe);
  EXPECT_TRUE(status.ok()) << text << ": " << status.message();
  return recipe;
}
std::string parse_error(const std::string& text) {
  Recipe recipe = parsed("mxfp8 dq=f32");
  const Recipe before = recipe;
  const Status status = Recipe::parse(text, &recipe);
  EXPECT_EQ(status.code(), StatusCode::invalid_argument) << text;
  EXPECT_EQ(recipe, before) << "changed on error";
  return status.message();
}
std::string json_error(const std::string& json) {
  Recipe recipe = parsed("mxfp8 dq=f32");
  const Recipe before = recipe;
  const Status status = Recipe::from_json(json, &recipe);
  EXPECT_EQ(status.code(), StatusCode::invalid_argument) << json;
  EXPECT_EQ(recipe, before) << "changed on error";
  return status.message();
}

TEST(Names, AreThoseOfTheDocumentationInItsOrder) {
  EXPECT_EQ(recipe_names(),
            (std::vector<std::string>{"bf16", "mxfp8", "mxfp8-exact", "nvfp4", "nvfp4-exact", "nvfp4-full", "sage3", "sage3-exact",
                                      "sagebwd", "fp8-tensor", "mxfp8-floor", "hwfp4-direct", "fp8-head"}));
}

TEST(Names, ParsePrintAndAreAllDifferent) {
  std::set<std::uint64_t> hashes;
  for (const std::string& name : recipe_names()) {
    const Recipe recipe = parsed(name);
    EXPECT_EQ(recipe.name(), name);
    EXPECT_FALSE(recipe_summary(name).empty());
    hashes.insert(recipe.hash());
  }
  EXPECT_EQ(hashes.size(), recipe_names().size());
  EXPECT_TRUE(recipe_summary("mxfp9").empty());
}

TEST(Names, VariantsPrintAsVariants) {
  for (const char* text : {"mxfp8 ds=32x32",
                           "mxfp8 ds=e4m3",
                           "nvfp4-exact ds=e4m3",
                           "fp8-tensor ds=bf16",
                           "bf16 ds=e4m3",
                           "mxfp8-exact ds=row32",
                           "mxfp8 dk=64x32",
                           "mxfp8 ref=phase32",
                           "mxfp8 dq=f32",
                           "mxfp8 rotate=off",
                           "mxfp8 ref=phase32 l=unrounded",
                           "mxfp8 p-in-ds=codes",
                           "mxfp8 sticky=on",
                           "mxfp8 sticky=on headroom=1",
                           "mxfp8-exact headroom=0",
                           "mxfp8-exact k2=e4m3/1xall/ue8m0/ceil/sticky+4",
                           "nvfp4-exact sticky=off",
                           "mxfp8 rule=floor",
                           "mxfp8 exp2=poly3:2/16",
                           "mxfp8 acc=hopper13",
                           "mxfp8 promote=32:32",
                           "mxfp8 prescale=sequence",
                           "mxfp8 block=16 sticky=on",
                           "nvfp4 nvfp4=amax",
                           "mxfp8 exp2=mitchell trains=off",
                           "mxfp8 fold-v=on fold-k=on",
                           "mxfp8 ds=128x128"}) {
    const std::string name = parsed(text).name();
    const Recipe again = parsed(name);
    EXPECT_EQ(again, parsed(text)) << text << " printed as " << name;
    EXPECT_LE(name.size(), std::string(text).size() + 1) << text << " printed as " << name;  // as short as what was written
  }
  EXPECT_EQ(parsed("mxfp8 block=1 sticky=on headroom=2").name(), "mxfp8-exact");  // one set of numbers has one name
  EXPECT_EQ(parsed("  mxfp8\t ds=32x32  dq=f32 ").name(), "mxfp8 ds=32x32 dq=f32");
  EXPECT_EQ(parsed("mxfp8 block=1 sticky=on").name(), "mxfp8-exact headroom=0");
  EXPECT_EQ(parsed("mxfp8-exact sticky=on").name(), "mxfp8-exact");
  EXPECT_EQ(parsed("mxfp8-exact sticky=off").name(), "mxfp8 block=1");
  EXPECT_EQ(parsed("mxfp8 ref=tilesum").name(), "mxfp8");  // the default says nothing
  EXPECT_EQ(parsed("mxfp8 dk=key64").name(), "mxfp8 ds=e4m3");
  EXPECT_EQ(parsed("mxfp8 ds=bf16").name(), "mxfp8");
  EXPECT_EQ(parsed("bf16 ds=bf16").name(), "bf16");
  Recipe blocks = parsed("mxfp8 ds=bf16");  // blocks have an element with a scale: E4M3 again
  ASSERT_TRUE(Recipe::parse("mxfp8 dk=key64", &blocks).ok());
  EXPECT_EQ(blocks, parsed("mxfp8 ds=e4m3"));
}

TEST(Names, ParseOfNameIsTheIdentityOnRandomRecipes) {
  std::mt19937 bits(1);
  for (int i = 0; i < 3000; ++i) {
    const Recipe recipe = testing_support::random_recipe(bits, i % 4 == 0 ? 60 : static_cast<int>(bits() % 6));
    Recipe back;
    const Status status = Recipe::parse(recipe.name(), &back);
    ASSERT_TRUE(status.ok()) << recipe.name() << ": " << status.message();
    ASSERT_EQ(back, recipe) << recipe.name();
    ASSERT_EQ(back.name(), recipe.name());
  }
}

// Control: every single member changes the text and the hash; nothing is left out of either.
TEST(Names, EveryMemberShowsInNameAndHash) {
  const Recipe base = parsed("mxfp8");
  std::set<std::string> names{base.name()};
  std::set<std::uint64_t> hashes{base.hash()};
  int members = 0;
  testing_support::for_each_member(base, [&](const Recipe& changed) {
    ++members;
    names.insert(changed.name());
    hashes.insert(changed.hash());
  });
  EXPECT_EQ(names.size(), static_cast<std::size_t>(members) + 1);
  EXPECT_EQ(hashes.size(), static_cast<std::size_t>(members) + 1);
  EXPECT_EQ(members, 12 * 9 + 6 + 5 + 5 + 2 + 2 + 2);
}

TEST(Errors, NameTheFieldAndWhatIsNear) {
  EXPECT_THAT(parse_error("mxpf8"), AllOf(HasSubstr("\"mxpf8\" is unknown"), HasSubstr("nearest: \"mxfp8\"")));
  EXPECT_THAT(parse_error("MXFP8"), HasSubstr("nearest: \"mxfp8\""));
  EXPECT_THAT(parse_error("mxfp8 foo=bar"), testing::Not(HasSubstr("do1\" or")));
  for (const char* scale : {"xinf", "xnan", "x-inf"})  // JSON has none of them
    EXPECT_THAT(parse_error(std::string("sage3 ds1=e4m3/tensor/ue8m0/ceil/") + scale), HasSubstr("ds1 is"));
  EXPECT_THAT(parse_error("sage"), HasSubstr("\"sage3\", \"sage3-exact\" or \"sagebwd\""));
  EXPECT_THAT(parse_error("nothing-like-it"), HasSubstr("allowed: \"bf16\", \"mxfp8\""));
  EXPECT_THAT(parse_error(""), HasSubstr("recipe is empty"));
  EXPECT_THAT(parse_error("mxfp8 rotat=on"), AllOf(HasSubstr("field \"rotat\" is unknown"), HasSubstr("\"rotate\"")));
  EXPECT_THAT(parse_error("mxfp8 dq=f8"), AllOf(HasSubstr("dq is \"f8\""), HasSubstr("f16 or f32")));
  EXPECT_THAT(parse_error("mxfp8 ds=32by32"), HasSubstr("RxC"));
  EXPECT_THAT(parse_error("mxfp8 fast"), HasSubstr("\"fast\" is no field=value"));
  EXPECT_THAT(parse_error("mxfp8 dq=f32 dq=f16"), HasSubstr("given twice"));
  EXPECT_THAT(parse_error("mxfp8 q1=e4m3/32xall/ue8m0"), HasSubstr("e4m3/32xall/ue8m0/ceil"));
  for (const char* part : {"sticky+", "sticky2", "sticky+200", "+", "sticky+1+1"})
    EXPECT_THAT(parse_error(std::string("mxfp8 k1=e4m3/1xall/ue8m0/ceil/") + part), HasSubstr("k1 is"));
  EXPECT_THAT(parse_error("mxfp8-exact headroom=two"), HasSubstr("0 to 4"));
  EXPECT_THAT(parse_error("bf16 headroom=7"), HasSubstr("0 to 4"));  // where nothing can be sticky, too
  EXPECT_THAT(parse_error("mxfp8 q1=e4m3/99999999999xall/ue8m0/ceil"), HasSubstr("q1 is"));
  // nobody reads a message of a megabyte
  const std::string long_word(60000, 'm');
  for (const std::string& text : {long_word, "mxfp8 " + long_word, "mxfp8 " + long_word + "=1", "mxfp8 ds=" + long_word})
    EXPECT_LT(parse_error(text).size(), 600u);
  EXPECT_THAT(parse_error(std::string(100000, 'm')), HasSubstr("100000 bytes"));
  EXPECT_THAT(Recipe::parse("mxfp8", nullptr).message(), HasSubstr("recipe is null"));
  EXPECT_THAT(Recipe::from_json("{}", nullptr).message(), HasSubstr("recipe is null"));
}

TEST(Errors, NoTextOfAnyKindIsTakenForAnother) {
  std::mt19937 bits(2);
  const std::string alphabet = "abcdefgmxnvp0123456789=/:x- \t.@";
  for (int i = 0; i < 100000; ++i) {
    std::string text = i % 2 ? "mxfp8 " : "";
    if (i % 3 == 0) {  // a valid text with one character changed
      text = "mxfp8-exact ds=row32 q1=e4m3/7xall/ue8m0/ceil/sticky/x0.5 exp2=poly3:2/16 promote=32:64";
      text[bits() % text.size()] = alphabet[bits() % alphabet.size()];
    } else {
      for (unsigned n = bits() % 40; n > 0; --n) text += alphabet[bits() % alphabet.size()];
    }
    Recipe recipe;
    const Status status = Recipe::parse(text, &recipe);
    if (status.ok() && i % 100 == 0) {
      ASSERT_EQ(parsed(recipe.name()), recipe) << text;
    }
    ASSERT_EQ(status.ok(), status.message().empty());
  }
}

TEST(Nearest, EditDistance) {
  using recipe::edit_distance;
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("mxpf8", "mxfp8"), 1u);  // neighbours swapped
  EXPECT_EQ(edit_distance("same", "same"), 0u);
}

// ---- JSON ----

TEST(Json, FromJsonOfToJsonIsTheIdentityOnRandomRecipes) {
  std::mt19937 bits(3);
  for (int i = 0; i < 3000; ++i) {
    const Recipe recipe = testing_support::random_recipe(bits, 40);
    Recipe back;
    const Status status = Recipe::from_json(recipe.to_json(), &back);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(back, recipe);
    ASSERT_EQ(back.hash(), recipe.hash());
  }
}

TEST(Json, AMemberThatCameLaterIsOptional) {
  EXPECT_EQ(parsed("sage3").to_json().find("tile"), std::string::npos);
  Recipe back;
  ASSERT_TRUE(Recipe::from_json(parsed("sage3 tile=64x32").to_json(), &back).ok());
  EXPECT_EQ(back, parsed("sage3 tile=64x32"));
  EXPECT_NE(back.hash(), parsed("sage3").hash());
  EXPECT_EQ(parsed("mxfp8-exact headroom=0").to_json().find("headroom"), std::string::npos);
  EXPECT_EQ(parsed("mxfp8").to_json().find("gradient_d"), std::string::npos);
  EXPECT_EQ(parsed("nvfp4-full d=output").to_json().find("gradient_d"), std::string::npos);
  for (const char* text : {"mxfp8 d=scores", "nvfp4-full", "nvfp4-full d=output", "mxfp8-exact", "mxfp8-exact headroom=0"}) {
    ASSERT_TRUE(Recipe::from_json(parsed(text).to_json(), &back).ok());
    EXPECT_EQ(back, parsed(text));
    EXPECT_EQ(back.name(), text);
  }
}

TEST(Json, ABaseFillsInWhatIsMissing) {
  Recipe recipe;
  ASSERT_TRUE(
      Recipe::from_json(R"({"base": "mxfp8 ds=32x32", "rotate": false, "softmax": {"reference": "phase32"}})", &recipe).ok());
  EXPECT_EQ(recipe, parsed("mxfp8 ds=32x32 rotate=off ref=phase32"));
  EXPECT_THAT(json_error(R"({"base": "mxpf8"})"), AllOf(HasSubstr("\"base\""), HasSubstr("nearest: \"mxfp8\"")));
  EXPECT_THAT(json_error(R"({"base": 8})"), HasSubstr("\"base\" must be a recipe as text"));
}

TEST(Json, EveryMistakeNamesItsKey) {
  EXPECT_THAT(json_error(R"({"rotate": true})"), AllOf(HasSubstr("\"q\" is missing"), HasSubstr("base")));
  EXPECT_THAT(json_error(R"({"base": "mxfp8", "rotat": true})"), AllOf(HasSubstr("\"rotat\" is unknown"), HasSubstr("\"rotate\"")));
  EXPECT_THAT(json_error(R"({"base": "mxfp8", "q": {"frist": {}}})"),
              AllOf(HasSubstr("\"q.frist\" is unknown"), HasSubstr("\"first\"")));
  EXPECT_THAT(json_error(R"({"base": "mxfp8", "q": {"first": {"element": "e4m4"}}})"),
              AllOf(HasSubstr("\"q.first.element\" is \"e4m4\""), HasSubstr("nearest: \"e4m3\"")));
  EXPECT_THAT(json_error(R"({"base": "mxfp8", "rotate": 1})"), HasSubstr("\"rotate\" is 1 but must be true or false"));
  EXPECT_THAT(json_error(R"({"base": "mxfp8", "accumulation": {"promote_keys": 1.5}})"), HasSubstr("must be a 32-bit integer"));
  EXPECT_THAT(json_error(R"({"base": "mxfp8", "accumulation": {"promote_keys": 4294967296}})"),
              HasSubstr("must be a 32-bit integer"));
  EXPECT_THAT(json_error(R"({"base": "mxfp8", "accumulation": {"promote_keys": 18446744073709551615}})"),
              HasSubstr("must be a 32-bit integer"));
  EXPECT_THAT(json_error(R"({"base": "mxfp8", "k": {"first": {"headroom": 128}}})"), HasSubstr("must be an 8-bit integer"));
  EXPECT_THAT(json_error(R"({"base": "mxfp8", "q": {"first": {"tensor_scale": 1e300}}})"), HasSubstr("in the range of FP32"));
  EXPECT_THAT(json_error(R"({"base": "mxfp8", "q": {"first": {"tensor_scale": "1"}}})"), HasSubstr("in the range of FP32"));
  EXPECT_THAT(json_error(R"({"base": "mxfp8", "softmax": [1]})"), HasSubstr("\"softmax\" is an array but must be an object"));
  EXPECT_THAT(json_error(R"({"base": "mxfp8", "rotate": true, "rotate": false})"), HasSubstr("\"rotate\" is given twice"));
  EXPECT_THAT(json_error("[]"), HasSubstr("must be an object"));
  EXPECT_THAT(json_error("{"), HasSubstr("recipe JSON: "));
  EXPECT_THAT(json_error(""), HasSubstr("recipe JSON: "));
  EXPECT_THAT(json_error("{\"base\": \"mxfp8\", \"\xff\": 1}"), HasSubstr("recipe JSON: "));
  std::string deep = R"({"base": "mxfp8", "rotate": )";
  deep += std::string(30000, '[') + std::string(30000, ']') + "}";
  EXPECT_THAT(json_error(deep), HasSubstr("\"rotate\" is an array"));
  EXPECT_THAT(json_error(deep + std::string(100000, ' ')), HasSubstr("bytes"));
  const std::string word = '"' + std::string(60000, 'x') + '"';
  for (const std::string& text : {word, "{" + word, "{" + word + ":1}", "{" + word + ":1," + word + ":1}"})
    EXPECT_LT(json_error(text).size(), 600u);
}

TEST(Json, TheHashIsFnv1aOfTheJson) {
  // written out a second time: 64-bit FNV-1a
  const Recipe recipe = parsed("mxfp8-exact");
  std::uint64_t h = 14695981039346656037u;
  for (const char c : recipe.to_json()) h ^= static_cast<std::uint8_t>(c), h *= 1099511628211u;
  EXPECT_EQ(recipe.hash(), h);
  EXPECT_NE(recipe.hash(), parsed("mxfp8").hash());
}

}  // namespace
}  // namespace flamia
