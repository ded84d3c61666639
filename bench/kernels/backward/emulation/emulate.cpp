// SPDX-License-Identifier: Apache-2.0
// Runs the backward kernels and their GPU checks on the CPU, thread by thread. Built by build.sh from rewritten copies of the sources.
// Arguments: "all", "short" (a case of each kind: a few seconds) or the number of a case; seed; "fused", "split", "ds16" or "ds16_split"
// (default: all passes).
#include "ptx.hpp"

// The runtime calls that the checks make, on host memory. One multiprocessor: blocks run one after the other.
extern "C" {
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = aligned_alloc(256, (bytes + 255) / 256 * 256);
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  free(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  memset(pointer, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t) { return cudaMemset(pointer, value, bytes); }
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 1;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "error"; }
}

#include "check.cuh"

#include <numeric>
#include <string>
#include <vector>

namespace {

using namespace bench;

BackwardConfig config_of(int d, ScaleGroup group, PartialFormat partials, GradientFormat gradients, bool record) {
  BackwardConfig config;
  config.head_dim = d, config.scale_group = group, config.partials = partials, config.gradients = gradients,
  config.record_codes = record;
  return config;
}

void run_case(int number, std::uint64_t seed) {
  const auto block = ScaleGroup::block, token = ScaleGroup::token, nvfp4 = ScaleGroup::nvfp4;
  const auto f16 = PartialFormat::f16, f32 = PartialFormat::f32;
  const auto bf16 = GradientFormat::bf16, fp32 = GradientFormat::f32;
  const std::vector<int> ragged{37, 300, 0, 1, 150};
  switch (number) {
    case 0:
      return check_case<128>("128 block causal, one tile", {{128}, 1, 1, 128, -1, 0, config_of(128, block, f32, fp32, false)},
                             seed);
    case 1:
      return check_case<128>("128 block causal, ragged, GQA", {ragged, 2, 1, 128, -1, 0, config_of(128, block, f16, fp32, true)},
                             seed);
    case 2:
      return check_case<128>("128 token sticky causal, ragged, GQA",
                             {ragged, 2, 1, 128, -1, 0, config_of(128, token, f16, fp32, true), true}, seed);
    case 3:
      return check_case<128>("128 block full", {{37, 300, 1, 140}, 1, 1, 128, -1, -1, config_of(128, block, f16, fp32, true)},
                             seed);
    case 4:
      return check_case<128>("128 block window 100, 40",
                             {{37, 300, 1, 140}, 1, 1, 128, 100, 40, config_of(128, block, f16, fp32, true)}, seed);
    case 5:
      return check_case<64>("64 token sticky full", {{37, 300, 1}, 2, 1, 64, -1, -1, config_of(64, token, f32, fp32, true), true},
                            seed);
    case 6:
      return check_case<64>("64 block causal", {{37, 300, 1}, 2, 1, 64, -1, 0, config_of(64, block, f16, bf16, false)}, seed);
    case 7:
      return check_case<128>("128 block causal, stress",
                             {{333}, 1, 1, 128, -1, 0, config_of(128, block, f16, fp32, true), false, 1.0f, true}, seed);
    case 8:
      return check_case<128>("128 token sticky causal, stress",
                             {{333}, 1, 1, 128, -1, 0, config_of(128, token, f16, fp32, true), true, 1.0f, true}, seed);
    case 9:
      return check_exactness<128>({{70, 300, 50}, 2, 2, 128, -1, 0, config_of(128, token, f16, fp32, false), true}, seed);
    case 10:
      return check_exactness<128>({{70, 300, 50}, 2, 2, 128, -1, 0, config_of(128, block, f16, fp32, false), false}, seed);
    // Codes are not recorded: steps without masks run the loop body of their own.
    case 11:
      return check_case<128>("128 block causal, plain steps", {{530}, 2, 1, 128, -1, 0, config_of(128, block, f16, fp32, false)},
                             seed);
    case 12:
      return check_case<128>("128 token sticky full, plain steps",
                             {{260}, 2, 1, 128, -1, -1, config_of(128, token, f32, fp32, false), true}, seed);
    // Scores from NVFP4, only with dS in BF16; the other operands per token and sticky, or in token-blocks.
    case 13:
      return check_case<128>("128 NVFP4 token sticky causal, ragged, GQA",
                             {ragged, 2, 1, 128, -1, 0, config_of(128, nvfp4, f16, fp32, true), true}, seed);
    case 14:
      return check_case<128>("128 NVFP4 block causal, plain steps",
                             {{530}, 2, 1, 128, -1, 0, config_of(128, nvfp4, f32, fp32, false)}, seed);
    case 15:
      return check_case<64>("64 NVFP4 block full", {{37, 300, 1}, 2, 1, 64, -1, -1, config_of(64, nvfp4, f16, fp32, true)}, seed);
    case 16:
      return check_exactness<128>({{70, 300, 50}, 2, 2, 128, -1, 0, config_of(128, nvfp4, f16, fp32, false), true}, seed);
    // dS 2^(eG + eQ) of a step beyond and below FP32's range, dS and dK within it.
    case 17:
      return check_case<128>("128 block full, Q x 2^110, dO x 2^40",
                             {{200}, 2, 1, 128, -1, -1, config_of(128, block, f16, fp32, false), false, 1.0f, false, 110, 40},
                             seed);
    case 18:
      return check_case<128>("128 token sticky causal, Q x 2^110, dO x 2^40",
                             {{200}, 2, 1, 128, -1, 0, config_of(128, token, f16, fp32, false), true, 1.0f, false, 110, 40}, seed);
    case 19:
      return check_case<128>("128 block causal, Q x 2^-100, dO x 2^-60",
                             {{200}, 2, 1, 128, -1, 0, config_of(128, block, f16, fp32, false), false, 1.0f, false, -100, -60},
                             seed);
    default:
      std::printf("no case %d\n", number), ++failures;
  }
}

/// The cases that `which` means for the pass that is set. Scores from NVFP4 (13 to 16) exist with dS in BF16 alone.
std::vector<int> cases(const std::string& which) {
  std::vector<int> some{1, 2, 6, 9, 13, 18, 19};
  if (which == "all") {
    some.resize(20);
    std::iota(some.begin(), some.end(), 0);
  } else if (which != "short") {
    return {std::atoi(which.c_str())};
  }
  std::erase_if(some, [](int number) { return !is_ds16() && number >= 13 && number <= 16; });
  return some;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string which = argc > 1 ? argv[1] : "all";
  const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const std::string only = argc > 3 ? argv[3] : "";
  for (const Pass one : {Pass::fused, Pass::split, Pass::ds16, Pass::ds16_split}) {
    const std::string name = name_of(one);
    if (!only.empty() && only != name) continue;
    pass = one;
    std::printf("%s pass\n", name.c_str());
    for (int number : cases(which)) run_case(number, seed);
  }
  std::printf("%d failures\n", failures);
  return failures;
}
