// SPDX-License-Identifier: Apache-2.0
// Launch interface of the forward pass of `sage3` on Hopper (inference): NVFP4 products as FP16 products of code times scale, which are exact.
// An emulation of FP4 hardware: right in every product, at half the speed of FP8.
//
// The call enqueues one kernel and nothing else. Rows of `output` and `lse` outside every document are not written.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "flamia/types.hpp"
#include "kernels/cuda/sm90/layout.hpp"

namespace flamia::sm90::sage3 {

inline constexpr int kTile = 128;  // queries of an item, and of a mean of Q; keys of a tile

/// Element offset of (head, slot, channel) in the `columns_f16` layout, [head][slot / 8][d][8 FP16]: contracted along tokens.
FLAMIA_LAYOUT_FN std::int64_t columns_f16_offset(std::int64_t slots, int d, std::int64_t head, std::int64_t slot, int channel) {
  return (head * slots + slot / 8 * 8) * d + std::int64_t{channel} * 8 + slot % 8;
}

struct Params {
  const std::uint16_t* queries = nullptr;     // Q - q' : code times scale, rows_f16 [query_heads][slots]
  const std::uint16_t* keys = nullptr;        // K - k' : the same, [key_heads][slots]
  const std::uint16_t* values = nullptr;      // columns_f16 [key_heads][slots]
  const std::uint8_t* query_flags = nullptr;  // [heads][slots], not 0: the token holds NaN or infinity
  const std::uint8_t* key_flags = nullptr;
  const std::uint8_t* value_flags = nullptr;
  const float* query_means = nullptr;  // q' of a tile at its first slot, [query_heads][slots / kSlotAlign][d]
  const float* key_means = nullptr;    // k' of a document, [documents][key_heads][d]
  const float* mean_scores = nullptr;  // c q . k', [query_heads][slots]
  TensorView key_rows;                 // the caller's K, BF16 or FP16

  // Work: tiles of kTile queries, dearest first. The count is known on the device only.
  const Document* documents = nullptr;
  const WorkItem* items = nullptr;
  const std::int32_t* item_count = nullptr;

  void* output = nullptr;  // BF16 [tokens][query_heads][d]
  float* lse = nullptr;    // natural log, [query_heads][tokens]

  std::int64_t slots = 0;
  std::int64_t tokens = 0;
  int head_dim = 0;  // 64 or 128
  int query_heads = 0;
  int key_heads = 0;  // divides query_heads
  float softmax_scale = 0.f;
  bool causal = false;
  float first_level = 0.f;  // of P's scales: a constant, or 0: by the row's maximum in the tile
};

cudaError_t launch(const Params& params, cudaStream_t stream);

}  // namespace flamia::sm90::sage3
