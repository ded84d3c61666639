// SPDX-License-Identifier: Apache-2.0
// NVFP4 of K back to values, for kernels that read scores' operands from memory: from the codes and scales that the forward pass saved.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "flamia/status.hpp"

namespace flamia::quantize::gpu {

struct ExpandNvfp4Params {
  const std::uint8_t* codes = nullptr;  // layouts of Nvfp4Outputs (quantise.hpp)
  const std::uint8_t* scales = nullptr;
  std::uint16_t* halves = nullptr;  // the values that the quantiser wrote, bit for bit
  int heads = 0;
  int head_dim = 0;                          // 64 or 128
  std::int64_t slots = 0;                    // sm90::slot_capacity
  const std::int32_t* used_slots = nullptr;  // device; kTailSlots slots after them become zeros
};

/// One launch. Errors name the argument.
Status launch_expand_nvfp4(const ExpandNvfp4Params& params, cudaStream_t stream);

}  // namespace flamia::quantize::gpu
