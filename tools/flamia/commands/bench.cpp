// SPDX-License-Identifier: Apache-2.0
// flamia bench: the GPU kernels on packed workloads, part by part, as rows of bench/results/*.csv.
#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>

#include "command.hpp"
#include "io/output_file.hpp"
#include "progress.hpp"
#include "table.hpp"
#if defined(FLAMIA_CLI_CUDA)
#include "bench/measure.hpp"
#include "bench/timing.hpp"
#endif

namespace flamia::cli {
namespace {

struct Bench {
  std::string recipes = "mxfp8,mxfp8-exact", workloads, workload_file = "bench/workloads.json", lengths, mode = "burst", csv, run,
              commit;
  int heads = 16, key_heads = 0, head_dim = 128;
  bool training = false, deterministic = false;
  std::uint64_t seed = 0;
  MaskFlags mask;
};

#if defined(FLAMIA_CLI_CUDA)

constexpr const char* kColumns =
    "run,commit,gpu,driver,cuda,clock_mhz,workload,heads,key_heads,head_dim,mask,mode,implementation,part,ms,tflops,error";

std::string now() {
  const std::time_t time = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm utc{};
  gmtime_r(&time, &utc);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday, utc.tm_hour,
                     utc.tm_min, utc.tm_sec);
}

Status append(const std::string& path, const std::string& rows) {
  const bool fresh = !std::filesystem::exists(path) || std::filesystem::file_size(path) == 0;
  std::ofstream file(path, std::ios::app);
  if (fresh) file << kColumns << "\n";
  file << rows;
  file.flush();
  return file ? Status() : Status(StatusCode::io_error, "--csv " + path + " cannot be written; choose a file in a folder that can");
}

Status run(Bench& flags, const Session& session) {
  CallOptions call;
  if (Status s = finish_mask(flags.mask, &call); !s.ok()) return s;
  std::vector<Recipe> recipes;
  if (Status s = parse_recipes(flags.recipes, &recipes); !s.ok()) return s;
  std::vector<Workload> workloads;
  if (flags.lengths.empty()) {
    if (Status s = load_workloads(flags.workload_file, flags.workloads, &workloads); !s.ok()) return s;
  } else {
    if (!flags.workloads.empty()) return Status::invalid("--lengths and --workloads both say what to run on; give one");
    if (Status s = parse_lengths(flags.lengths, &workloads.emplace_back()); !s.ok()) return s;
  }
  if (flags.run.empty()) flags.run = now();
  BenchOptions options;
  options.heads = flags.heads;
  options.key_heads = flags.key_heads == 0 ? flags.heads : flags.key_heads;
  options.head_dim = flags.head_dim;
  options.mask = call.mask;
  options.training = flags.training;
  options.deterministic = flags.deterministic;
  options.seed =
      flags.seed != 0 ? flags.seed : static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  const std::string mask = call.mask.left >= 0 || (call.mask.right >= 0 && !call.mask.causal) ? "window"
                           : call.mask.causal                                                 ? "causal"
                                                                                              : "full";
  if (!flags.csv.empty())
    if (Status s = check_writable("--csv", flags.csv, flags.workload_file); !s.ok()) return s;
  for (const Workload& workload : workloads)  // before the first is measured: is there a GPU, and does it run them all?
    for (const Recipe& recipe : recipes) {
      Plan plan;
      if (Status s = make_plan(workload, recipe, options, &plan); !s.ok()) return s;
    }
  Machine machine_facts;
  if (Status s = machine(&machine_facts); !s.ok()) return s;

  Table table({{"workload", ""},
               {"implementation", ""},
               {"mode", ""},
               {"part", ""},
               {"ms", "{:.3f}"},
               {"tflops", "{:.0f}"},
               {"of_copy", "{:.2f}"},
               {"error", "{:.2e}"},
               {"clock_mhz", ""},
               {"gigabytes", "{:.2f}"}});
  const std::vector<std::string> modes =
      flags.mode == "both" ? std::vector<std::string>{"burst", "sustained"} : std::vector<std::string>{flags.mode};
  Progress progress("bench", static_cast<int>(workloads.size() * recipes.size() * modes.size()), session.progress);
  for (const Workload& workload : workloads)
    for (const std::string& mode : modes)
      for (const Recipe& recipe : recipes) {
        progress.step(workload.name + " " + recipe.name() + " " + mode);
        options.sustained = mode == "sustained";
        std::vector<PartTime> parts;
        if (Status s = measure(workload, recipe, options, &parts); !s.ok()) return s;
        const std::string name = recipe.name() + (options.deterministic ? " (deterministic)" : "");
        std::string rows;
        for (const PartTime& part : parts) {
          const double tflops = part.flops / part.ms * 1e-9,
                       copy = part.bytes / (part.ms * 1e-3) / machine_facts.copy_bytes_per_second;
          const auto optional = [](bool there, double value) { return there ? Cell(value) : Cell(); };
          table.add({workload.name, "flamia " + name, mode, part.part, part.ms, optional(part.flops > 0, tflops),
                     optional(part.bytes > 0, copy), optional(part.error >= 0, part.error), part.clock_mhz, part.gigabytes});
          rows += fmt::format("{},{},{},{},{},{},\"{}\",{},{},{},{},{},flamia {},{},{:.4f},{},{}\n", flags.run, flags.commit,
                              machine_facts.gpu, machine_facts.driver, machine_facts.cuda, part.clock_mhz, workload.name,
                              options.heads, options.key_heads, options.head_dim, mask, mode, name, part.part, part.ms,
                              part.flops > 0 ? fmt::format("{:.1f}", tflops) : "",
                              part.error >= 0 ? fmt::format("{:.2e}", part.error) : "");
        }
        if (!flags.csv.empty())
          if (Status s = append(flags.csv, rows); !s.ok()) return s;
      }
  const std::string head = fmt::format("{}, driver {}, copy {:.2f} TB/s read and written; parts quantise as a share of it\n",
                                       machine_facts.gpu, machine_facts.driver, machine_facts.copy_bytes_per_second * 1e-12);
  return print(session.json ? table.json() + "\n" : head + table.text());
}

#else

Status run(Bench&, const Session&) {
  return Status::unsupported(
      "bench measures the GPU kernels, and this build has none; configure with -DFLAMIA_CUDA=ON (needs nvcc 13). "
      "The CPU backend is measured by the flamia_bench_cpu program");
}

#endif

}  // namespace

void add_bench(Program& program) {
  Session* const session = program.session();
  auto flags = std::make_shared<Bench>();
  Command command = program.command("bench", "time the GPU kernels on packed workloads");
  command.text("--recipes", &flags->recipes, "R,...", "comma-separated (default mxfp8,mxfp8-exact)");
  command.text("--workloads", &flags->workloads, "NAME,...", "names from the workload file (default: all)");
  command.text("--workload-file", &flags->workload_file, "FILE", "JSON with named lists of lengths (default bench/workloads.json)");
  command.text("--lengths", &flags->lengths, "L,...", "own document lengths instead: 4096x16 or 100,200,4096x2");
  command.whole("--heads", &flags->heads, 1, 4096, "N", "query heads (default 16)");
  command.whole("--key-heads", &flags->key_heads, 1, 4096, "N", "key and value heads (default: as --heads)");
  command.choice("--head-dim", {"64", "128"}, "N", "64 or 128 (default)",
                 [flags](const std::string& given) { flags->head_dim = given == "64" ? 64 : 128; });
  command.choice("--mode", {"burst", "sustained", "both"}, "M", "burst (single launches), sustained (back to back) or both",
                 &flags->mode);
  command.flag("--training-call", &flags->training, "forward and backward: what a training step of one layer costs");
  command.flag("--deterministic", &flags->deterministic, "with --training-call: dQ summed in a fixed order");
  command.text("--csv", &flags->csv, "FILE", "append rows to this file");
  command.text("--run", &flags->run, "ID", "name shared by everything measured side by side (default: the time)");
  command.text("--commit", &flags->commit, "REV", "recorded in the rows");
  command.seed("--seed", &flags->seed, "of the random operands (default: fresh)");
  add_mask_flags(&command, &flags->mask);
  add_report_flags(&command, session);
  command.footer(
      R"(Parts: schedule (work list), quantise (Q, K, V), forward (attention kernel), inference (all three together).
With --training-call, which keeps what the backward pass reads: schedule, quantise, forward, forward_call (all three), d_out (dO
quantised, D, dQ's sums cleared; Q and K in BF16), gradients (the kernels that make dQ, dK, dV), backward (schedule, d_out, gradients), call (forward
and backward). Errors: relative L2 of O, or the greatest of dQ, dK, dV, on the shortest document. gigabytes: device memory of the call.

Examples:
  flamia bench --csv bench/results/run.csv --commit $(git rev-parse --short HEAD)
  flamia bench --lengths 4096x16 --heads 32 --key-heads 8 --mode both
  flamia bench --training-call --workloads 16x4096 --recipes mxfp8-exact
  flamia bench --workloads 16x4096,256x256 --full --recipes mxfp8-exact
)");
  command.action([flags, session] { return run(*flags, *session); });
}

}  // namespace flamia::cli
