// SPDX-License-Identifier: Apache-2.0
// The public entry: which compiled instance serves a call.
#include "int8.hpp"

namespace flamia::sm90::int8 {

template <int kHeadDim>
struct Forward;
template <int kHeadDim>
struct QueryGradient;
template <int kHeadDim>
struct KeyGradients;
template <class Kernel, class Params>
cudaError_t launch(const Params& params, cudaStream_t stream);

namespace {

bool valid(const Problem& p) {
  return (p.head_dim == 64 || p.head_dim == 128) && p.key_heads > 0 && p.query_heads > 0 && p.query_heads % p.key_heads == 0 &&
         p.key_heads_per_group > 0 && p.softmax_scale > 0.0f && p.slots % kKeyTile == 0 && p.window_left >= -1 &&
         p.window_right >= -1;
}

}  // namespace

cudaError_t launch_forward(const ForwardParams& params, cudaStream_t stream) {
  if (!valid(params)) return cudaErrorInvalidValue;
  return params.head_dim == 128 ? launch<Forward<128>>(params, stream) : launch<Forward<64>>(params, stream);
}

cudaError_t launch_query_gradient(const BackwardParams& params, cudaStream_t stream) {
  if (!valid(params)) return cudaErrorInvalidValue;
  return params.head_dim == 128 ? launch<QueryGradient<128>>(params, stream) : launch<QueryGradient<64>>(params, stream);
}
cudaError_t launch_key_gradients(const BackwardParams& params, cudaStream_t stream) {
  if (!valid(params)) return cudaErrorInvalidValue;
  return params.head_dim == 128 ? launch<KeyGradients<128>>(params, stream) : launch<KeyGradients<64>>(params, stream);
}
cudaError_t launch_backward(const BackwardParams& params, cudaStream_t stream) {
  if (const cudaError_t error = launch_query_gradient(params, stream); error != cudaSuccess) return error;
  return launch_key_gradients(params, stream);
}

}  // namespace flamia::sm90::int8
