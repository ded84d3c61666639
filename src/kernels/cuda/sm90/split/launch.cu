// SPDX-License-Identifier: Apache-2.0
// The public entry of the split backward pass: what is checked, and which compiled instance serves a configuration.
#include "../backward/checks.hpp"
#include "../backward/instances.hpp"
#include "../backward_ds16/instances.hpp"
#include "../launch_persistent.cuh"
#include "instances.hpp"

namespace flamia::sm90 {
namespace {

using namespace split;

bool valid(const BackwardParams& p, const BackwardConfig& config) {
  return backward::has_shape(p, config) && backward::has_operands(p, config) && backward::has_work(p) &&
         backward::has_records(p, config) && backward::has_results(p) && (config.ds == DsFormat::e4m3 || p.key_rows16 != nullptr);
}

template <class Launch>
cudaError_t checked(const BackwardParams& params, const BackwardConfig& config, Launch launch) {
  if (!valid(params, config)) return cudaErrorInvalidValue;
  int multiprocessors = 0;
  if (const cudaError_t error = count_multiprocessors(&multiprocessors); error != cudaSuccess) return error;
  return launch(multiprocessors);
}

template <int kHeadDim, class Launch>
cudaError_t dispatch_scales(ScaleGroup group, Launch launch) {
  switch (group) {
    case ScaleGroup::block:
      return launch.template operator()<kHeadDim, ScaleGroup::block>();
    case ScaleGroup::token:
      return launch.template operator()<kHeadDim, ScaleGroup::token>();
    case ScaleGroup::nvfp4:
      return launch.template operator()<kHeadDim, ScaleGroup::nvfp4>();
  }
  return cudaErrorInvalidValue;
}
/// launch<head dim, scale group>() of the configuration.
template <class Launch>
cudaError_t dispatch(const BackwardConfig& config, Launch launch) {
  return config.head_dim == 128 ? dispatch_scales<128>(config.scale_group, launch)
                                : dispatch_scales<64>(config.scale_group, launch);
}

}  // namespace

cudaError_t launch_split_prepare(const BackwardParams& params, const BackwardConfig& config, cudaStream_t stream) {
  return checked(params, config, [&](int multiprocessors) {
    if (config.ds == DsFormat::bf16) {
      BackwardConfig unscaled = config;
      unscaled.partials = PartialFormat::f32;  // nobody reads a pre-scale
      return ds16::launch_prepare(params, unscaled, multiprocessors, stream);
    }
    return backward::launch_prepare(params, false, multiprocessors, stream);
  });
}

cudaError_t launch_split_query_gradient(const BackwardParams& params, const BackwardConfig& config, cudaStream_t stream) {
  return checked(params, config, [&](int multiprocessors) {
    return dispatch(config, [&]<int kHeadDim, ScaleGroup kScaleGroup>() {
      if constexpr (kScaleGroup != ScaleGroup::nvfp4) {
        if (config.ds == DsFormat::e4m3)
          return launch_query_gradient<kHeadDim, kScaleGroup>(params, config, multiprocessors, stream);
      }
      return ds16::launch_query_gradient<kHeadDim, kScaleGroup>(params, config, multiprocessors, stream);
    });
  });
}

cudaError_t launch_split_key_gradients(const BackwardParams& params, const BackwardConfig& config, cudaStream_t stream) {
  return checked(params, config, [&](int multiprocessors) {
    return dispatch(config, [&]<int kHeadDim, ScaleGroup kScaleGroup>() {
      if constexpr (kScaleGroup != ScaleGroup::nvfp4) {
        if (config.ds == DsFormat::e4m3)
          return launch_key_gradients<kHeadDim, kScaleGroup>(params, config, multiprocessors, stream);
      }
      return ds16::launch_key_gradients<kHeadDim, kScaleGroup>(params, config, multiprocessors, stream);
    });
  });
}

}  // namespace flamia::sm90
