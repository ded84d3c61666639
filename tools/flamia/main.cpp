// SPDX-License-Identifier: Apache-2.0
// The flamia program. Exit codes: 0 done, 2 wrong usage or input, 3 valid but unsupported, 4 a file cannot be read or written, 1 other.
#include <signal.h>  // NOLINT(modernize-deprecated-headers): POSIX

#include <cstdio>
#include <exception>
#include <new>
#include <optional>

#include "command.hpp"

namespace {

constexpr const char* kFooter =
    R"(Tensors come and go as safetensors files: q [T, H, d], k and v [T, Hkv, d], dout [T, H, d] (optional),
cu_seqlens int32 [B + 1] (optional, starting at 0: where the packed documents begin).

Examples:
  flamia demo
  flamia attend in.safetensors --recipe mxfp8-exact --backward --out out.safetensors
  flamia accuracy in.safetensors --recipes bf16,mxfp8,mxfp8-exact,fp8-tensor --csv accuracy.csv
  flamia leak in.safetensors --recipes mxfp8-exact,fp8-tensor
  flamia explain --recipe "mxfp8 ds=32x32" --arch sm_90

On a machine that is busy with other work set OMP_WAIT_POLICY=passive: threads that wait spin otherwise.

Exit codes: 0 done, 2 wrong usage or input, 3 valid but unsupported, 4 a file cannot be read or written, 1 other.
)";

int report(const flamia::Status& status) {
  if (!status.ok()) std::fprintf(stderr, "flamia: error: %s\n", flamia::cli::printable(status.message()).c_str());
  return flamia::cli::exit_code(status.code());
}

}  // namespace

int main(int argc, char** argv) {
  ::signal(SIGPIPE, SIG_IGN);  // a reader that left is an I/O error with a message, not a silent death
  ::signal(SIGXFSZ, SIG_IGN);  // so is a file that may not grow
  flamia::cli::Program program("Attention for training with 8-bit and 4-bit operands: run it, measure it, explain it.", kFooter);
  for (auto add :
       {flamia::cli::add_attend, flamia::cli::add_quantize, flamia::cli::add_accuracy, flamia::cli::add_leak,
        flamia::cli::add_recipes, flamia::cli::add_explain, flamia::cli::add_demo, flamia::cli::add_tables, flamia::cli::add_bench})
    add(program);
  if (const std::optional<int> said = program.parse(argc, argv)) return *said;
  try {
    return report(program.session()->action());
  } catch (const std::bad_alloc&) {
    return report({flamia::StatusCode::out_of_memory, "out of memory; use a smaller input"});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "flamia: error: unexpected failure: %s\n", flamia::cli::printable(error.what()).c_str());
    return flamia::cli::kOther;
  }
}
