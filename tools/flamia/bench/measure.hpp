// SPDX-License-Identifier: Apache-2.0
// One workload, one recipe, on the GPU: milliseconds of each part and the error of what was computed.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "bench/workloads.hpp"
#include "flamia/attention.hpp"

namespace flamia::cli {

struct BenchOptions {
  int heads = 16, key_heads = 16, head_dim = 128;
  Mask mask;
  bool sustained = false;  // back to back instead of single launches
  bool training = false;   // a training call: copies and statistics for the backward pass, and that pass
  bool deterministic = false;
  std::uint64_t seed = 0;
};

struct PartTime {
  std::string part;  // see `flamia bench --help`
  double ms = 0;
  double flops = 0;       // of the part; 0: counts bytes, not operations
  double bytes = 0;       // that the part must move, 0 where it does not matter
  double error = -1;      // relative L2 against float64 on the unquantised input, -1 = not measured
  std::string clock_mhz;  // of the multiprocessors right after the part; empty without nvidia-smi
  double gigabytes = 0;   // device memory of the whole call: tensors, saved and both workspaces
};

/// Whether there is a GPU that runs this, without using it.
Status make_plan(const Workload& workload, const Recipe& recipe, const BenchOptions& options, Plan* plan);

/// Medians after warm-up on fresh N(0, 1) operands.
Status measure(const Workload& workload, const Recipe& recipe, const BenchOptions& options, std::vector<PartTime>* parts);

}  // namespace flamia::cli
