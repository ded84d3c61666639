// SPDX-License-Identifier: Apache-2.0
// The public entry: what is checked, and which compiled instance serves a configuration.
#include "instances.hpp"
#include "work.hpp"

namespace flamia::sm90 {
namespace {

using namespace backward;

bool has_operands(const BackwardParams& p) {
  return p.query_rows != nullptr && p.query_transposed != nullptr && p.key_rows != nullptr && p.key_transposed != nullptr &&
         p.value_rows != nullptr && p.gradient_rows != nullptr && p.gradient_transposed != nullptr &&
         p.query_exponents != nullptr && p.gradient_exponents != nullptr && p.key_exponents != nullptr &&
         p.value_exponents != nullptr && p.row_reference != nullptr && p.d_prime != nullptr;
}
bool has_work(const BackwardParams& p) {
  return p.documents != nullptr && p.items != nullptr && p.item_count != nullptr && p.used_slots != nullptr && p.counter != nullptr;
}
bool has_memory(const BackwardParams& p, const BackwardConfig& config) {
  const bool scaled = config.partials != PartialFormat::f16 || p.dq_exponent != nullptr;
  const bool turns = !(config.deterministic || config.record_codes) || p.turns != nullptr;
  const bool record = !config.record_codes || (p.recorded_codes != nullptr && p.record_keys > 0);
  return p.row_records != nullptr && p.key_records != nullptr && p.dq_partials != nullptr && p.d_query != nullptr &&
         p.d_key != nullptr && p.d_value != nullptr && scaled && turns && record;
}
bool valid(const BackwardParams& p, const BackwardConfig& config) {
  const bool heads = p.key_heads > 0 && p.query_heads > 0 && p.query_heads % p.key_heads == 0 && p.heads_per_group > 0;
  return (config.head_dim == 64 || config.head_dim == 128) && heads && p.softmax_scale > 0.0f && p.slots > 0 &&
         p.slots % kKeyTile == 0 && p.window_left >= -1 && p.window_right >= -1 && has_operands(p) && has_work(p) &&
         has_memory(p, config);
}

cudaError_t count_multiprocessors(int* multiprocessors) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(multiprocessors, cudaDevAttrMultiProcessorCount, device);
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
  return config.scale_group == ScaleGroup::block
             ? launch_gradients<kHeadDim, ScaleGroup::block>(params, config, multiprocessors, stream)
             : launch_gradients<kHeadDim, ScaleGroup::token>(params, config, multiprocessors, stream);
}

}  // namespace

BackwardScratch backward_scratch(std::int64_t slots, int query_heads, int key_heads) {
  const auto groups = static_cast<std::size_t>(slots / kGroup) * static_cast<std::size_t>(query_heads);
  return {groups * kRowGroupBytes, static_cast<std::size_t>(slots) * static_cast<std::size_t>(key_heads) * sizeof(KeyRecord),
          groups * sizeof(std::int32_t)};
}

int backward_heads_per_group(const BackwardConfig& config, std::int64_t slots, int query_heads, int key_heads,
                             std::int64_t l2_bytes) {
  const std::int64_t row_bytes = 4 * static_cast<std::int64_t>(config.head_dim) + kRowGroupBytes / kGroup;
  const std::int64_t bytes = slots * row_bytes * (query_heads / key_heads);
  const std::int64_t fitting = bytes > 0 ? l2_bytes / bytes : key_heads;
  return static_cast<int>(fitting < 1 ? 1 : fitting > key_heads ? key_heads : fitting);
}

cudaError_t launch_backward_prepare(const BackwardParams& params, const BackwardConfig& config, cudaStream_t stream) {
  return checked(params, config, [&](int multiprocessors) {
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

cudaError_t launch_backward(const BackwardParams& params, const BackwardConfig& config, cudaStream_t stream) {
  if (const cudaError_t error = launch_backward_prepare(params, config, stream); error != cudaSuccess) return error;
  if (const cudaError_t error = launch_backward_gradients(params, config, stream); error != cudaSuccess) return error;
  return launch_backward_finish(params, config, stream);
}

}  // namespace flamia::sm90
