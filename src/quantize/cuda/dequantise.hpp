// SPDX-License-Identifier: Apache-2.0
// Codes back to values: E4M3 times the token's power of two, in BF16. The backward pass makes its operands of dK and dQ of what the forward
// pass saved, so that codes and exponents are all that is kept in between.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "flamia/status.hpp"

namespace flamia::quantize::gpu {

struct DequantiseParams {
  /// Layouts of sm90/layout.hpp. Every product is exact but for those that are subnormal in BF16 (rounded to nearest even) and those beyond its
  /// largest finite value, which they become. A flagged token: 0.
  struct Operand {
    const std::uint8_t* rows = nullptr;       // `rows`
    const std::uint8_t* exponents = nullptr;  // [heads][slots]
    std::uint16_t* values = nullptr;          // `rows16`
    int heads = 0;                            // 0: there is no such operand
  };
  Operand operands[2];
  int head_dim = 0;                          // 64 or 128
  std::int64_t slots = 0;                    // sm90::slot_capacity
  const std::int32_t* used_slots = nullptr;  // device; kTailSlots slots after them are written too
};

/// One launch for all operands. It may run beside the kernel before it in the stream, if that one lets it (ptx/grid.cuh): what that one writes must
/// not be read here. Errors name the argument.
Status launch_dequantise(const DequantiseParams& params, cudaStream_t stream);

}  // namespace flamia::quantize::gpu
