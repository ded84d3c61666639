// SPDX-License-Identifier: Apache-2.0
// Checks and times the Hopper backward passes. Modes: check [seed], time, all (default), one <workload>; then fused, split, ds16 or ds16_split
// (default: all).
#include <random>

#include "check.cuh"
#include "time.cuh"

namespace {

using namespace bench;

BackwardConfig config_of(int d, ScaleGroup group, PartialFormat partials, GradientFormat gradients, bool record) {
  BackwardConfig c;
  c.head_dim = d, c.scale_group = group, c.partials = partials, c.gradients = gradients, c.record_codes = record;
  return c;
}

void check_all(std::uint64_t seed) {
  const auto block = ScaleGroup::block, token = ScaleGroup::token;
  const auto f16 = PartialFormat::f16, f32 = PartialFormat::f32;
  const auto bf16 = GradientFormat::bf16, fp32 = GradientFormat::f32;
  std::mt19937 random(static_cast<unsigned>(seed));
  std::vector<int> ragged;
  for (int i = 0; i < 9; ++i) ragged.push_back(1 + static_cast<int>(random() % 420));
  ragged[3] = 0, ragged[5] = 1;
  const std::vector<int> even{256, 128, 384};
  std::printf("seed %llu, relative L2 (worst row)\n", static_cast<unsigned long long>(seed));
  check_case<128>("128 block causal, even", {even, 4, 4, 128, -1, 0, config_of(128, block, f32, fp32, false)}, seed);
  check_case<128>("128 block causal, ragged, GQA", {ragged, 4, 2, 128, -1, 0, config_of(128, block, f16, bf16, false)}, seed + 10);
  check_case<128>("128 block causal, codes", {ragged, 2, 1, 128, -1, 0, config_of(128, block, f16, fp32, true)}, seed + 20);
  check_case<128>("128 block full", {ragged, 2, 2, 128, -1, -1, config_of(128, block, f16, bf16, false)}, seed + 30);
  check_case<128>("128 block window 100, 40", {ragged, 2, 2, 128, 100, 40, config_of(128, block, f16, fp32, false)}, seed + 40);
  check_case<128>("128 token sticky causal, ragged, GQA", {ragged, 4, 2, 128, -1, 0, config_of(128, token, f16, fp32, false), true},
                  seed + 50);
  check_case<128>("128 token sticky window 70, 0", {ragged, 2, 2, 128, 70, 0, config_of(128, token, f32, fp32, false), true},
                  seed + 60);
  check_case<128>("128 block causal, logits x 9", {ragged, 2, 2, 128, -1, 0, config_of(128, block, f16, fp32, false), false, 3.0f},
                  seed + 70);
  check_case<128>("128 block causal, stress",
                  {ragged, 2, 1, 128, -1, 0, config_of(128, block, f16, fp32, false), false, 1.0f, true}, seed + 72);
  check_case<128>("128 token sticky causal, stress",
                  {ragged, 2, 1, 128, -1, 0, config_of(128, token, f16, fp32, false), true, 1.0f, true}, seed + 74);
  check_case<64>("64 block causal, ragged, GQA", {ragged, 4, 2, 64, -1, 0, config_of(64, block, f16, fp32, false)}, seed + 80);
  check_case<64>("64 token sticky full", {ragged, 2, 2, 64, -1, -1, config_of(64, token, f16, bf16, false), true}, seed + 90);
  if (is_ds16()) {
    const auto nvfp4 = ScaleGroup::nvfp4;
    check_case<128>("128 NVFP4 block causal, ragged, GQA", {ragged, 4, 2, 128, -1, 0, config_of(128, nvfp4, f16, fp32, false)},
                    seed + 120);
    check_case<128>("128 NVFP4 token sticky full", {ragged, 2, 2, 128, -1, -1, config_of(128, nvfp4, f32, fp32, false), true},
                    seed + 130);
    check_case<128>("128 NVFP4 token sticky causal, codes",
                    {ragged, 2, 1, 128, -1, 0, config_of(128, nvfp4, f16, fp32, true), true}, seed + 140);
    check_case<64>("64 NVFP4 block causal", {ragged, 4, 2, 64, -1, 0, config_of(64, nvfp4, f16, bf16, false)}, seed + 150);
    std::printf("exactness, NVFP4 token sticky\n");
    check_exactness<128>({{70, 300, 200}, 2, 2, 128, -1, 0, config_of(128, nvfp4, f16, fp32, false), true}, seed + 160);
  }
  std::printf("exactness, token sticky\n");
  check_exactness<128>({{70, 300, 200}, 2, 2, 128, -1, 0, config_of(128, token, f16, fp32, false), true}, seed + 100);
  std::printf("exactness, block\n");
  check_exactness<128>({{70, 300, 200}, 4, 2, 128, -1, 0, config_of(128, block, f16, fp32, false), false}, seed + 110);
}

void time_all(const std::vector<Pass>& passes, const char* only) {
  for (const Workload& w : workloads()) {
    if (only != nullptr && std::string(only) != w.name) continue;
    const auto one = [&](const char* variant, ScaleGroup group, PartialFormat partials, int mixed) {
      const Shape shape{w.lengths, 16, 16, 128, -1, 0, config_of(128, group, partials, GradientFormat::bf16, false)};
      std::vector<const char*> names;
      const Timing timing = time_workload(shape, mixed, 5, names);
      print_timing(w.name, variant, shape, timing, names);
    };
    for (const Pass which : passes) {
      pass = which;
      one("block uniform", ScaleGroup::block, PartialFormat::f16, 0);
      one("token uniform", ScaleGroup::token, PartialFormat::f16, 0);
      if (is_ds16()) one("NVFP4 uniform", ScaleGroup::nvfp4, PartialFormat::f16, 0);
      if (w.lengths[0] != 16384) continue;
      one("block mixed 1 in 8", ScaleGroup::block, PartialFormat::f16, 8);
      if (which == Pass::fused || which == Pass::ds16) one("block f32 uniform", ScaleGroup::block, PartialFormat::f32, 0);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "all";
  const std::string last = argc > 2 ? argv[argc - 1] : "";
  std::vector<Pass> passes;
  for (const auto& [name, which] :
       {std::pair{"split", Pass::split}, {"fused", Pass::fused}, {"ds16", Pass::ds16}, {"ds16_split", Pass::ds16_split}})
    if (last == name) passes = {which};
  if (passes.empty()) passes = {Pass::split, Pass::fused, Pass::ds16, Pass::ds16_split};
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  std::printf("%s\n", device.name);
  if (mode == "check" || mode == "all") {
    const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
    for (const Pass which : passes) {
      pass = which;
      std::printf("%s pass\n", name_of(which));
      check_all(seed != 0 ? seed : std::random_device{}());
    }
    std::printf("%d failures\n", failures);
  }
  if (mode == "time" || mode == "all") time_all(passes, nullptr);
  if (mode == "one") time_all(passes, argc > 2 ? argv[2] : "4x16384");
  return failures == 0 ? 0 : 1;
}
