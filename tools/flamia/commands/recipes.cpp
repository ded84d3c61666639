// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "command.hpp"
#include "kernels/cpu/forward.hpp"
#include "recipe/guarantee.hpp"
#include "table.hpp"

namespace flamia::cli {
namespace {

bool runs_on_cpu(const Recipe& recipe) {
  Problem problem;
  problem.tokens = 128;
  problem.query_heads = problem.key_heads = 1;
  problem.head_dim = 128;
  problem.scale = 0.088388f;
  return cpu::check(problem, recipe).ok();
}

Status run(const Session& session) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  Table table({{"recipe", ""}, {"trains", ""}, {"runs on", ""}, {"what it is", ""}});
  for (const std::string& name : recipe_names()) {
    Recipe recipe;
    if (Status s = Recipe::parse(name, &recipe); !s.ok()) return s;
    const bool cpu = runs_on_cpu(recipe);
    table.add({name, std::string(recipe.trains ? "yes" : "no"), std::string(cpu ? "cpu" : "-"), recipe_summary(name)});
    all.push_back({{"name", name},
                   {"summary", recipe_summary(name)},
                   {"trains", recipe.trains},
                   {"runs_on", cpu ? nlohmann::ordered_json{"cpu"} : nlohmann::ordered_json::array()},
                   {"guarantee", recipe::guarantee(recipe).sentence(recipe.trains)},
                   {"hash", fmt::format("{:016x}", recipe.hash())},
                   {"recipe", nlohmann::ordered_json::parse(recipe.to_json())}});
  }
  return print(session.json ? all.dump(1) + "\n" : table.text());
}

}  // namespace

void add_recipes(CLI::App& app, Session* session) {
  CLI::App* command = app.add_subcommand("recipes", "the named recipes");
  add_report_flags(command, session);
  command->footer(
      "A recipe can be varied: \"mxfp8 ds=32x32\". `flamia explain --recipe R` says what it means. --json gives every field, the "
      "guarantee\n"
      "and the hash.\n\n"
      "Examples:\n"
      "  flamia recipes\n"
      "  flamia recipes --json");
  command->callback([session] { session->action = [session] { return run(*session); }; });
}

}  // namespace flamia::cli
