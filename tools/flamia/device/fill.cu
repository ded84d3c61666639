// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>

#include "device/fill.hpp"

namespace flamia::cli {
namespace {

/// A well-mixed 64-bit word of (seed, index): two rounds of multiply and shift (Steele, Lea and Flood's splitmix64 finaliser).
__device__ std::uint64_t mix(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

__global__ void fill(__nv_bfloat16* data, std::int64_t count, std::uint64_t seed) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    const std::uint64_t word = mix(mix(seed) + static_cast<std::uint64_t>(i) * 0x9E3779B97F4A7C15ull);
    const float u = (static_cast<float>(word >> 40) + 0.5f) * 0x1p-24f, angle = static_cast<float>(word & 0xffffffu) * 0x1p-23f;
    data[i] = __float2bfloat16_rn(sqrtf(-2.0f * logf(u)) * cospif(angle));
  }
}

}  // namespace

cudaError_t fill_normal_bf16(void* data, std::int64_t count, std::uint64_t seed, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  fill<<<1024, 256, 0, stream>>>(static_cast<__nv_bfloat16*>(data), count, seed);
  return cudaGetLastError();
}

}  // namespace flamia::cli
