// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace flamia::cli {

/// BF16 N(0, 1), counter-based: element i depends on (seed, i) alone. `data`: device, `count` elements.
cudaError_t fill_normal_bf16(void* data, std::int64_t count, std::uint64_t seed, cudaStream_t stream);

}  // namespace flamia::cli
