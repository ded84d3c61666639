// SPDX-License-Identifier: Apache-2.0
// What the public entries of both backward passes demand of their parameters.
#pragma once
#include <cuda_runtime_api.h>

#include "backward.hpp"

namespace flamia::sm90::backward {

inline bool has_shape(const BackwardParams& p, const BackwardConfig& config) {
  const bool heads = p.key_heads > 0 && p.query_heads > 0 && p.query_heads % p.key_heads == 0 && p.heads_per_group > 0;
  const bool scores = config.scale_group != ScaleGroup::nvfp4 || config.ds == DsFormat::bf16;
  return (config.head_dim == 64 || config.head_dim == 128) && heads && scores && p.softmax_scale > 0.0f && p.slots > 0 &&
         p.slots % kKeyTile == 0 && p.window_left >= -1 && p.window_right >= -1;
}
inline bool has_operands(const BackwardParams& p, const BackwardConfig& config) {
  const bool other_copies =
      config.ds == DsFormat::bf16 ? p.query_rows16 != nullptr : p.query_transposed != nullptr && p.key_transposed != nullptr;
  const bool keys = config.scale_group == ScaleGroup::nvfp4 && !config.deterministic
                        ? p.key_codes != nullptr && p.key_nvfp4 != nullptr && p.key_scales != nullptr
                        : p.key_rows != nullptr;
  return other_copies && keys && p.query_rows != nullptr && p.value_rows != nullptr && p.gradient_rows != nullptr &&
         p.gradient_transposed != nullptr && p.query_exponents != nullptr && p.gradient_exponents != nullptr &&
         p.key_exponents != nullptr && p.value_exponents != nullptr && p.row_reference != nullptr && p.d_prime != nullptr;
}
inline bool has_work(const BackwardParams& p) {
  return p.documents != nullptr && p.items != nullptr && p.item_count != nullptr && p.used_slots != nullptr && p.counter != nullptr;
}
/// Scratch that both passes need, and the buffer of the test mode.
inline bool has_records(const BackwardParams& p, const BackwardConfig& config) {
  return p.row_records != nullptr && p.key_records != nullptr &&
         (!config.record_codes || (p.recorded_codes != nullptr && p.record_keys > 0));
}
inline bool has_results(const BackwardParams& p) { return p.d_query != nullptr && p.d_key != nullptr && p.d_value != nullptr; }

}  // namespace flamia::sm90::backward
