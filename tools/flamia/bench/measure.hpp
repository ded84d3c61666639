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
  bool training = false;   // copies and statistics for the backward pass too
  std::uint64_t seed = 0;
};

struct PartTime {
  std::string part;  // schedule, quantise, forward, inference (all three; a call is a training call, with the backward pass)
  double ms = 0;
  double flops = 0;       // of the part; 0: counts bytes, not operations
  double bytes = 0;       // that the part must move, 0 where it does not matter
  double error = -1;      // relative L2 against float64 on the unquantised input, -1 = not measured
  std::string clock_mhz;  // of the multiprocessors right after the part; empty without nvidia-smi
};

/// Medians after warm-up on fresh N(0, 1) operands.
Status measure(const Workload& workload, const Recipe& recipe, const BenchOptions& options, std::vector<PartTime>* parts);

struct Machine {
  std::string gpu, driver, cuda;
  double copy_bytes_per_second = 0;  // device-to-device, read and written, measured
};
Status machine(Machine* machine);

}  // namespace flamia::cli
