// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "command.hpp"
#include "recipe/guarantee.hpp"
#include "recipe/lower.hpp"
#include "table.hpp"

namespace flamia::cli {
namespace {

constexpr int kHeadDim = 128;

/// Architectures on which this version runs the recipe, with or without its backward pass; names as in `flamia explain --arch`.
std::vector<std::string> runs_on(const Recipe& recipe, bool backward) {
  std::vector<std::string> names;
  for (const plan::ArchitectureFacts& facts : plan::architectures())
    if (recipe::can_run(recipe, facts.id, kHeadDim, backward).ok()) names.emplace_back(facts.name);
  return names;
}

/// "cpu, sm_90 (forward)"
std::string machines_text(const std::vector<std::string>& forward, const std::vector<std::string>& whole) {
  std::string text;
  for (const std::string& name : forward) {
    text += (text.empty() ? "" : ", ") + name;
    if (std::find(whole.begin(), whole.end(), name) == whole.end()) text += " (forward)";
  }
  return text;
}

Status run(const Session& session) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  Table table({{"recipe", ""}, {"trains", ""}, {"runs on", ""}, {"what it is", ""}});
  for (const std::string& name : recipe_names()) {
    Recipe recipe;
    if (Status s = Recipe::parse(name, &recipe); !s.ok()) return s;
    const std::vector<std::string> whole = runs_on(recipe, recipe.trains), forward = runs_on(recipe, false);
    table.add({name, std::string(recipe.trains ? "yes" : "no"), forward.empty() ? Cell() : Cell(machines_text(forward, whole)),
               recipe_summary(name)});
    all.push_back({{"name", name},
                   {"summary", recipe_summary(name)},
                   {"trains", recipe.trains},
                   {"runs_on", whole},
                   {"forward_runs_on", forward},
                   {"guarantee", recipe::guarantee(recipe).sentence(recipe.trains)},
                   {"hash", fmt::format("{:016x}", recipe.hash())},
                   {"recipe", nlohmann::ordered_json::parse(recipe.to_json())}});
  }
  return print(session.json ? all.dump(1) + "\n" : table.text());
}

}  // namespace

void add_recipes(Program& program) {
  Session* const session = program.session();
  Command command = program.command("recipes", "the named recipes");
  add_report_flags(&command, session);
  command.footer(
      R"(A recipe can be varied: "mxfp8 ds=32x32". `flamia explain --recipe R` says what it means. --json gives every field, the guarantee
and the hash.

Examples:
  flamia recipes
  flamia recipes --json
)");
  command.action([session] { return run(*session); });
}

}  // namespace flamia::cli
