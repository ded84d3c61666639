// SPDX-License-Identifier: Apache-2.0
// What `flamia bench` measures with.
#pragma once
#include <functional>
#include <string>

#include "flamia/status.hpp"

namespace flamia::cli {

struct Machine {
  std::string gpu, driver, cuda;
  double copy_bytes_per_second = 0;  // device-to-device, read and written, measured
};
Status machine(Machine* machine);

/// One field of nvidia-smi for the current device; empty where the tool is missing.
std::string ask_smi(const char* field);

/// Burst: median of 15 single launches. Sustained: median of 5 series of 20 launches back to back.
Status time_ms(const std::function<Status()>& enqueue, bool sustained, double* ms);

}  // namespace flamia::cli
