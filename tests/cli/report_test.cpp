// SPDX-License-Identifier: Apache-2.0
// accuracy, leak, recipes, explain, demo: what they say, with controls that must say the opposite.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "files.hpp"
#include "program.hpp"

namespace flamia::test {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

json run_json(std::vector<std::string> arguments, int code = 0) {
  arguments.emplace_back("--json");
  const Outcome outcome = run(arguments);
  EXPECT_EQ(outcome.code, code) << outcome.err;
  return outcome.code == code ? json::parse(outcome.out) : json();
}

/// Rows of a report whose `key` is `value`.
std::vector<json> where(const json& rows, const std::string& key, const std::string& value) {
  std::vector<json> found;
  for (const json& row : rows)
    if (row[key] == value) found.push_back(row);
  return found;
}

class Report : public testing::Test {
 protected:
  void SetUp() override {
    Sample sample;
    sample.tokens = 330, sample.heads = 2, sample.key_heads = 2, sample.dim = 64;
    sample.cu_seqlens = {0, 200, 201, 330};
    sample.write(folder / "in");
  }
  Folder folder;
};

TEST_F(Report, Accuracy) {
  const json rows =
      run_json({"accuracy", folder / "in", "--recipes", "bf16,mxfp8,mxfp8-exact,mxfp8 ds=e4m3", "--csv", folder / "csv"});
  ASSERT_EQ(rows.size(), 12u);  // two heads and "all", four recipes
  for (const char* recipe : {"mxfp8", "mxfp8-exact"}) {
    const json all = where(where(rows, "recipe", recipe), "head", "all").at(0);
    for (const char* output : {"o", "dq", "dk", "dv"}) {
      const double cosine = all[std::string(output) + "_cosine"];
      EXPECT_GT(cosine, 0.996) << recipe << " " << output;  // 8 bits: .998, with room for few and short rows
      EXPECT_LT(cosine, 0.9999) << recipe << " " << output;
    }
    EXPECT_LE(all["dq_worst"].get<double>(), 1.0);
    EXPECT_LT(all["ds_zero_q"].get<double>(), 0.005);
  }
  const std::vector<json> heads = where(rows, "recipe", "mxfp8 ds=e4m3");  // the heads by themselves make up the whole
  for (const char* share : {"p_zero", "ds_zero_q", "ds_zero_k"})
    EXPECT_NEAR((heads[0][share].get<double>() + heads[1][share].get<double>()) / 2, heads[2][share].get<double>(),
                1e-3 * heads[2][share].get<double>() + 1e-12)
        << share;
  EXPECT_NE(heads[0]["dq_cosine"], heads[1]["dq_cosine"]);  // they are not one head twice
  EXPECT_TRUE(run_json({"accuracy", folder / "in", "--recipes", "fp8-tensor"}).at(0)["p_zero"].is_null());
  const json bf16 = where(where(rows, "recipe", "bf16"), "head", "all").at(0);
  EXPECT_GT(bf16["dq_cosine"].get<double>(), 0.9999);
  EXPECT_EQ(bf16["ds_zero_q"].get<double>(), 0.0);
  const std::string csv = contents(folder / "csv");
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 13);
}

TEST_F(Report, AccuracyWithoutGradient) {
  Sample sample;
  sample.with_gradient = false;
  sample.write(folder / "in");
  const json rows = run_json({"accuracy", folder / "in", "--recipes", "mxfp8"});
  EXPECT_GT(rows.at(0)["o_cosine"].get<double>(), 0.99);
  EXPECT_TRUE(rows.at(0)["dq_cosine"].is_null());
}

/// One recipe that cannot be measured does not cost the others.
TEST_F(Report, AccuracySaysWhichRecipeWasRefused) {
  const Outcome mixed = run({"accuracy", folder / "in", "--window", "20,0", "--recipes", "mxfp8,sage3,bf16"});
  EXPECT_EQ(mixed.code, 3);
  EXPECT_THAT(mixed.out, HasSubstr("mxfp8"));
  EXPECT_THAT(mixed.out, HasSubstr("bf16"));
  EXPECT_THAT(mixed.err, HasSubstr("sage3"));
  const Outcome none = run({"accuracy", folder / "in", "--window", "20,0", "--recipes", "sage3"});
  EXPECT_EQ(none.code, 3);
  EXPECT_EQ(none.out, "");
}

TEST_F(Report, Leak) {
  const json rows =
      run_json({"leak", folder / "in", "--recipes", "mxfp8-exact,mxfp8,fp8-tensor,mxfp8-floor", "--csv", folder / "csv"});
  const auto most = [&](const std::string& recipe, const std::string& figure, const std::string& output) {
    double greatest = -1;
    for (const json& row : where(where(rows, "recipe", recipe), "figure", figure))
      greatest = std::max(greatest, row[output].get<double>());
    return greatest;
  };
  for (const char* output : {"o", "dq"}) {
    EXPECT_EQ(most("mxfp8-exact", "earlier", output), 0) << output;
    EXPECT_EQ(most("mxfp8-exact", "earlier", std::string(output) + "_elements"), 0) << output;
    EXPECT_EQ(most("mxfp8", "earlier_blocks", std::string(output) + "_elements"), 0) << output;
    EXPECT_GT(most("mxfp8", "earlier", output), 1e-3) << output;  // inside the block it leaks: the control of the line above
    EXPECT_GT(most("fp8-tensor", "earlier", output), 1e-2) << output;
    EXPECT_GT(most("fp8-tensor", "earlier_blocks", output), 1e-2) << output;
    EXPECT_GT(most("mxfp8-floor", "earlier", output), 1e-4) << output;
  }
  for (const char* output : {"dk", "dv"}) {
    EXPECT_EQ(most("mxfp8-exact", "look_back", std::string(output) + "_elements"), 0) << output;
    EXPECT_EQ(most("mxfp8", "look_back_blocks", std::string(output) + "_elements"), 0) << output;
    EXPECT_GT(most("fp8-tensor", "look_back", output), 1e-3) << output;
  }
  for (const char* output : {"o", "dq", "dk", "dv"}) {
    for (const char* recipe : {"mxfp8-exact", "mxfp8", "mxfp8-floor"})
      EXPECT_EQ(most(recipe, "other_documents", std::string(output) + "_elements"), 0) << recipe << " " << output;
    EXPECT_GT(most("fp8-tensor", "other_documents", output), 1e-2) << output;
  }
  EXPECT_DOUBLE_EQ(most("mxfp8-exact", "other_documents", "dq_cosine"), 1.0);
  EXPECT_LT(most("fp8-tensor", "other_documents", "dq_cosine"), 0.999);
  EXPECT_THAT(contents(folder / "csv"), HasSubstr("recipe,figure,factor,cut,o,dq,dk,dv"));
}

/// A cut on a multiple of 16 tokens would see nothing of a scale that 16 share.
TEST_F(Report, LeakWithinGroupsOf16) {
  const json rows = run_json({"leak", folder / "in", "--factors", "10000", "--recipes",
                              "nvfp4-full,sage3-exact fold-v=off,sage3 smooth-q=off smooth-k=off,sage3-exact"});
  for (const json& row : where(rows, "figure", "earlier")) {
    if (row["recipe"] == "sage3-exact") {
      EXPECT_EQ(row["o"], 0.0) << row;
    } else if (row["cut"] == "1/3") {
      EXPECT_GT(row["o"], 1e-3) << row;
    }
  }
  EXPECT_EQ(where(rows, "figure", "earlier").size(), 8u);
}

/// *_blocks is what the recipe promises: blocks of its own size, and behind a window to the right the rows that see them.
TEST_F(Report, LeakBlocksAreThoseOfThePromise) {
  for (const char* mask : {"--causal", "--window=-1,18"}) {
    std::vector<std::string> arguments{"leak",  folder / "in", "--factors",
                                       "10000", "--recipes",   "mxfp8,nvfp4,nvfp4-full,sagebwd smooth-k=off,fp8-tensor"};
    if (mask != std::string("--causal")) arguments.insert(arguments.end(), {"--full", mask});
    const json rows = run_json(arguments);
    std::size_t compared = 0;
    for (const char* figure : {"earlier_blocks", "look_back_blocks"})
      for (const json& row : where(rows, "figure", figure))
        for (const char* output : {"o", "dq", "dk", "dv"}) {
          if (row["recipe"] == "fp8-tensor" || row[output].is_null()) continue;
          EXPECT_EQ(row[output], 0.0) << mask << row;
          ++compared;
        }
    EXPECT_GE(compared, 16u) << mask;
    double least = 1;
    for (const json& row : where(rows, "recipe", "fp8-tensor"))
      if (row["figure"] == "earlier_blocks") least = std::min(least, row["o"].get<double>());
    EXPECT_GT(least, 1e-3) << mask;  // that there is something to see
  }
}

/// V whose E4M3 scales are 0 until a later token raises them: nothing is relative to an output of zeros.
TEST_F(Report, LeakOfAnOutputOfZeros) {
  Sample sample;
  sample.tokens = 96, sample.cu_seqlens = {0, 96}, sample.v_factor = 0x1p-12f;
  sample.write(folder / "small");
  const Outcome outcome =
      run({"leak", folder / "small", "--factors", "16", "--recipes", "sage3 v1=e2m1/32x1/e4m3/amax p1=e2m1/1x32/e4m3/two_level"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr(" inf "));
  EXPECT_EQ(outcome.out.find("e+2"), std::string::npos) << outcome.out;
}

TEST_F(Report, LeakFigures) {
  const auto figures = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments{"leak", folder / "in", "--recipes", "bf16", "--factors", "16"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    std::set<std::string> names;
    for (const json& row : run_json(arguments)) names.insert(row["figure"]);
    return names;
  };
  using Names = std::set<std::string>;
  const Names causal{"earlier", "earlier_blocks", "look_back", "look_back_blocks", "other_documents"};
  EXPECT_EQ(figures({}), causal);
  EXPECT_EQ(figures({"--full"}), Names{"other_documents"});  // nothing is hidden but other documents
  Names window = causal;
  window.insert("behind_window");
  EXPECT_EQ(figures({"--window", "20,0"}), window);
}

TEST_F(Report, Recipes) {
  const json all = run_json({"recipes"});
  std::set<std::string> names;
  for (const json& recipe : all) {
    names.insert(recipe["name"]);
    EXPECT_FALSE(recipe["summary"].get<std::string>().empty());
    EXPECT_EQ(recipe["hash"].get<std::string>().size(), 16u);
  }
  for (const char* name : {"bf16", "mxfp8", "mxfp8-exact", "nvfp4", "nvfp4-exact", "nvfp4-full", "sage3", "sage3-exact", "sagebwd",
                           "fp8-tensor", "mxfp8-floor", "hwfp4-direct", "fp8-head"}) {
    EXPECT_EQ(names.count(name), 1u) << name;
    EXPECT_EQ(where(all, "name", name).at(0)["runs_on"].at(0), "cpu") << name;
  }
  EXPECT_THAT(run({"recipes"}).out, HasSubstr("mxfp8-exact"));
}

/// The cells of a Markdown row.
std::vector<std::string> cells(const std::string& line) {
  std::vector<std::string> parts;
  std::istringstream in(line.substr(std::min<std::size_t>(line.size(), 2)));
  for (std::string part; std::getline(in, part, '|');) parts.push_back(part);
  return parts;
}

TEST_F(Report, TheDocumentationSaysWhatRecipesDo) {
  std::ifstream document(std::string(FLAMIA_DATA) + "/../docs/recipes.md");
  std::vector<std::vector<std::string>> rows;
  for (std::string line; std::getline(document, line);) rows.push_back(cells(line));
  for (const json& recipe : run_json({"recipes"})) {
    const std::string name = recipe["name"], guarantee = recipe["guarantee"];
    int described = 0;
    for (const auto& row : rows) {
      if (row.empty() || row[0].find("`" + name + "`") == std::string::npos) continue;
      if (row.size() == 7) {  // what it is, whether it trains, where it runs
        described += 1;
        EXPECT_EQ(row[5] == " no ", !recipe["trains"].get<bool>()) << name;
        EXPECT_EQ(row[6], recipe["runs_on"].size() == 2 ? " CPU, Hopper " : " CPU ") << name;
      } else if (row.size() == 4) {  // what a later token, an earlier query and another document reach
        described += 10;
        EXPECT_EQ(row[1].starts_with(" never"), guarantee.starts_with("exact")) << name << guarantee;
        EXPECT_EQ(row[1].starts_with(" yes"), guarantee.starts_with("leaks")) << name << guarantee;
        for (const std::string tokens : {"32", "128"}) {
          const bool within = guarantee.find("same " + tokens + " tokens, and on no others") != std::string::npos;
          EXPECT_EQ(row[1].find(tokens) != std::string::npos, within) << name << guarantee;
        }
        EXPECT_EQ(row[3] == " never ", guarantee.find("documents are isolated") != std::string::npos) << name;
      }
    }
    EXPECT_EQ(described, 11) << name << " has a row in each of the two tables";
  }
}

TEST_F(Report, Explain) {
  const Outcome exact = run({"explain", "--recipe", "mxfp8-exact"});
  EXPECT_EQ(exact.code, 0) << exact.err;
  EXPECT_THAT(exact.out, HasSubstr("exact"));
  const json tensor = run_json({"explain", "--recipe", "fp8-tensor", "--arch", "sm_90", "--head-dim", "64"});
  EXPECT_EQ(tensor["documents_isolated"], false);
  EXPECT_EQ(run_json({"explain", "--recipe", "mxfp8-exact"})["documents_isolated"], true);
  EXPECT_EQ(run_json({"explain", "--recipe", "mxfp8"})["copies"].size(), 4u);  // one copy of each operand serves both products
  EXPECT_EQ(run_json({"explain", "--recipe", "mxfp8-floor"})["copies"].size(), 8u);  // two of each
  EXPECT_EQ(run_json({"explain", "--recipe", "mxfp8"})["refusals"], json::array());
  EXPECT_GT(run_json({"explain", "--recipe", "mxfp8-floor", "--arch", "sm_90"}, 3)["refusals"].size(), 0u);
  EXPECT_THAT(run({"explain", "--recipe", "mxfp8-floor", "--arch", "sm_90"}).err, HasSubstr("mxfp8-floor"));
  EXPECT_THAT(run({"explain", "--recipe", "nvfp4", "--arch", "sm_90"}).out,
              HasSubstr("bound by products"));                     // scores take twice the time
  for (const char* recipe : {"mxfp8 d=scores", "mxfp8 dk=64x32"})  // a backward pass that is refused is a refusal
    EXPECT_EQ(run({"explain", "--recipe", recipe, "--arch", "sm_90"}).code, 3) << recipe;
  // What runs on Hopper is described down to its kernel, on any machine.
  const std::string block = run({"explain", "--recipe", "mxfp8", "--arch", "sm_90"}).out;
  const std::string token = run({"explain", "--recipe", "mxfp8-exact", "--arch", "sm_90"}).out;
  for (const char* word : {"queries x 128 keys", "registers:", "shared memory", "bound by exp2", "TFLOP/s"}) {
    EXPECT_THAT(block, HasSubstr(word));
    EXPECT_THAT(token, HasSubstr(word));
    EXPECT_THAT(exact.out, Not(HasSubstr(word)));
  }
  const auto kernel = [](const std::string& text) { return text.substr(text.find("registers:"), 160); };
  EXPECT_NE(kernel(block), kernel(token));                    // another instance, with its own shared memory
  EXPECT_EQ(run({"explain", "mxfp8-exact"}).out, exact.out);  // as one types it
  EXPECT_EQ(run({"explain", "--recipe", "mxfp8", "--arch", "sm_12"}).code, 2);
  EXPECT_EQ(run({"explain", "--recipe", "mxfp8", "--head-dim", "0"}).code, 2);
  EXPECT_NE(run({"explain", "--recipe", "nvfp4", "--arch", "sm_90"}).out,
            run({"explain", "--recipe", "nvfp4", "--arch", "sm_100"}).out);
}

TEST_F(Report, HelpHasExamples) {
  for (const char* command : {"attend", "quantize", "accuracy", "leak", "recipes", "explain", "demo", "tables"}) {
    const Outcome help = run({command, "--help"});
    EXPECT_EQ(help.code, 0);
    EXPECT_THAT(help.out, HasSubstr("Examples:\n  flamia " + std::string(command)));
  }
  EXPECT_THAT(run({"--help"}).out, HasSubstr("Exit codes"));
  EXPECT_THAT(run({"--version"}).out, HasSubstr("0.1.0"));
}

TEST_F(Report, Tables) {
  Sample early, late;
  early.tokens = late.tokens = 60;
  early.cu_seqlens = late.cu_seqlens = {0, 40, 60};
  early.dim = late.dim = 128;
  early.write(folder / "gpt-early.safetensors");
  late.write(folder / "gpt-late.safetensors");
  const json rows = run_json({"tables", "--data", folder / ".", "--out", folder / "tables", "--tokens", "64", "--heads", "1",
                              "--recipes", "mxfp8-exact,fp8-tensor,hwfp4-direct"});
  EXPECT_EQ(rows.size(), (6u + 2u) * 2u * 3u);  // inputs, masks, recipes
  std::set<std::string> inputs;
  for (const json& row : rows) inputs.insert(row["input"]);
  EXPECT_EQ(inputs, (std::set<std::string>{"normal", "sink-first", "sink-last", "outlier-channel", "key-bias", "small-v", "early",
                                           "late"}));
  for (const json& row : where(rows, "recipe", "mxfp8-exact")) {
    EXPECT_GT(row["o_cosine"].get<double>(), .9) << row;
    EXPECT_EQ(row["leak_o"].is_null(), row["mask"] != "causal");
    if (row["mask"] == "causal") {
      EXPECT_EQ(row["leak_o"].get<double>() + row["leak_dq"].get<double>(), 0.0) << row;
    }
  }
  double leak = 0;
  for (const json& row : where(rows, "recipe", "fp8-tensor"))
    if (row["mask"] == "causal") leak += row["leak_dq"].get<double>();
  EXPECT_GT(leak, 1e-2);
  for (const json& row : where(rows, "recipe", "hwfp4-direct")) {
    EXPECT_TRUE(row["dq_cosine"].is_null());
    EXPECT_GT(row["p_equal"].get<double>(), .3);
    if (row["input"] == "normal") {
      EXPECT_LT(row["p_equal"].get<double>(), .75);
    }
  }
  const std::string markdown = contents(folder / "tables/recipes.md");
  EXPECT_THAT(markdown, HasSubstr("flamia tables --tokens 64 --heads 1 --seed 1 --recipes"));
  EXPECT_THAT(markdown, HasSubstr("| input | mask | recipe |"));
  for (const char* name : {"tables.csv", "accuracy.csv", "leak.csv", "heatmap.csv"})
    EXPECT_GT(contents(folder / ("tables/" + std::string(name))).size(), 100u) << name;
  EXPECT_EQ(run({"tables", "--tokens", "3"}).code, 2);
  EXPECT_EQ(run({"tables", "--recipes", "nothing"}).code, 2);
}

TEST_F(Report, Demo) {
  Sample early, late;
  early.tokens = late.tokens = 140;
  early.dim = late.dim = 128;
  late.cu_seqlens = {0, 100, 140};
  early.write(folder / "gpt-early.safetensors");
  late.write(folder / "gpt-late.safetensors");
  const json rows = run_json({"demo", "--data", folder / ".", "--out", folder / "demo"});
  ASSERT_EQ(rows.size(), 8u);
  for (const json& row : where(rows, "recipe", "mxfp8-exact")) {
    for (const char* leak : {"leak_o", "leak_dq", "leak_blocks", "look_back", "documents"})
      EXPECT_EQ(row[leak].get<double>(), 0.0) << leak;
    EXPECT_GT(row["o_cosine"].get<double>(), 0.99);
    EXPECT_GT(row["seconds"].get<double>(), 0.0);
  }
  for (const json& row : where(rows, "recipe", "fp8-tensor")) EXPECT_GT(row["leak_dq"].get<double>(), 1e-3);
  for (const char* name : {"demo.csv", "accuracy.csv", "leak.csv", "heatmap.csv"})
    EXPECT_GT(contents(folder / ("demo/" + std::string(name))).size(), 100u) << name;

  // the heat map: mean P of a block times its pairs, summed over a row of blocks, is the number of its queries
  std::istringstream heat(contents(folder / "demo/heatmap.csv"));
  std::string line;
  std::getline(heat, line);
  ASSERT_EQ(line, "input,recipe,head,query_block,key_block,pairs,mean_error,max_error,mean_p");
  double mass = 0, exact_error = 0, bf16_error = 0;
  while (std::getline(heat, line)) {
    std::vector<std::string> cells;
    std::istringstream split(line);
    for (std::string cell; std::getline(split, cell, ',');) cells.push_back(cell);
    ASSERT_EQ(cells.size(), 9u);
    if (cells[0] != "late") continue;
    const double pairs = std::stod(cells[5]);
    if (cells[1] == "bf16") mass += pairs * std::stod(cells[8]), bf16_error += pairs * std::stod(cells[6]);
    if (cells[1] == "mxfp8-exact") exact_error += pairs * std::stod(cells[6]);
  }
  EXPECT_NEAR(mass, 140, 1e-6);
  EXPECT_GT(exact_error, 2 * bf16_error);
  EXPECT_LT(exact_error, 0.2 * mass);

  const Outcome missing = run({"demo", "--data", folder / "nowhere"});
  EXPECT_EQ(missing.code, 4);
  EXPECT_THAT(missing.err, HasSubstr("gpt-early.safetensors"));
}

}  // namespace
}  // namespace flamia::test
