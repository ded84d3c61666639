// SPDX-License-Identifier: Apache-2.0
// The tables of the recipes in one run: accuracy (causal and full), leak, and where the error of P sits, on made inputs and on the
// shipped activations.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "command.hpp"
#include "demo_data.hpp"
#include "heatmap.hpp"
#include "io/output_file.hpp"
#include "leakage.hpp"
#include "made_inputs.hpp"
#include "progress.hpp"
#include "recipe/lower.hpp"

namespace flamia::cli {
namespace {

constexpr const char* kRecipes =
    "bf16,bf16 d=scores,mxfp8,mxfp8-exact,mxfp8-exact d=scores,nvfp4,nvfp4-exact,nvfp4-full,nvfp4-full d=output,"
    "nvfp4-full ds=32x32,nvfp4-full fold-v=on fold-k=on,nvfp4-full v1=e2m1/1xall/ue8m0/ceil,"
    "sagebwd,sagebwd smooth-k=off,sagebwd smooth-q=on,sagebwd smooth-k=off smooth-q=on,sagebwd d=scores,"
    "sagebwd do1=int8/128xall/f32/amax dov-bf16=off,sagebwd ds=128x64,sagebwd v2=bf16,sagebwd v2=bf16 d=scores,"
    "sagebwd k1=int8/64xall/f32/amax k2=int8/64xall/f32/amax v1=int8/64xall/f32/amax v2=bf16 p2=int8/128x64/f32/amax ds=128x64,"
    "fp8-tensor,mxfp8-floor,mxfp8-floor d=scores,"
    "sage3,sage3 p1=e2m1/1x16/e4m3/amax/x0.00037202382,sage3 p1=e2m1/1x16/e4m3/amax,sage3 tile=64x64,sage3 smooth-q=off,"
    "sage3 smooth-k=off,"
    "sage3 smooth-q=off smooth-k=off,sage3 smooth-q=off smooth-k=off rotate=on,sage3-exact,"
    "sage3-exact v1=e2m1/1xall/ue8m0/ceil,"
    "sage3 q1=e2m1/1x32/ue8m0/floor k1=e2m1/1x32/ue8m0/floor v1=e2m1/32x1/ue8m0/floor p1=e2m1/1x32/ue8m0/floor,"
    "sage3 q1=e2m1/1x32/e4m3/amax k1=e2m1/1x32/e4m3/amax v1=e2m1/32x1/e4m3/amax p1=e2m1/1x32/e4m3/two_level,"
    "sage3 q1=e2m1/1x16/ue8m0/ceil k1=e2m1/1x16/ue8m0/ceil v1=e2m1/16x1/ue8m0/ceil p1=e2m1/1x16/ue8m0/ceil,"
    "sage3 q1=e2m1/1xall/e4m3/amax k1=e2m1/1xall/e4m3/amax,sage3 q1=e2m1/tensor/f32/amax k1=e2m1/tensor/f32/amax,"
    "sage3 exp2=mitchell,sage3 exp2=schraudolph,sage3 exp2=direct,hwfp4-direct,hwfp4-direct exp2=mitchell,"
    "mxfp8 trains=off exp2=mitchell,mxfp8 trains=off exp2=schraudolph,fp8-head";
constexpr float kFactors[] = {16.f, 10000.f};
constexpr int kHeatmapHead = 0;
constexpr std::int64_t kHeatmapTokens = 2048;  // its codes are one float a pair

struct Flags {
  std::string out = "flamia-tables", data, recipes = kRecipes;
  MadeShape shape;
  CallOptions options;
};

struct Tables {
  Table accuracy = accuracy_table({{"input", ""}, {"mask", ""}, {"recipe", ""}});
  Table leak = leak_table({{"input", ""}, {"recipe", ""}});
  Table heatmap = heatmap_table();
  Table summary{{{"input", ""},
                 {"mask", ""},
                 {"recipe", ""},
                 {"o_cosine", "{:.5f}"},
                 {"dq_cosine", "{:.5f}"},
                 {"dk_cosine", "{:.5f}"},
                 {"dv_cosine", "{:.5f}"},
                 {"dq_worst", "{:.2f}"},
                 {"p_zero", "{:.1e}"},
                 {"ds_zero_q", "{:.1e}"},
                 {"p_equal", "{:.4f}"},
                 {"leak_o", "{:.1e}"},
                 {"leak_dq", "{:.1e}"}}};
};

struct Input {
  std::string name;
  Inputs inputs;
  float scale = 0.f;
};

Status gather(const Flags& flags, std::vector<Input>* inputs) {
  for (MadeInput& made : make_inputs(flags.shape)) inputs->push_back({made.name, std::move(made.inputs), 0.f});
  std::vector<DemoInput> shipped;
  if (Status s = load_demo_data(flags.data, &shipped); !s.ok()) return s;
  for (DemoInput& one : shipped) inputs->push_back({one.name, std::move(one.inputs), one.scale});
  return {};
}

Cell share(std::int64_t part, std::int64_t whole) {
  if (whole == 0) return {};
  return static_cast<double>(part) / static_cast<double>(whole);
}

Cell greatest(const std::vector<LeakRow>& rows, Output output) {
  Cell most;
  for (const LeakRow& row : rows)
    if (const double* value = std::get_if<double>(&row.greatest[output]);
        row.figure == "earlier" && value != nullptr &&
        (!std::holds_alternative<double>(most) || !(*value <= std::get<double>(most))))
      most = *value;
  return most;
}

/// One recipe on one input under one mask.
class Run {
 public:
  Run(const Input& input, const CallOptions& options, bool causal, const cpu::OracleResult& oracle, Progress* progress,
      Tables* tables)
      : input_(input), options_(options), causal_(causal), oracle_(oracle), progress_(progress), tables_(tables) {}

  Status recipe(const Recipe& recipe) {
    const std::string mask = causal_ ? "causal" : "full", name = recipe.name();
    CallOptions own = options_;
    own.backward = options_.backward && recipe.trains;
    progress_->step(fmt::format("{}, {}, {}", input_.name, mask, name));
    Accuracy accuracy;
    cpu::Probe probe;
    probe.record_codes = causal_ && input_.inputs.problem.tokens <= kHeatmapTokens;
    if (Status s = measure_accuracy(input_.inputs, recipe, own, oracle_, &accuracy, &probe); !s.ok()) return s;
    add_accuracy_rows({input_.name, mask, name}, accuracy, &tables_->accuracy);
    if (probe.record_codes)
      add_heatmap_rows(input_.name, name, input_.inputs, own, oracle_, probe.forward_codes, kHeatmapHead, &tables_->heatmap);
    std::vector<LeakRow> leak;
    if (causal_) {
      const auto step = [](const std::string&) {};
      if (Status s = measure_leak(input_.inputs, recipe, own, {std::begin(kFactors), std::end(kFactors)}, step, &leak); !s.ok())
        return s;
      add_leak_rows({input_.name, name}, leak, &tables_->leak);
    }
    const cpu::ProbeCounts& c = probe.counts;
    std::vector<Cell> row{input_.name, mask, name};
    for (int output = kO; output <= kDv; ++output)
      row.push_back(accuracy.heads[output].empty() ? Cell{} : Cell{accuracy.mean(static_cast<Output>(output)).cosine});
    row.push_back(accuracy.heads[kDq].empty() ? Cell{} : Cell{accuracy.mean(kDq).worst_row});
    row.push_back(share(c.p_zero, c.pairs));
    row.push_back(share(c.ds_zero_q, c.ds_pairs));
    row.push_back(share(c.p_equal, c.p_compared));
    row.push_back(greatest(leak, kO));
    row.push_back(own.backward ? greatest(leak, kDq) : Cell{});
    tables_->summary.add(std::move(row));
    return {};
  }

 private:
  const Input& input_;
  const CallOptions& options_;
  bool causal_;
  const cpu::OracleResult& oracle_;
  Progress* progress_;
  Tables* tables_;
};

Status write_tables(const std::string& folder, const std::string& command, const Tables& tables) {
  const std::string markdown =
      "# Recipes\n\nMade by `" + command + "` (flamia " + version() +
      ") on the CPU backend. Cosines against float64 attention on the unquantised input; leak: the greatest change of O "
      "and dQ of earlier tokens when later ones are multiplied, relative to the greatest output, 0 = every bit "
      "equal, inf: the output was 0 all over. Columns: `flamia tables --help`.\n\n" +
      tables.summary.markdown();
  const std::pair<const char*, std::string> files[] = {{"recipes.md", markdown},
                                                       {"tables.csv", tables.summary.csv()},
                                                       {"accuracy.csv", tables.accuracy.csv()},
                                                       {"leak.csv", tables.leak.csv()},
                                                       {"heatmap.csv", tables.heatmap.csv()}};
  for (const auto& [name, text] : files)
    if (Status s = write_file(folder + "/" + name, text); !s.ok()) return s;
  return {};
}

Status run(const Flags& flags, const Session& session) {
  std::vector<Recipe> recipes;
  if (Status s = parse_recipes(flags.recipes, &recipes); !s.ok()) return s;
  for (const Recipe& recipe : recipes)
    if (Status s = recipe::can_run(recipe, plan::Architecture::cpu, flags.shape.head_dim, recipe.trains); !s.ok())
      return {s.code(), "--recipes: \"" + recipe.name() + "\": " + s.message()};
  std::vector<Input> inputs;
  if (Status s = gather(flags, &inputs); !s.ok()) return s;
  if (Status s = make_folder(flags.out); !s.ok()) return s;  // before the work, not after it
  Progress progress("tables", static_cast<int>(2 * inputs.size() * recipes.size()), session.progress);
  Tables tables;
  CallOptions options = flags.options;
  options.backward = true;
  for (const Input& input : inputs)
    for (const bool causal : {true, false}) {
      options.mask = {causal, -1, -1};
      options.scale = input.scale;
      cpu::OracleResult oracle;
      if (Status s = make_oracle(input.inputs, options, &oracle); !s.ok()) return s;
      Run one(input, options, causal, oracle, &progress, &tables);
      for (const Recipe& recipe : recipes)
        if (Status s = one.recipe(recipe); !s.ok()) return s;
    }
  std::string command =
      fmt::format("flamia tables --tokens {} --heads {} --seed {}", flags.shape.tokens, flags.shape.heads, flags.shape.seed);
  if (flags.recipes != kRecipes) command += " --recipes \"" + flags.recipes + "\"";
  if (Status s = write_tables(flags.out, command, tables); !s.ok()) return s;
  return print(session.json ? tables.summary.json() + "\n" : tables.summary.text());
}

}  // namespace

void add_tables(Program& program) {
  Session* const session = program.session();
  auto flags = std::make_shared<Flags>();
  Command command = program.command("tables", "accuracy, leak and error maps of all recipes on made and shipped inputs");
  command.text("--out", &flags->out, "DIR", "folder for the files (default flamia-tables, made if missing)");
  command.text("--recipes", &flags->recipes, "A,B,...",
               "recipes, separated by commas (default: all, their ablations, approximations)");
  command.whole("--tokens", &flags->shape.tokens, 8, 1 << 20, "N", "of the made inputs, in two documents (default 512)");
  command.whole("--heads", &flags->shape.heads, 1, 64, "N", "of the made inputs (default 2)");
  command.seed("--seed", &flags->shape.seed, "of the made inputs (default 1)");
  command.text("--data", &flags->data, "DIR", "folder of the shipped activations (default: ./data, else the installed)");
  command.whole("--threads", &flags->options.threads, 0, 4096, "N", "threads (default: all cores)");
  add_report_flags(&command, session);
  command.footer(
      R"(Inputs: N(0,1); the same with a sink in each document's first and last key, an outlier channel, a component that all keys share, small
values; and the activations under data/. Each causal and full; leak under the causal mask.
Writes recipes.md and tables.csv (this table), accuracy.csv (by head), leak.csv (by factor and cut), heatmap.csv (error of P by
32 x 32 block of queries and keys, causal). p_zero: visible pairs whose P is rounded to zero; ds_zero_q: dS that is not 0, rounded
to zero in dQ's payload; p_equal: codes of P equal to those of exp2, where it is approximated.

Examples:
  flamia tables
  flamia tables --tokens 4096 --heads 4 --recipes mxfp8,nvfp4,sagebwd --out out/tables
)");
  command.action([flags, session] { return run(*flags, *session); });
}

}  // namespace flamia::cli
