// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "command.hpp"
#include "json.hpp"
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
  Json all = Json::array();
  Table table({{"recipe", ""}, {"trains", ""}, {"runs on", ""}, {"what it is", ""}});
  for (const std::string& name : recipe_names()) {
    Recipe recipe;
    if (Status s = Recipe::parse(name, &recipe); !s.ok()) return s;
    const std::vector<std::string> whole = runs_on(recipe, recipe.trains), forward = runs_on(recipe, false);
    table.add({name, std::string(recipe.trains ? "yes" : "no"), forward.empty() ? Cell() : Cell(machines_text(forward, whole)),
               recipe_summary(name)});
    Json entry = Json::object();
    entry.set("name", name);
    entry.set("summary", recipe_summary(name));
    entry.set("trains", recipe.trains);
    entry.set("runs_on", whole);
    entry.set("forward_runs_on", forward);
    entry.set("guarantee", recipe::guarantee(recipe).sentence(recipe.trains));
    entry.set("hash", fmt::format("{:016x}", recipe.hash()));
    entry.set("recipe", Json::parsed(recipe.to_json()));
    all.add(std::move(entry));
  }
  return print(session.json ? all.pretty() + "\n" : table.text());
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
