// SPDX-License-Identifier: Apache-2.0
// What the commands share: their flags, how they report, and their exit codes.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "call.hpp"
#include "flags.hpp"
#include "flamia/recipe.hpp"
#include "flamia/status.hpp"

namespace flamia::cli {

enum ExitCode { kDone = 0, kOther = 1, kBadInput = 2, kUnsupported = 3, kIo = 4 };
ExitCode exit_code(StatusCode code);

/// --json, --progress
void add_report_flags(Command* command, Session* session);
/// --threads, --device
void add_device_flags(Command* command, CallOptions* options);
/// --deterministic
void add_deterministic_flag(Command* command, CallOptions* options);
/// --causal, --full, --window, --scale. Call `finish_mask` when the command runs.
struct MaskFlags {
  bool causal = false, full = false;
  std::string window;
  std::optional<double> scale;
};
void add_mask_flags(Command* command, MaskFlags* flags);
Status finish_mask(const MaskFlags& flags, CallOptions* options);

/// "mxfp8,bf16,mxfp8 ds=32x32"
Status parse_recipes(const std::string& text, std::vector<Recipe>* recipes);
Status parse_recipe(const std::string& text, Recipe* recipe);
/// "16,1024,10000": finite numbers above 0
Status parse_factors(const std::string& text, std::vector<float>* factors);

/// Messages quote names and words from files and command lines: their control characters as \xNN, so that none reaches a terminal.
std::string printable(const std::string& text);

/// Writes to standard output; a closed or full one is an I/O error.
Status print(const std::string& text);

void add_attend(Program& program);
void add_quantize(Program& program);
void add_accuracy(Program& program);
void add_leak(Program& program);
void add_recipes(Program& program);
void add_explain(Program& program);
void add_demo(Program& program);
void add_tables(Program& program);
void add_bench(Program& program);

}  // namespace flamia::cli
