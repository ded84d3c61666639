// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <memory>

#include "command.hpp"
#include "io/output_file.hpp"
#include "io/safetensors.hpp"
#include "json.hpp"
#include "progress.hpp"

namespace flamia::cli {
namespace {

struct Attend {
  std::string in, out, recipe;
  MaskFlags mask;
  CallOptions options;
};

Status write_result(const Attend& flags, const Inputs& inputs, const Recipe& recipe, const CallResult& result) {
  const auto size = [](std::int64_t n) { return static_cast<std::uint64_t>(n); };
  const std::uint64_t tokens = size(inputs.problem.tokens), heads = size(inputs.problem.query_heads),
                      key_heads = size(inputs.problem.key_heads), dim = size(inputs.problem.head_dim);
  std::vector<TensorToWrite> tensors{
      {"out", flags.options.out_dtype == DType::bf16 ? "BF16" : "F32", {tokens, heads, dim}, result.o.data()},
      {"lse", "F32", {heads, tokens}, result.lse.data()}};
  if (flags.options.backward) {
    tensors.push_back({"dq", "F32", {tokens, heads, dim}, result.d_q.data()});
    tensors.push_back({"dk", "F32", {tokens, key_heads, dim}, result.d_k.data()});
    tensors.push_back({"dv", "F32", {tokens, key_heads, dim}, result.d_v.data()});
  }
  const Mask& mask = flags.options.mask;
  const Metadata metadata{{"recipe", recipe.name()},
                          {"mask", mask.causal ? "causal" : "full"},
                          {"window", fmt::format("{},{}", mask.left, mask.right)},
                          {"flamia", version()}};
  return write_safetensors(flags.out, std::move(tensors), metadata);
}

Status run(Attend& flags, const Session& session) {
  if (session.json && is_standard_output(flags.out))
    return Status::invalid("--json and --out " + flags.out + " both write to standard output; drop one of them");
  if (Status s = finish_mask(flags.mask, &flags.options); !s.ok()) return s;
  Recipe recipe;
  if (Status s = parse_recipe(flags.recipe, &recipe); !s.ok()) return s;
  if (Status s = check_writable("--out", flags.out, flags.in); !s.ok()) return s;
  Progress progress("attend", 3, session.progress);
  progress.step("reading " + flags.in);
  Inputs inputs;
  if (Status s = load_inputs(flags.in, &inputs); !s.ok()) return s;
  if (flags.options.backward && !inputs.d_o)
    return Status::invalid("--backward: " + flags.in +
                           " has no tensor \"dout\", the gradient of the output [T, H, d]; add it or drop --backward");
  progress.step(recipe.name() + (flags.options.backward ? ", forward and backward" : ", forward"));
  CallResult result;
  if (Status s = attend(inputs, recipe, flags.options, &result); !s.ok()) return s;
  progress.step("writing " + flags.out);
  if (Status s = write_result(flags, inputs, recipe, result); !s.ok()) return s;
  if (!session.json) return {};
  Json report = Json::object();
  report.set("recipe", recipe.name());
  report.set("tokens", inputs.problem.tokens).set("documents", inputs.problem.documents);
  report.set("query_heads", inputs.problem.query_heads).set("key_heads", inputs.problem.key_heads);
  report.set("head_dim", inputs.problem.head_dim);
  report.set("causal", flags.options.mask.causal);
  report.set("window", std::vector{flags.options.mask.left, flags.options.mask.right});
  report.set("backward", flags.options.backward);
  report.set("seconds", result.seconds);
  report.set("out", flags.out);
  return print(report.pretty() + "\n");
}

}  // namespace

void add_attend(Program& program) {
  Session* const session = program.session();
  auto flags = std::make_shared<Attend>();
  Command command = program.command("attend", "attention of a file's tensors, with gradients if asked");
  command.file("IN", &flags->in, "safetensors file with q, k, v (and dout, cu_seqlens)");
  command.required_text("--recipe", &flags->recipe, "R", "what to compute with; see `flamia recipes`");
  command.required_text("--out", &flags->out, "OUT", "file to write out, lse (and dq, dk, dv) to");
  command.flag("--backward", &flags->options.backward, "also the gradients dq, dk, dv; needs dout");
  command.choice("--out-dtype", {"f32", "bf16"}, "f32|bf16",
                 "dtype of out: f32 (default) or bf16; gradients stay f32 and do not depend on it",
                 [flags](const std::string& name) { flags->options.out_dtype = name == "bf16" ? DType::bf16 : DType::f32; });
  add_mask_flags(&command, &flags->mask);
  add_device_flags(&command, &flags->options);
  add_deterministic_flag(&command, &flags->options);
  add_report_flags(&command, session);
  command.footer(
      R"(Writes out [T, H, d], lse [H, T] (natural logarithm, FP32) and with --backward dq, dk, dv, shaped as q, k, v.
A row that sees no key has out 0, lse +inf and gradients 0.

Examples:
  flamia attend in.safetensors --recipe mxfp8 --out out.safetensors
  flamia attend in.safetensors --recipe mxfp8-exact --backward --window 256,0 --out grads --json
  flamia attend in.safetensors --recipe bf16 --full --out-dtype bf16 --out /dev/stdout > out
)");
  command.action([flags, session] { return run(*flags, *session); });
}

}  // namespace flamia::cli
