// SPDX-License-Identifier: Apache-2.0
// The compiled instances of the kernel, one translation unit for each head dim and scale group (instance_*.cu).
#pragma once
#include "config.hpp"

namespace flamia::sm90::forward {

template <class Config>
cudaError_t launch(const ForwardParams& params, cudaStream_t stream);

}  // namespace flamia::sm90::forward
