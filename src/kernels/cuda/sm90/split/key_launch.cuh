// SPDX-License-Identifier: Apache-2.0
// Launching the kernel of dK and dV; included by the translation units that instantiate it.
#pragma once
#include <cuda_runtime_api.h>

#include "../launch_persistent.cuh"
#include "instances.hpp"
#include "key_kernel.cuh"

namespace flamia::sm90::split {

template <class Instance>
cudaError_t launch_keys(const BackwardParams& params, const BackwardConfig& config, int multiprocessors, cudaStream_t stream) {
  return launch_persistent<key_gradients_kernel<Instance>, static_cast<int>(sizeof(KeyStorage<Instance>)) + kSharedAlign>(
      multiprocessors, Instance::kThreads, stream, params, config.gradients, config.rotated);
}

template <int kHeadDim, ScaleGroup kScaleGroup>
cudaError_t launch_key_gradients(const BackwardParams& params, const BackwardConfig& config, int multiprocessors,
                                 cudaStream_t stream) {
  return config.record_codes ? launch_keys<KeyConfig<kHeadDim, kScaleGroup, true>>(params, config, multiprocessors, stream)
                             : launch_keys<KeyConfig<kHeadDim, kScaleGroup, false>>(params, config, multiprocessors, stream);
}

}  // namespace flamia::sm90::split
