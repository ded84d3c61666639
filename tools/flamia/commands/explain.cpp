// SPDX-License-Identifier: Apache-2.0
#include "plan/explain.hpp"

#include <memory>

#include "command.hpp"
#include "json.hpp"
#include "recipe/guarantee.hpp"
#include "recipe/lower.hpp"
#include "recipe/rules.hpp"
#include "recipe/text_fields.hpp"

namespace flamia::cli {
namespace {

struct Explain {
  std::string recipe, arch = "cpu";
  int head_dim = 128;
};

/// The quantised copies of Q, K, V and dO: form, the products that read it, the layouts it lies in.
Json copies_of(const recipe::Lowering& lowering) {
  Json copies = Json::array();
  for (const recipe::CopyPlan& copy : lowering.copies) {
    Json products = Json::array(), layouts = Json::array(), entry = Json::object();
    for (const recipe::Product product : copy.products) products.add(recipe::name_of(product));
    for (const recipe::Layout layout : copy.layouts) layouts.add(recipe::name_of(layout));
    entry.set("operand", recipe::row_of(copy.operand).name).set("form", recipe::form_text(copy.form));
    entry.set("products", std::move(products)).set("layouts", std::move(layouts));
    copies.add(std::move(entry));
  }
  return copies;
}

Status run(const Explain& flags, const Session& session) {
  Recipe recipe;
  if (Status s = parse_recipe(flags.recipe, &recipe); !s.ok()) return s;
  plan::Architecture architecture;
  if (Status s = plan::parse_architecture(flags.arch, &architecture); !s.ok()) return {s.code(), "--arch: " + s.message()};
  const std::string text = plan::explain(recipe, architecture, flags.head_dim);
  // What was asked for is said in full; that the machine refuses is the command's result.
  const Status can_run = recipe::can_run(recipe, architecture, flags.head_dim, recipe.trains);
  const auto said = [&](const std::string& what) {
    const Status s = print(what);
    return s.ok() ? can_run : s;
  };
  if (!session.json) return said(text);
  const recipe::Guarantee guarantee = recipe::guarantee(recipe);
  const recipe::Lowering lowering = recipe::lower(recipe, architecture, flags.head_dim);
  Json report = Json::object();
  report.set("recipe", recipe.name());
  report.set("arch", flags.arch);
  report.set("head_dim", flags.head_dim);
  report.set("trains", recipe.trains);
  report.set("guarantee", guarantee.sentence(recipe.trains));
  report.set("documents_isolated", guarantee.documents_isolated);
  report.set("violations", recipe::violations(recipe));
  report.set("copies", copies_of(lowering));
  report.set("refusals", lowering.refusals);
  report.set("no_backward", lowering.no_backward);
  report.set("not_executed", lowering.not_executed);
  report.set("fields", Json::parsed(recipe.to_json()));
  report.set("text", text);
  return said(report.pretty() + "\n");
}

}  // namespace

void add_explain(Program& program) {
  Session* const session = program.session();
  auto flags = std::make_shared<Explain>();
  Command command = program.command("explain", "what a recipe quantises how, what it guarantees, what a machine refuses and why");
  command.required_text("RECIPE,--recipe", &flags->recipe, "R", "a name, or a name and what differs; see `flamia recipes`");
  command.text("--arch", &flags->arch, "cpu|sm_90|sm_100", "cpu (default), sm_90 or sm_100");
  command.whole("--head-dim", &flags->head_dim, 1, 65536, "N", "channels of a head (default 128)");
  add_report_flags(&command, session);
  command.footer(
      R"(Exit code 3 where the machine refuses the recipe, forward or, if it trains, backward, or this version does not execute it there; the text says why.

Examples:
  flamia explain --recipe mxfp8-exact
  flamia explain --recipe "nvfp4" --arch sm_100 --head-dim 64
  flamia explain --recipe sage3 --json
)");
  command.action([flags, session] { return run(*flags, *session); });
}

}  // namespace flamia::cli
