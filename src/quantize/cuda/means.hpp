// SPDX-License-Identifier: Apache-2.0
// Means of K over every document, for the recipes that subtract them (INT8, sage3). Sums are made in double, so a mean differs from the host's in
// its last bit at most, and not at all as long as double holds the sums exactly.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "flamia/status.hpp"
#include "flamia/types.hpp"
#include "kernels/cuda/sm90/layout.hpp"

namespace flamia::quantize::gpu {

/// Where a document's mean lies, [head_dim].
enum class MeanLayout {
  slots,      // [heads][slots / 16]: at the document's first slot
  documents,  // [documents][heads]
};

/// The first of them, of the document that begins at `slot`.
FLAMIA_LAYOUT_FN std::int64_t mean_offset(std::int64_t slots, int d, std::int64_t head, std::int64_t slot) {
  return (head * slots + slot) / sm90::kSlotAlign * d;
}

struct MeanParams {
  TensorView input;  // [tokens, heads, head_dim], BF16 or FP16; data and strides multiples of 16 bytes
  int heads = 0;
  int head_dim = 0;  // 64 or 128
  MeanLayout layout = MeanLayout::slots;
  std::int64_t slots = 0;                     // of MeanLayout::slots
  const sm90::Document* documents = nullptr;  // [document_capacity], empty ones among them
  std::int64_t document_capacity = 0;
  float* means = nullptr;
};

/// One launch. Tokens with NaN or infinity are left out.
Status launch_means(const MeanParams& params, cudaStream_t stream);

}  // namespace flamia::quantize::gpu
