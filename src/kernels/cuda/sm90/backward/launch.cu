// SPDX-License-Identifier: Apache-2.0
// The public entry: what is checked, and which compiled instance serves a configuration.
#include "../backward_ds16/instances.hpp"
#include "../backward_ds16/records.hpp"
#include "../launch_persistent.cuh"
#include "../split/split.hpp"
#include "checks.hpp"
#include "instances.hpp"
#include "work.hpp"

namespace flamia::sm90 {
namespace {

using namespace backward;

/// What the fused pass needs besides.
bool has_memory(const BackwardParams& p, const BackwardConfig& config) {
  const bool scaled = config.partials != PartialFormat::f16 || p.dq_exponent != nullptr;
  return p.dq_partials != nullptr && scaled;
}
bool valid(const BackwardParams& p, const BackwardConfig& config) {
  return has_shape(p, config) && has_operands(p, config) && has_work(p) && has_records(p, config) && has_results(p) &&
         has_memory(p, config);
}

template <class Launch>
cudaError_t checked(const BackwardParams& params, const BackwardConfig& config, Launch launch) {
  if (!valid(params, config)) return cudaErrorInvalidValue;
  int multiprocessors = 0;
  if (const cudaError_t error = count_multiprocessors(&multiprocessors); error != cudaSuccess) return error;
  return launch(multiprocessors);
}

template <int kHeadDim>
cudaError_t dispatch_scales(const BackwardParams& params, const BackwardConfig& config, int multiprocessors, cudaStream_t stream) {
  if (config.ds == DsFormat::bf16) {
    switch (config.scale_group) {
      case ScaleGroup::block:
        return ds16::launch_gradients<kHeadDim, ScaleGroup::block>(params, config, multiprocessors, stream);
      case ScaleGroup::token:
        return ds16::launch_gradients<kHeadDim, ScaleGroup::token>(params, config, multiprocessors, stream);
      case ScaleGroup::nvfp4:
        return ds16::launch_gradients<kHeadDim, ScaleGroup::nvfp4>(params, config, multiprocessors, stream);
    }
  }
  return config.scale_group == ScaleGroup::block
             ? launch_gradients<kHeadDim, ScaleGroup::block>(params, config, multiprocessors, stream)
             : launch_gradients<kHeadDim, ScaleGroup::token>(params, config, multiprocessors, stream);
}

}  // namespace

BackwardScratch backward_scratch(std::int64_t slots, int query_heads, int key_heads) {
  const auto groups = static_cast<std::size_t>(slots / kGroup) * static_cast<std::size_t>(query_heads);
  return {groups * kRowGroupBytes, static_cast<std::size_t>(slots) * static_cast<std::size_t>(key_heads) * sizeof(KeyRecord)};
}

int backward_heads_per_group(const BackwardConfig& config, std::int64_t slots, int query_heads, int key_heads,
                             std::int64_t l2_bytes) {
  const std::int64_t row_bytes = 4 * static_cast<std::int64_t>(config.head_dim) + kRowGroupBytes / kGroup;
  const std::int64_t bytes = slots * row_bytes * (query_heads / key_heads);
  const std::int64_t fitting = bytes > 0 ? l2_bytes / bytes : key_heads;
  return static_cast<int>(fitting < 1 ? 1 : fitting > key_heads ? key_heads : fitting);
}

cudaError_t launch_backward_prepare(const BackwardParams& params, const BackwardConfig& config, cudaStream_t stream) {
  if (config.deterministic) return launch_split_prepare(params, config, stream);
  return checked(params, config, [&](int multiprocessors) {
    if (config.ds == DsFormat::bf16) return ds16::launch_prepare(params, config, multiprocessors, stream);
    return launch_prepare(params, config.partials == PartialFormat::f16, multiprocessors, stream);
  });
}

cudaError_t launch_backward_gradients(const BackwardParams& params, const BackwardConfig& config, cudaStream_t stream) {
  return checked(params, config, [&](int multiprocessors) {
    return config.head_dim == 128 ? dispatch_scales<128>(params, config, multiprocessors, stream)
                                  : dispatch_scales<64>(params, config, multiprocessors, stream);
  });
}

cudaError_t launch_backward_finish(const BackwardParams& params, const BackwardConfig& config, cudaStream_t stream) {
  return checked(params, config, [&](int multiprocessors) { return launch_finish(params, config, multiprocessors, stream); });
}

cudaError_t launch_backward_prepared(const BackwardParams& params, const BackwardConfig& config, cudaStream_t stream) {
  const auto first = config.deterministic ? launch_split_query_gradient : launch_backward_gradients;
  const auto second = config.deterministic ? launch_split_key_gradients : launch_backward_finish;
  if (const cudaError_t error = first(params, config, stream); error != cudaSuccess) return error;
  return second(params, config, stream);
}

cudaError_t launch_backward(const BackwardParams& params, const BackwardConfig& config, cudaStream_t stream) {
  if (const cudaError_t error = launch_backward_prepare(params, config, stream); error != cudaSuccess) return error;
  return launch_backward_prepared(params, config, stream);
}

}  // namespace flamia::sm90
