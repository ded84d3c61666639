// SPDX-License-Identifier: Apache-2.0
// The kernels of the backward pass with dS in BF16: what ../backward/launch.cu may launch. Instances are compiled in files of their own.
#pragma once
#include <cuda_runtime_api.h>

#include "../backward/backward.hpp"

namespace flamia::sm90::ds16 {

cudaError_t launch_prepare(const BackwardParams& params, const BackwardConfig& config, int multiprocessors, cudaStream_t stream);

/// kernel.cuh's gradients kernel for one head dim and scale group.
template <int kHeadDim, ScaleGroup kScaleGroup>
cudaError_t launch_gradients(const BackwardParams& params, const BackwardConfig& config, int multiprocessors, cudaStream_t stream);

/// The same kernel for dK and dV alone.
template <int kHeadDim, ScaleGroup kScaleGroup>
cudaError_t launch_key_gradients(const BackwardParams& params, const BackwardConfig& config, int multiprocessors,
                                 cudaStream_t stream);

/// query_kernel.cuh's kernel of dQ alone.
template <int kHeadDim, ScaleGroup kScaleGroup>
cudaError_t launch_query_gradient(const BackwardParams& params, const BackwardConfig& config, int multiprocessors,
                                  cudaStream_t stream);

}  // namespace flamia::sm90::ds16
