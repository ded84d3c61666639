// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <deque>
#include <memory>

#include "command.hpp"
#include "io/output_file.hpp"
#include "io/safetensors.hpp"
#include "json.hpp"
#include "progress.hpp"
#include "quantize/quantize.hpp"
#include "recipe/operands.hpp"

namespace flamia::cli {
namespace {

struct Quantize {
  std::string in, out, recipe;
  CallOptions options;
};

const char* dtype_of(Element element) {
  switch (element) {
    case Element::bf16:
      return "BF16";
    case Element::e4m3:
      return "F8_E4M3";
    case Element::e5m2:
      return "F8_E5M2";
    case Element::e2m1:
      return "U8";
    case Element::int8:
      return "I8";
  }
  return "";
}

const char* dtype_of(ScaleType scale) {
  switch (scale) {
    case ScaleType::none:
      return "";
    case ScaleType::ue8m0:
      return "F8_E8M0";
    case ScaleType::e4m3:
      return "F8_E4M3";
    case ScaleType::f32:
      return "F32";
  }
  return "";
}

std::string granularity_text(const Quantisation& form) {
  const Group& group = form.group;
  switch (group.kind) {
    case Group::Kind::none:
      return "none";
    case Group::Kind::constant:
      return "constant";
    case Group::Kind::tensor:
      return "per tensor";
    case Group::Kind::head:
      return "per head";
    case Group::Kind::blocks:
      break;
  }
  const std::string sticky = !form.sticky ? ""
                             : form.headroom == 0
                                 ? ", sticky over the document"
                                 : fmt::format(", sticky over the document from {} binades above the first", form.headroom);
  const std::string rows = group.rows == 0 ? "document" : std::to_string(group.rows);
  if (group.columns == 0) return (group.rows == 1 ? "per token" : "blocks of " + rows + " tokens x all channels") + sticky;
  if (group.rows == 1) return fmt::format("1x{} along the channels", group.columns) + sticky;
  return fmt::format("{} tokens x {} channels", rows, group.columns) + sticky;
}

const char* rule_text(ScaleRule rule) {
  switch (rule) {
    case ScaleRule::none:
      return "none";
    case ScaleRule::ceil:
      return "ceil";
    case ScaleRule::floor:
      return "floor";
    case ScaleRule::amax:
      return "amax";
    case ScaleRule::amax_or_smaller:
      return "amax_or_smaller";
    case ScaleRule::two_level:
      return "two_level";
  }
  return "";
}

const char* axis_text(recipe::Axis axis) {
  switch (axis) {
    case recipe::Axis::channels:
      return "channels";
    case recipe::Axis::queries:
      return "queries";
    case recipe::Axis::keys:
      return "keys";
  }
  return "";
}

/// Collects the tensors of the output; owns their bytes.
class Output {
 public:
  Output(const Inputs& inputs, const Recipe& recipe, int threads) : inputs_(inputs), recipe_(recipe), threads_(threads) {
    metadata_["recipe"] = recipe.name();
    metadata_["flamia"] = version();
  }

  Status add(const char* name, recipe::Operand operand, const OperandPolicy& policy, const HostTensor& tensor) {
    const recipe::OperandRow& row = recipe::row_of(operand);
    const bool one_copy = policy.first == policy.second;
    const std::string first = axis_text(row.first.contracts), second = axis_text(row.second.contracts);
    if (Status s = add_form(name, "", policy.first, one_copy ? first + ", " + second : first, operand, tensor); !s.ok()) return s;
    return one_copy ? Status() : add_form(name, "2", policy.second, second, operand, tensor);
  }

  Status write(const std::string& path) { return write_safetensors(path, tensors_, metadata_); }
  const std::vector<TensorToWrite>& tensors() const { return tensors_; }
  const Metadata& metadata() const { return metadata_; }

 private:
  Status add_form(const std::string& name, const std::string& suffix, const Quantisation& form, const std::string& contraction,
                  recipe::Operand operand, const HostTensor& tensor) {
    const int dim = inputs_.problem.head_dim;
    quantize::QuantiseInput input;
    input.tensor = tensor.view();
    input.heads = tensor.heads;
    input.dim = dim;
    input.rotate = recipe_.rotate && (dim == 64 || dim == 128) && (operand == recipe::Operand::q || operand == recipe::Operand::k);
    quantize::QuantisedTensor& made = kept_.emplace_back();
    if (Status s = quantize::quantise(input, inputs_.documents, form, threads_, &made); !s.ok())
      return {s.code(), "tensor \"" + name + "\": " + s.message()};
    const auto extent = [](std::int64_t n) { return static_cast<std::uint64_t>(n); };
    std::vector<std::uint64_t> shape{extent(made.tokens), extent(made.heads),
                                     extent(form.element == Element::e2m1 ? dim / 2 : dim)};
    tensors_.push_back({name + ".codes" + suffix, dtype_of(form.element), std::move(shape), made.codes.data()});
    if (form.scale != ScaleType::none) {
      std::vector<std::uint64_t> scale_shape(made.scale_shape.begin(), made.scale_shape.end());
      tensors_.push_back({name + ".scales" + suffix, dtype_of(form.scale), std::move(scale_shape), made.scales.data()});
    }
    if (!made.first_levels.empty())
      tensors_.push_back({name + ".tile_scales" + suffix,
                          "F32",
                          {extent(static_cast<std::int64_t>(made.first_levels.size()) / tensor.heads), extent(tensor.heads)},
                          reinterpret_cast<const std::uint8_t*>(made.first_levels.data())});
    metadata_[name + ".granularity" + suffix] = granularity_text(form);
    metadata_[name + ".contraction" + suffix] = contraction;
    metadata_[name + ".rule" + suffix] = rule_text(form.rule);
    if (form.tensor_scale != 1.f) metadata_[name + ".tensor_scale" + suffix] = fmt::format("{}", form.tensor_scale);
    if ((operand == recipe::Operand::q && recipe_.smoothing.q) || (operand == recipe::Operand::k && recipe_.smoothing.k))
      metadata_[name + ".smoothing"] = "the recipe subtracts a mean over tokens first; these are the codes of the tensor itself";
    if (input.rotate) metadata_[name + ".rotation"] = "signs, then Hadamard / sqrt(d)";
    return {};
  }

  const Inputs& inputs_;
  const Recipe& recipe_;
  int threads_;
  std::deque<quantize::QuantisedTensor> kept_;  // addresses stay
  std::vector<TensorToWrite> tensors_;
  Metadata metadata_;
};

Status run(const Quantize& flags, const Session& session) {
  if (session.json && is_standard_output(flags.out))
    return Status::invalid("--json and --out " + flags.out + " both write to standard output; drop one of them");
  Recipe recipe;
  if (Status s = parse_recipe(flags.recipe, &recipe); !s.ok()) return s;
  if (flags.options.device != Device::cpu)
    return Status::unsupported(
        "--device cuda: `flamia quantize` runs on the CPU; its codes are the GPU's bit for bit, so use --device cpu");
  if (Status s = check_writable("--out", flags.out, flags.in); !s.ok()) return s;
  Inputs inputs;
  if (Status s = load_inputs(flags.in, &inputs); !s.ok()) return s;

  struct Source {
    const char* name;
    recipe::Operand operand;
    const OperandPolicy& policy;
    const HostTensor* tensor;
  };
  const Source sources[] = {{"q", recipe::Operand::q, recipe.q, &inputs.q},
                            {"k", recipe::Operand::k, recipe.k, &inputs.k},
                            {"v", recipe::Operand::v, recipe.v, &inputs.v},
                            {"dout", recipe::Operand::d_out, recipe.d_out, inputs.d_o ? &*inputs.d_o : nullptr}};
  Progress progress("quantize", 4, session.progress);
  Output output(inputs, recipe, flags.options.threads);
  for (const Source& source : sources) {
    progress.step(source.name);
    if (source.tensor == nullptr) continue;
    if (Status s = output.add(source.name, source.operand, source.policy, *source.tensor); !s.ok()) return s;
  }
  if (Status s = output.write(flags.out); !s.ok()) return s;
  if (!session.json) return {};
  Json tensors = Json::object();
  for (const TensorToWrite& tensor : output.tensors())
    tensors.set(tensor.name, std::move(Json::object().set("dtype", tensor.dtype).set("shape", tensor.shape)));
  Json report = Json::object();
  report.set("out", flags.out).set("metadata", output.metadata()).set("tensors", std::move(tensors));
  return print(report.pretty() + "\n");
}

}  // namespace

void add_quantize(Program& program) {
  Session* const session = program.session();
  auto flags = std::make_shared<Quantize>();
  Command command = program.command("quantize", "codes and scales of a file's tensors");
  command.file("IN", &flags->in, "safetensors file with q, k, v (and dout, cu_seqlens)");
  command.required_text("--recipe", &flags->recipe, "R", "how to quantise; see `flamia recipes`");
  command.required_text("--out", &flags->out, "OUT", "file to write codes and scales to");
  add_device_flags(&command, &flags->options);
  add_report_flags(&command, session);
  command.footer(
      R"(Writes for X in q, k, v, dout (the tensors themselves, q and k after rotation: without the means
that a recipe with smoothing subtracts) X.codes and X.scales, and X.codes2 and X.scales2
where the recipe quantises the second use differently. Codes: F8_E4M3 or I8, shaped as X; 4 bits: U8 [T, heads, d/2], low nibble
first; unquantised: BF16 without scales. Scales: powers of two as F8_E8M0, NVFP4's as F8_E4M3, others F32. Token blocks
[sum of ceil(L/32), heads], per token [T, heads], 1xn along d [T, heads, d/n], per tensor [1]. The metadata says granularity,
contraction and rule of each.

Examples:
  flamia quantize in.safetensors --recipe mxfp8 --out codes.safetensors
  flamia quantize in.safetensors --recipe nvfp4 --out codes --json
)");
  command.action([flags, session] { return run(*flags, *session); });
}

}  // namespace flamia::cli
