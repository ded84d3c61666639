// SPDX-License-Identifier: Apache-2.0
// The main job end to end on real activations: a training call per recipe, its accuracy, what it leaks, how long it takes.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "command.hpp"
#include "demo_data.hpp"
#include "heatmap.hpp"
#include "io/output_file.hpp"
#include "leakage.hpp"
#include "progress.hpp"

namespace flamia::cli {
namespace {

constexpr const char* kRecipes = "bf16,mxfp8,mxfp8-exact,fp8-tensor";
constexpr int kTimedRuns = 3, kHeatmapHead = 0;
constexpr float kFactors[] = {16.f, 1024.f, 10000.f};

struct Demo {
  std::string data, out = "flamia-demo";
  CallOptions options;
};

struct Tables {
  Table summary{{{"input", ""},
                 {"recipe", ""},
                 {"o_cosine", "{:.5f}"},
                 {"dq_cosine", "{:.5f}"},
                 {"dk_cosine", "{:.5f}"},
                 {"dv_cosine", "{:.5f}"},
                 {"dq_worst", "{:.2f}"},
                 {"ds_zero_q", "{:.1e}"},
                 {"ds_lost_q", "{:.1e}"},
                 {"leak_o", "{:.1e}"},
                 {"leak_dq", "{:.1e}"},
                 {"leak_blocks", "{:.1e}"},
                 {"look_back", "{:.1e}"},
                 {"documents", "{:.1e}"},
                 {"seconds", "{:.3f}"}}};
  Table accuracy = accuracy_table({{"input", ""}, {"recipe", ""}});
  Table leak = leak_table({{"input", ""}, {"recipe", ""}});
  Table heatmap = heatmap_table();
};

/// Greatest of the given cells of one figure of a summary; 0 where there are none.
double greatest(const std::vector<LeakRow>& summary, const std::string& figure, std::initializer_list<Output> outputs) {
  double most = 0;
  for (const LeakRow& row : summary)
    for (const Output output : outputs)
      if (const double* value = std::get_if<double>(&row.greatest[output]); row.figure == figure && value != nullptr)
        most = *value <= most ? most : *value;
  return most;
}

Status median_time(const Inputs& inputs, const Recipe& recipe, const CallOptions& options, double* seconds) {
  std::vector<double> times;
  for (int n = 0; n < kTimedRuns; ++n) {
    CallResult result;
    if (Status s = attend(inputs, recipe, options, &result); !s.ok()) return s;
    times.push_back(result.seconds);
  }
  std::sort(times.begin(), times.end());
  *seconds = times[times.size() / 2];
  return {};
}

Status measure(const DemoInput& input, const Recipe& recipe, const CallOptions& options, const cpu::OracleResult& oracle,
               Progress* progress, Tables* tables) {
  const std::string name = recipe.name(), label = input.name + " layer, ";
  progress->step(label + name + ", accuracy");
  Accuracy accuracy;
  cpu::Probe probe;
  probe.record_codes = true;
  if (Status s = measure_accuracy(input.inputs, recipe, options, oracle, &accuracy, &probe); !s.ok()) return s;
  progress->step(label + name + ", time");
  double seconds = 0;
  if (Status s = median_time(input.inputs, recipe, options, &seconds); !s.ok()) return s;
  std::vector<LeakRow> leak;
  const auto step = [&](const std::string& what) { progress->step(label + what); };
  if (Status s = measure_leak(input.inputs, recipe, options, {std::begin(kFactors), std::end(kFactors)}, step, &leak); !s.ok())
    return s;

  const std::vector<LeakRow> most = summarise(leak);
  const cpu::ProbeCounts& c = probe.counts;
  const auto share = [](double part, double whole) { return whole > 0 ? part / whole : 0.0; };
  tables->summary.add({input.name, name, accuracy.mean(kO).cosine, accuracy.mean(kDq).cosine, accuracy.mean(kDk).cosine,
                       accuracy.mean(kDv).cosine, accuracy.mean(kDq).worst_row,
                       share(static_cast<double>(c.ds_zero_q), static_cast<double>(c.ds_pairs)), share(c.ds_lost_q, c.ds_mass),
                       greatest(most, "earlier", {kO}), greatest(most, "earlier", {kDq}),
                       greatest(most, "earlier_blocks", {kO, kDq}), greatest(most, "look_back", {kDk, kDv}),
                       greatest(most, "other_documents", {kO, kDq, kDk, kDv}), seconds});
  add_accuracy_rows({input.name, name}, accuracy, &tables->accuracy);
  add_leak_rows({input.name, name}, leak, &tables->leak);
  add_heatmap_rows(input.name, name, input.inputs, options, oracle, probe.forward_codes, kHeatmapHead, &tables->heatmap);
  return {};
}

Status write_tables(const std::string& folder, const Tables& tables) {
  const std::pair<const char*, const Table*> files[] = {{"demo.csv", &tables.summary},
                                                        {"accuracy.csv", &tables.accuracy},
                                                        {"leak.csv", &tables.leak},
                                                        {"heatmap.csv", &tables.heatmap}};
  for (const auto& [name, table] : files)
    if (Status s = write_file(folder + "/" + name, table->csv()); !s.ok()) return s;
  return {};
}

Status run(const Demo& flags, const Session& session) {
  std::vector<Recipe> recipes;
  if (Status s = parse_recipes(kRecipes, &recipes); !s.ok()) return s;
  std::vector<DemoInput> inputs;
  if (Status s = load_demo_data(flags.data, &inputs); !s.ok()) return s;
  if (Status s = make_folder(flags.out); !s.ok()) return s;  // before the work, not after it
  CallOptions options = flags.options;
  options.backward = true;
  int steps = 0;
  for (const DemoInput& input : inputs)
    steps += 1 + static_cast<int>(recipes.size()) * (2 + leak_runs(input.inputs, options, std::size(kFactors)));
  Progress progress("demo", steps, session.progress);
  Tables tables;
  for (const DemoInput& input : inputs) {
    options.scale = input.scale;
    progress.step(input.name + " layer, float64 reference");
    cpu::OracleResult oracle;
    if (Status s = make_oracle(input.inputs, options, &oracle); !s.ok()) return s;
    for (const Recipe& recipe : recipes)
      if (Status s = measure(input, recipe, options, oracle, &progress, &tables); !s.ok()) return s;
  }
  if (Status s = write_tables(flags.out, tables); !s.ok()) return s;
  return print(session.json ? tables.summary.json() + "\n" : tables.summary.text());
}

}  // namespace

void add_demo(Program& program) {
  Session* const session = program.session();
  auto flags = std::make_shared<Demo>();
  Command command = program.command("demo", "the main job on real activations: accuracy, leak and time of a training call");
  command.text("--data", &flags->data, "DIR",
               "folder of gpt-early.safetensors and gpt-late.safetensors (default: ./data, else the installed)");
  command.text("--out", &flags->out, "DIR", "folder for the CSV files (default flamia-demo, made if missing)");
  add_device_flags(&command, &flags->options);
  add_report_flags(&command, session);
  command.footer(
      R"(Runs quantise + forward + backward on packed documents of a trained byte-level model, with mxfp8 and mxfp8-exact beside bf16 and
fp8-tensor. Cosines and worst row: against float64 attention on the unquantised input. leak_*: greatest change of what must not
change, relative to the greatest output, 0 = every bit equal (see flamia leak --help). seconds: median of 3 training calls.
Writes demo.csv (this table), accuracy.csv (by head), leak.csv (by factor and cut) and heatmap.csv (error of P by 32 x 32 block).

Examples:
  flamia demo
  flamia demo --data data --out out/demo --json
)");
  command.action([flags, session] { return run(*flags, *session); });
}

}  // namespace flamia::cli
