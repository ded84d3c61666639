// SPDX-License-Identifier: Apache-2.0
// The forward kernel with P from a line instead of exp2 (Mitchell's, Schraudolph's): head dim 128, row reference tilesum. Inference alone, and
// in no library: it is here to be timed.
#pragma once
#include "../../../src/kernels/cuda/sm90/forward/config.hpp"

namespace bench {

cudaError_t launch_line(const flamia::sm90::ForwardParams& params, flamia::sm90::ScaleGroup group,
                        flamia::sm90::forward::Exponential kind, cudaStream_t stream);

}  // namespace bench
