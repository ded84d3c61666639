// SPDX-License-Identifier: Apache-2.0
// What a machine's matrix unit takes: facts, as data. What follows from them for a recipe: recipe/lower.hpp.
#pragma once
#include <cstdint>
#include <span>
#include <string_view>

#include "flamia/recipe.hpp"
#include "flamia/status.hpp"

namespace flamia::plan {

enum class Architecture : std::uint8_t { cpu, sm_90, sm_100 };

/// Operand types that one instruction multiplies with each other.
enum class Precision : std::uint8_t { bf16, fp8, fp4, int8 };
constexpr Precision precision_of(Element element) {
  switch (element) {
    case Element::bf16:
      return Precision::bf16;
    case Element::e4m3:
    case Element::e5m2:
      return Precision::fp8;
    case Element::e2m1:
      return Precision::fp4;
    case Element::int8:
      return Precision::int8;
  }
  return Precision::bf16;
}

struct MmaKind {
  const char* name;
  Precision precision;
  ScaleType scales;   // block scales that it applies along the contraction; none: it applies none
  int scale_group;    // elements along the contraction that share one
  bool k_major_only;  // both operands must be contiguous along the contraction
};

struct ArchitectureFacts {
  Architecture id;
  const char* name;  // as in `--arch`
  const char* title;
  const char* status;  // what has been run on it
  std::span<const MmaKind> kinds;
  bool any_scales;                 // applies scales of any type and group (loops, not an instruction)
  std::span<const int> head_dims;  // empty: multiples of 16 up to `largest_head_dim`
  int largest_head_dim;
};

std::span<const ArchitectureFacts> architectures();
const ArchitectureFacts& facts(Architecture architecture);

/// Reads "cpu", "sm_90", "sm_100"; else invalid_argument with the names that exist.
Status parse_architecture(std::string_view text, Architecture* architecture);

}  // namespace flamia::plan
