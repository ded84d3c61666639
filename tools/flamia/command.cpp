// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace flamia::cli {
namespace {

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ',') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  for (std::string& part : parts) {
    part.erase(0, std::min(part.find_first_not_of(' '), part.size()));
    part.erase(part.find_last_not_of(' ') + 1);
  }
  return parts;
}

template <class Number>
bool read_number(const std::string& text, Number* number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

}  // namespace

ExitCode exit_code(StatusCode code) {
  switch (code) {
    case StatusCode::ok:
      return kDone;
    case StatusCode::invalid_argument:
      return kBadInput;
    case StatusCode::unsupported:
      return kUnsupported;
    case StatusCode::io_error:
      return kIo;
    case StatusCode::out_of_memory:
    case StatusCode::device_error:
      return kOther;
  }
  return kOther;
}

void add_report_flags(Command* command, Session* session) {
  command->flag("--json", &session->json, "print one JSON value instead of text");
  command->flag("--progress", &session->progress, "show progress on standard error even if it is no terminal");
}

void add_device_flags(Command* command, CallOptions* options) {
  command->whole("--threads", &options->threads, 0, 4096, "N", "CPU threads, 0 = all cores; results do not depend on it");
  command->choice("--device", {"cpu", "cuda"}, "cpu|cuda", "cpu or cuda",
                  [options](const std::string& name) { options->device = name == "cuda" ? Device::cuda : Device::cpu; });
}

void add_deterministic_flag(Command* command, CallOptions* options) {
  command->flag("--deterministic", &options->deterministic,
                "GPU: sum dQ in a fixed order, so that it repeats bit for bit (the CPU always does)");
}

void add_mask_flags(Command* command, MaskFlags* flags) {
  command->flag("--causal", &flags->causal, "a query sees no later key (the default)");
  command->flag("--full", &flags->full, "a query sees all keys of its document");
  command->exclude("--full", "--causal");
  command->text("--window", &flags->window, "L,R",
                "query i sees keys i-L ... i+R, -1 = unlimited; --causal still hides later keys");
  command->number("--scale", &flags->scale, "S", "softmax scale (default 1 / sqrt(head dim))");
}

Status finish_mask(const MaskFlags& flags, CallOptions* options) {
  options->mask.causal = !flags.full;
  options->mask.left = options->mask.right = -1;
  if (!flags.window.empty()) {
    const std::vector<std::string> parts = split(flags.window);
    Mask& mask = options->mask;
    if (parts.size() != 2 || !read_number(parts[0], &mask.left) || !read_number(parts[1], &mask.right) || mask.left < -1 ||
        mask.right < -1)
      return Status::invalid("--window " + flags.window +
                             ": must be two whole numbers L,R of at least -1 (-1 = unlimited), as in --window 256,0");
  }
  options->scale = 0.f;
  if (flags.scale) {
    if (!(*flags.scale >= std::ldexp(1., -100) && *flags.scale <= std::ldexp(1., 100)))
      return Status::invalid(fmt::format(
          "--scale {}: must be a number above 0, from 2^-100 to 2^100; leave it out for 1 / sqrt(head dim)", *flags.scale));
    options->scale = static_cast<float>(*flags.scale);
  }
  return {};
}

Status parse_recipe(const std::string& text, Recipe* recipe) {
  Status s = Recipe::parse(text, recipe);
  return s.ok() ? s : Status(s.code(), "--recipe: " + s.message());
}

Status parse_recipes(const std::string& text, std::vector<Recipe>* recipes) {
  for (const std::string& part : split(text)) {
    Recipe recipe;
    if (part.empty())
      return Status::invalid("--recipes \"" + text + "\": has an empty entry; name recipes as in --recipes mxfp8,bf16");
    if (Status s = Recipe::parse(part, &recipe); !s.ok()) return {s.code(), "--recipes: " + s.message()};
    recipes->push_back(recipe);
  }
  return {};
}

Status parse_factors(const std::string& text, std::vector<float>* factors) {
  for (const std::string& part : split(text)) {
    float factor = 0;
    if (!read_number(part, &factor) || !std::isfinite(factor) || factor <= 0.f)
      return Status::invalid("--factors " + text + ": \"" + part +
                             "\" is no finite number above 0; write them as in --factors 16,1024,10000");
    factors->push_back(factor);
  }
  return {};
}

std::string printable(const std::string& text) {
  std::string shown;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte < 0x20 && c != '\n') || byte == 0x7f)
      shown += fmt::format("\\x{:02x}", byte);
    else
      shown += c;
  }
  return shown;
}

Status print(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0)
    return {StatusCode::io_error, std::string("standard output cannot be written: ") + std::strerror(errno)};
  return {};
}

}  // namespace flamia::cli
