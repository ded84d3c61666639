// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include "command.hpp"
#include "io/output_file.hpp"
#include "leakage.hpp"
#include "progress.hpp"

namespace flamia::cli {
namespace {

struct LeakFlags {
  std::string in, recipes, csv, factors = "16,1024,10000";
  MaskFlags mask;
  CallOptions options;
};

Status run(LeakFlags& flags, const Session& session) {
  if (Status s = finish_mask(flags.mask, &flags.options); !s.ok()) return s;
  std::vector<Recipe> recipes;
  if (Status s = parse_recipes(flags.recipes, &recipes); !s.ok()) return s;
  std::vector<float> factors;
  if (Status s = parse_factors(flags.factors, &factors); !s.ok()) return s;
  if (!flags.csv.empty())
    if (Status s = check_writable("--csv", flags.csv, flags.in); !s.ok()) return s;
  Inputs inputs;
  if (Status s = load_inputs(flags.in, &inputs); !s.ok()) return s;
  CallOptions options = flags.options;
  options.backward = inputs.d_o.has_value();
  Progress progress("leak", leak_runs(inputs, options, factors.size()) * static_cast<int>(recipes.size()), session.progress);
  Table every = leak_table(), summary = leak_table();
  for (const Recipe& recipe : recipes) {
    CallOptions own = options;
    own.backward = options.backward && recipe.trains;
    std::vector<LeakRow> rows;
    const auto step = [&](const std::string& what) { progress.step(what); };
    if (Status s = measure_leak(inputs, recipe, own, factors, step, &rows); !s.ok()) return s;
    add_leak_rows({recipe.name()}, rows, &every);
    add_leak_rows({recipe.name()}, summarise(rows), &summary);
  }
  if (!flags.csv.empty())
    if (Status s = write_file(flags.csv, every.csv()); !s.ok()) return s;
  return print(session.json ? every.json() + "\n" : summary.text());
}

}  // namespace

void add_leak(Program& program) {
  Session* const session = program.session();
  auto flags = std::make_shared<LeakFlags>();
  Command command = program.command("leak", "what recipes let through between tokens that the mask keeps apart");
  command.file("IN", &flags->in, "safetensors file with q, k, v (and dout, cu_seqlens)");
  command.required_text("--recipes", &flags->recipes, "A,B,...", "recipes, separated by commas");
  command.text("--factors", &flags->factors, "F,...", "what hidden tokens are multiplied by (default 16,1024,10000)");
  command.text("--csv", &flags->csv, "F", "also write every factor and cut to this file");
  add_mask_flags(&command, &flags->mask);
  add_device_flags(&command, &flags->options);
  add_report_flags(&command, session);
  command.footer(
      R"(Inputs that an output must not depend on are multiplied by each factor, all documents at once, at two cuts per document (at a third,
at an odd position and so inside every block, and at two thirds, at the end of a block of 32; on a GPU in BF16 and with dQ summed in a fixed order). Printed: the greatest change of O, dQ, dK, dV relative to the greatest
output, 0 = every bit equal, inf where the output was 0 all over, - where there is nothing to compare, and how many elements changed. The table shows the greatest over factors and cuts; --csv and --json all.
  earlier, earlier_blocks      O and dQ of earlier tokens when later ones change; *_blocks: outside the changed token's block, of as many tokens as the
                               recipe's guarantee says (else 32), and of the rows that see it (a window to the right)
  look_back, look_back_blocks  dK and dV of tokens that the changed queries do not see
  behind_window                O and dQ of rows whose window begins after the changed tokens (only with --window)
  other_documents              everything of the other documents when one document is multiplied by the greatest factor

Examples:
  flamia leak in.safetensors --recipes mxfp8-exact,mxfp8,fp8-tensor
  flamia leak in.safetensors --recipes mxfp8-floor --factors 16 --csv leak.csv --json
)");
  command.action([flags, session] { return run(*flags, *session); });
}

}  // namespace flamia::cli
