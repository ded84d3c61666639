// SPDX-License-Identifier: Apache-2.0
// What `nvfp4-full` needs of Q, K, V and dO before its products: two NVFP4 copies of each, made by one launch an operand that reads it once.
// No kernel multiplies them on Hopper: this is here to be timed (and compared with the host quantiser). d = 128, BF16, documents of whole
// tiles of 128 tokens.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace flamia::bench {

struct FullParams {
  const std::uint16_t* input = nullptr;  // [tokens][heads][128]
  int heads = 0;
  std::int64_t tokens = 0;
  bool rotate = false;
  const float* divisor = nullptr;  // l, [heads][tokens]: dO, which also has two levels of scales

  // 16 channels share a scale: contracted along the head dim.
  std::uint8_t* row_codes = nullptr;   // [heads][tokens][64]
  std::uint8_t* row_scales = nullptr;  // [heads][tokens][8]
  // 16 tokens share one: contracted along tokens.
  std::uint8_t* column_codes = nullptr;   // [heads][tokens / 16][128][8]
  std::uint8_t* column_scales = nullptr;  // [heads][tokens / 16][128]
  float* levels = nullptr;                // [tokens / 128][heads], with `divisor`
};

cudaError_t launch_full(const FullParams& params, cudaStream_t stream);

}  // namespace flamia::bench
