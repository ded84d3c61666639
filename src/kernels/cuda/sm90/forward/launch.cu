// SPDX-License-Identifier: Apache-2.0
// The public entry: which compiled instance serves a configuration.
#include "config.hpp"
#include "instances.hpp"

namespace flamia::sm90 {
namespace {

using namespace forward;

template <int kHeadDim, ScaleGroup kScaleGroup>
cudaError_t dispatch_reference(const ForwardParams& params, const ForwardConfig& config, cudaStream_t stream) {
  if (config.reference == RowReference::phase32) {
    return config.record_codes ? launch<Config<kHeadDim, kScaleGroup, RowReference::phase32, true>>(params, stream)
                               : launch<Config<kHeadDim, kScaleGroup, RowReference::phase32, false>>(params, stream);
  }
  return config.record_codes ? launch<Config<kHeadDim, kScaleGroup, RowReference::tilesum, true>>(params, stream)
                             : launch<Config<kHeadDim, kScaleGroup, RowReference::tilesum, false>>(params, stream);
}

template <int kHeadDim>
cudaError_t dispatch_scales(const ForwardParams& params, const ForwardConfig& config, cudaStream_t stream) {
  switch (config.scale_group) {
    case ScaleGroup::block:
      return dispatch_reference<kHeadDim, ScaleGroup::block>(params, config, stream);
    case ScaleGroup::token:
      return dispatch_reference<kHeadDim, ScaleGroup::token>(params, config, stream);
    case ScaleGroup::nvfp4:
      return dispatch_reference<kHeadDim, ScaleGroup::nvfp4>(params, config, stream);
  }
  return cudaErrorInvalidValue;
}

bool valid(const ForwardParams& params, const ForwardConfig& config) {
  const bool heads = params.key_heads > 0 && params.query_heads > 0 && params.query_heads % params.key_heads == 0;
  const bool record = !config.record_codes || (params.recorded_codes != nullptr && params.recorded_reference != nullptr &&
                                               params.record_keys > 0 && params.record_keys % kKeyTile == 0);
  return (config.head_dim == 64 || config.head_dim == 128) && heads && record && params.heads_per_group > 0 &&
         params.softmax_scale > 0.0f && params.slots % kKeyTile == 0 && params.window_left >= -1 && params.window_right >= -1;
}

}  // namespace

int query_tile(const ForwardConfig&) { return Config<128, ScaleGroup::block, RowReference::phase32, false>::kQueryTile; }

int heads_per_group(const ForwardConfig& config, std::int64_t slots, int query_heads, int key_heads, std::int64_t l2_bytes) {
  const int elements = config.scale_group == ScaleGroup::nvfp4 ? 3 : 2;  // bytes of an element of K and one of V
  const std::int64_t bytes = elements * slots * config.head_dim;         // of one key head
  const std::int64_t fitting = bytes > 0 ? l2_bytes / bytes : key_heads;
  const std::int64_t held = fitting < 1 ? 1 : fitting > key_heads ? key_heads : fitting;
  return static_cast<int>(held) * (query_heads / key_heads);
}

cudaError_t launch_forward(const ForwardParams& params, const ForwardConfig& config, cudaStream_t stream) {
  if (!valid(params, config)) return cudaErrorInvalidValue;
  return config.head_dim == 128 ? dispatch_scales<128>(params, config, stream) : dispatch_scales<64>(params, config, stream);
}

}  // namespace flamia::sm90
