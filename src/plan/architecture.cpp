// SPDX-License-Identifier: Apache-2.0
#include "plan/architecture.hpp"

#include <string>
#include <vector>

#include "recipe/names.hpp"

namespace flamia::plan {
namespace {

//                               name                     precision         scales            group  K-major only
constexpr MmaKind kCpuKinds[] = {{"loops, BF16 values", Precision::bf16, ScaleType::none, 0, false},
                                 {"loops, FP8 values", Precision::fp8, ScaleType::none, 0, false},
                                 {"loops, FP4 values", Precision::fp4, ScaleType::none, 0, false},
                                 {"loops, INT8 values", Precision::int8, ScaleType::none, 0, false}};

// The transposing forms of wgmma exist for 16-bit types only.
constexpr MmaKind kSm90Kinds[] = {{"wgmma bf16", Precision::bf16, ScaleType::none, 0, false},
                                  {"wgmma e4m3", Precision::fp8, ScaleType::none, 0, true},
                                  {"wgmma f16 of code times scale, exact", Precision::fp4, ScaleType::e4m3, 16, true},
                                  {"wgmma s8", Precision::int8, ScaleType::none, 0, true}};

// 8-bit operands come in either major order; 4-bit ones only contiguous along the contraction.
constexpr MmaKind kSm100Kinds[] = {{"tcgen05 kind::f16", Precision::bf16, ScaleType::none, 0, false},
                                   {"tcgen05 kind::f8f6f4", Precision::fp8, ScaleType::none, 0, false},
                                   {"tcgen05 kind::mxf8f6f4", Precision::fp8, ScaleType::ue8m0, 32, false},
                                   {"tcgen05 kind::mxf4", Precision::fp4, ScaleType::ue8m0, 32, true},
                                   {"tcgen05 kind::mxf4nvf4", Precision::fp4, ScaleType::e4m3, 16, true},
                                   {"tcgen05 kind::i8", Precision::int8, ScaleType::none, 0, false}};

constexpr int kGpuHeadDims[] = {64, 128};

constexpr ArchitectureFacts kArchitectures[] = {
    {Architecture::cpu, "cpu", "CPU, the reference backend", "tested on every build", kCpuKinds, true, {}, 256},
    {Architecture::sm_90, "sm_90", "NVIDIA Hopper (sm_90a)", "its kernels run on an H200", kSm90Kinds, false, kGpuHeadDims, 128},
    {Architecture::sm_100, "sm_100", "NVIDIA Blackwell (sm_100a)", "never run: a target of recipes only", kSm100Kinds, false,
     kGpuHeadDims, 128},
};

}  // namespace

std::span<const ArchitectureFacts> architectures() { return kArchitectures; }

const ArchitectureFacts& facts(Architecture architecture) { return kArchitectures[static_cast<std::size_t>(architecture)]; }

Status parse_architecture(std::string_view text, Architecture* architecture) {
  std::vector<std::string> names;
  for (const ArchitectureFacts& one : kArchitectures) {
    if (text == one.name || text == std::string(one.name) + "a")
      return *architecture = one.id, Status{};  // sm_90a is how nvcc calls it
    names.emplace_back(one.name);
  }
  return Status::invalid("architecture \"" + std::string(text.substr(0, 64)) + "\" is unknown; " + recipe::suggestion(text, names));
}

}  // namespace flamia::plan
