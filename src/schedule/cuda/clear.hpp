// SPDX-License-Identifier: Apache-2.0
// Rows outside every document: output and gradients 0, LSE +inf. The attention kernels never touch them.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "flamia/status.hpp"
#include "flamia/types.hpp"
#include "schedule/cuda/schedule.hpp"

namespace flamia::schedule::gpu {

struct ClearTensor {
  MutableTensorView tensor;  // data null: not wanted
  int heads = 0;
};

struct ClearParams {
  ClearTensor tensors[3];  // O; or dQ, dK, dV
  float* lse = nullptr;    // [heads of tensors[0]][tokens]; null: not wanted
  int head_dim = 0;
  std::int64_t tokens = 0;
};

/// One launch; costs its launch alone when documents cover the row.
Status launch_clear_uncovered(const ClearParams& params, const Totals* totals, cudaStream_t stream);

}  // namespace flamia::schedule::gpu
