// SPDX-License-Identifier: Apache-2.0
// The error of what a benchmark computed, on a part of it that a CPU can check.
#pragma once
#include "bench/workloads.hpp"
#include "device/memory.hpp"
#include "flamia/attention.hpp"

namespace flamia::cli {

/// Dense device tensors of one call, all BF16: q, k, v, o and, of a training call, d_o and the gradients (else empty).
struct CallBuffers {
  DeviceBuffer q, k, v, o, d_o, d_q, d_k, d_v;
};

/// Relative L2 against float64 on the unquantised input; -1: not measured.
struct Errors {
  double output = -1;
  double gradients = -1;  // the greatest of dQ, dK and dV
};

/// Measured on one key head (or two, where each has one query head) of the shortest document that is not empty, where that is not too long.
Status measure_errors(const Workload& workload, const Problem& problem, const CallBuffers& buffers, Errors* errors);

}  // namespace flamia::cli
