// SPDX-License-Identifier: Apache-2.0
#include "accuracy.hpp"

#include <memory>

#include "command.hpp"
#include "io/output_file.hpp"
#include "progress.hpp"

namespace flamia::cli {
namespace {

struct AccuracyFlags {
  std::string in, recipes, csv;
  MaskFlags mask;
  CallOptions options;
};

Status run(AccuracyFlags& flags, const Session& session) {
  if (Status s = finish_mask(flags.mask, &flags.options); !s.ok()) return s;
  std::vector<Recipe> recipes;
  if (Status s = parse_recipes(flags.recipes, &recipes); !s.ok()) return s;
  if (!flags.csv.empty())
    if (Status s = check_writable("--csv", flags.csv, flags.in); !s.ok()) return s;
  Inputs inputs;
  if (Status s = load_inputs(flags.in, &inputs); !s.ok()) return s;
  CallOptions options = flags.options;
  options.backward = inputs.d_o.has_value();
  Progress progress("accuracy", static_cast<int>(recipes.size()) + 1, session.progress);
  progress.step("float64 reference");
  cpu::OracleResult oracle;
  if (Status s = make_oracle(inputs, options, &oracle); !s.ok()) return s;
  Table table = accuracy_table();
  std::string refused;
  std::size_t measured = 0;
  for (const Recipe& recipe : recipes) {
    progress.step(recipe.name());
    CallOptions own = options;
    own.backward = options.backward && recipe.trains;
    Accuracy accuracy;
    cpu::Probe probe;
    cpu::Probe* const observer = own.device == Device::cpu ? &probe : nullptr;
    Status s = measure_accuracy(inputs, recipe, own, oracle, &accuracy, observer);
    if (s.code() == StatusCode::unsupported) {  // the others are measured all the same
      refused += (refused.empty() ? "" : "; ") + recipe.name() + ": " + s.message();
      continue;
    }
    if (!s.ok()) return s;
    add_accuracy_rows({recipe.name()}, accuracy, &table);
    ++measured;
  }
  Status left_out = refused.empty() ? Status() : Status::unsupported("not measured: " + refused);
  if (measured == 0) return left_out;
  if (!flags.csv.empty())
    if (Status s = write_file(flags.csv, table.csv()); !s.ok()) return s;
  const Status printed = print(session.json ? table.json() + "\n" : table.text());
  return printed.ok() ? left_out : printed;
}

}  // namespace

void add_accuracy(Program& program) {
  Session* const session = program.session();
  auto flags = std::make_shared<AccuracyFlags>();
  Command command = program.command("accuracy", "how far recipes are from float64 attention on the unquantised input");
  command.file("IN", &flags->in, "safetensors file with q, k, v (and dout, cu_seqlens)");
  command.required_text("--recipes", &flags->recipes, "A,B,...", "recipes, separated by commas");
  command.text("--csv", &flags->csv, "F", "also write the table to this file");
  add_mask_flags(&command, &flags->mask);
  add_device_flags(&command, &flags->options);
  add_deterministic_flag(&command, &flags->options);
  add_report_flags(&command, session);
  command.footer(
      R"(For O, dQ, dK, dV: cosine, relative L2, and the worst row's error relative to its norm or a tenth of the rms row norm, whichever is
more. One line a head (dK, dV: key heads) and one for all: mean cosine and L2, greatest worst row. Then shares, by query head
(blank where a scale spans all heads) and over all heads:
  p_zero, p_saturated   of visible pairs: P rounded to zero, P beyond the largest code
  ds_zero_q, ds_zero_k  of dS that is not 0: rounded to zero in dQ's and in dK's payload; ds_sat_*: saturated
  ds_lost_q, ds_lost_k  their part of the sum of |dS|
  p_equal               of visible pairs, where exp2 is approximated: P has the code that exp2 itself gives
A recipe that this version does not compute is named at the end (exit code 3); the others are measured all the same.
Without dout, and for recipes without a backward pass, the gradients stay blank. With --device cuda the shares stay blank: they are
counted on the CPU.

Examples:
  flamia accuracy in.safetensors --recipes bf16,mxfp8,mxfp8-exact,fp8-tensor
  flamia accuracy in.safetensors --recipes "mxfp8,mxfp8 ds=32x32" --full --csv accuracy.csv
)");
  command.action([flags, session] { return run(*flags, *session); });
}

}  // namespace flamia::cli
