// SPDX-License-Identifier: Apache-2.0
// The unfused control: the same result by four kernels, each reading and writing device memory (rotation rounded to BF16 in between,
// which is kind to the control: FP32 there would move more).
#pragma once
#include <cuda_runtime_api.h>

#include "quantize/cuda/quantise.hpp"

namespace flamia::bench {

/// rotate (if params.rotate) -> maxima and exponents -> codes as rows -> transposed codes (if wanted). BF16, d = 128, token-blocks.
/// `rotated` has the input's size.
cudaError_t launch_unfused(const quantize::gpu::QuantiseParams& params, void* rotated, cudaStream_t stream);

}  // namespace flamia::bench
