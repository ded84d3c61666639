// SPDX-License-Identifier: Apache-2.0
#include "plan/explain.hpp"

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "command.hpp"
#include "recipe/guarantee.hpp"
#include "recipe/rules.hpp"

namespace flamia::cli {
namespace {

struct Explain {
  std::string recipe, arch = "cpu";
  int head_dim = 128;
};

Status run(const Explain& flags, const Session& session) {
  Recipe recipe;
  if (Status s = parse_recipe(flags.recipe, &recipe); !s.ok()) return s;
  plan::Architecture architecture;
  if (Status s = plan::parse_architecture(flags.arch, &architecture); !s.ok()) return {s.code(), "--arch: " + s.message()};
  const std::string text = plan::explain(recipe, architecture, flags.head_dim);
  if (!session.json) return print(text);
  const recipe::Guarantee guarantee = recipe::guarantee(recipe);
  const nlohmann::ordered_json report{{"recipe", recipe.name()},
                                      {"arch", flags.arch},
                                      {"head_dim", flags.head_dim},
                                      {"trains", recipe.trains},
                                      {"guarantee", guarantee.sentence(recipe.trains)},
                                      {"documents_isolated", guarantee.documents_isolated},
                                      {"violations", recipe::violations(recipe)},
                                      {"fields", nlohmann::ordered_json::parse(recipe.to_json())},
                                      {"text", text}};
  return print(report.dump(1) + "\n");
}

}  // namespace

void add_explain(CLI::App& app, Session* session) {
  auto flags = std::make_shared<Explain>();
  CLI::App* command =
      app.add_subcommand("explain", "what a recipe quantises how, what it guarantees, what a machine refuses and why");
  command->add_option("--recipe", flags->recipe, "a name, or a name and what differs; see `flamia recipes`")
      ->required()
      ->option_text("R");
  command->add_option("--arch", flags->arch, "cpu (default), sm_90 or sm_100")->option_text("cpu|sm_90|sm_100");
  command->add_option("--head-dim", flags->head_dim, "channels of a head (default 128)")
      ->check(CLI::Range(1, 65536))
      ->option_text("N");
  add_report_flags(command, session);
  command->footer(
      "Examples:\n"
      "  flamia explain --recipe mxfp8-exact\n"
      "  flamia explain --recipe \"nvfp4\" --arch sm_100 --head-dim 64\n"
      "  flamia explain --recipe sage3 --json");
  command->callback([flags, session] { session->action = [flags, session] { return run(*flags, *session); }; });
}

}  // namespace flamia::cli
