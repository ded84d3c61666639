// SPDX-License-Identifier: Apache-2.0
// Launching the gradients kernel; included by the translation units that instantiate it.
#pragma once
#include <cuda_runtime_api.h>

#include "../launch_persistent.cuh"
#include "instances.hpp"
#include "kernel.cuh"

namespace flamia::sm90::ds16 {

template <class Config>
cudaError_t launch(const BackwardParams& params, const BackwardConfig& config, int multiprocessors, cudaStream_t stream) {
  return launch_persistent<gradients_kernel<Config>, static_cast<int>(sizeof(Storage<Config>))>(
      multiprocessors, Config::kThreads, stream, params,
      row_arrays<Config::kScaleGroup>(params.row_records, params.slots, params.query_heads), config.gradients, config.rotated);
}

template <int kHeadDim, ScaleGroup kScaleGroup, PartialFormat kPartials>
cudaError_t launch_partials(const BackwardParams& params, const BackwardConfig& config, int multiprocessors, cudaStream_t stream) {
  return config.record_codes ? launch<Config<kHeadDim, kScaleGroup, kPartials, true>>(params, config, multiprocessors, stream)
                             : launch<Config<kHeadDim, kScaleGroup, kPartials, false>>(params, config, multiprocessors, stream);
}

template <int kHeadDim, ScaleGroup kScaleGroup>
cudaError_t launch_gradients(const BackwardParams& params, const BackwardConfig& config, int multiprocessors, cudaStream_t stream) {
  return config.partials == PartialFormat::f16
             ? launch_partials<kHeadDim, kScaleGroup, PartialFormat::f16>(params, config, multiprocessors, stream)
             : launch_partials<kHeadDim, kScaleGroup, PartialFormat::f32>(params, config, multiprocessors, stream);
}

/// dK and dV alone. There are no partial sums, so their format does not matter.
template <int kHeadDim, ScaleGroup kScaleGroup>
cudaError_t launch_key_gradients(const BackwardParams& params, const BackwardConfig& config, int multiprocessors,
                                 cudaStream_t stream) {
  constexpr auto partials = PartialFormat::f32;
  return config.record_codes
             ? launch<Config<kHeadDim, kScaleGroup, partials, true, Makes::key_gradients>>(params, config, multiprocessors, stream)
             : launch<Config<kHeadDim, kScaleGroup, partials, false, Makes::key_gradients>>(params, config, multiprocessors,
                                                                                            stream);
}

}  // namespace flamia::sm90::ds16
