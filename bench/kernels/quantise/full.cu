// SPDX-License-Identifier: Apache-2.0
// A thread block makes a tile of 128 tokens of one head, a warp 16 of them: rows from registers, columns by way of shared memory.
#include "full.hpp"

#include "quantize/cuda/divide.cuh"
#include "quantize/cuda/nvfp4.cuh"
#include "quantize/cuda/unit.cuh"

namespace flamia::bench {
namespace {

using namespace quantize::gpu;
constexpr int kDim = 128, kWarps = 8, kThreads = 32 * kWarps, kWarpFloats = kGroupTokens * kDim;

/// E2M1 by the scale; without a sign where that is zero.
__device__ __forceinline__ std::uint32_t code_of(float x, const BlockScale& scale) {
  const std::uint32_t magnitude = __float_as_uint(numerics::mul(scale.magnitude(x), 0x1p-126f)) >> 22;
  return scale.value == 0.f ? 0u : magnitude | (__float_as_uint(x) >> 28 & 8u);
}

/// Magnitudes of the tile's greatest element over 448 * 6, at least 2^-100.
__device__ float level_of(std::uint32_t own, std::uint32_t (&exchange)[kWarps]) {
  own = __reduce_max_sync(kFullWarp, own);
  if (threadIdx.x % 32 == 0) exchange[threadIdx.x / 32] = own;
  __syncthreads();
  std::uint32_t greatest = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) greatest = max(greatest, exchange[w]);
  return greatest == 0 ? 1.f : fmaxf(__fdiv_rn(__uint_as_float(greatest), 2688.f), 0x1p-100f);
}

template <bool kRotate, bool kGradient>
__global__ __launch_bounds__(kThreads, 2) void full_kernel(const __grid_constant__ FullParams p) {
  extern __shared__ float4 shared[];
  __shared__ std::uint32_t exchange[kWarps];
  const Lane lane;
  const int head = static_cast<int>(blockIdx.x) % p.heads, in_warp = static_cast<int>(threadIdx.x % 32);
  const std::int64_t tile = blockIdx.x / p.heads, token = 128 * tile + kGroupTokens * lane.warp;
  const std::int64_t stride = std::int64_t{kDim} * p.heads, row = head * p.tokens + token;
  Raw<kDim> raw[kLaneTokens];
  load(p.input + token * stride + head * kDim, stride, kGroupTokens, lane, raw);
  [[maybe_unused]] Raw<kDim> signs;
  if constexpr (kRotate) signs = load_signs<kDim>(lane);
  Values<kDim> x[kLaneTokens];
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    if constexpr (kRotate) {
      rotate_unscaled<__nv_bfloat16>(raw[i], signs, lane, x[i]);
    } else {
      unpack<__nv_bfloat16>(raw[i], x[i]);
    }
    [[maybe_unused]] const Divider by(kGradient ? p.divisor[row + lane_token(lane.k, i)] : 1.f);
#pragma unroll
    for (int m = 0; m < Values<kDim>::kOctets; ++m)
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        float& v = x[i].octet[m][c];
        if constexpr (kRotate) v = numerics::mul(v, numerics::rotation_norm(kDim));
        if constexpr (kGradient) v = by(v);
      }
  }
  float level = 1.f;
  if constexpr (kGradient) {
    level = level_of(max(magnitude(x[0]), magnitude(x[1])), exchange);
    if (threadIdx.x == 0) p.levels[tile * p.heads + head] = level;
  }
  const float divisor = numerics::mul(6.f, level), inverse = nearest_inverse(divisor);

  // Values to shared memory; neighbours in k begin with the other half of an octet, against bank conflicts.
  float4* const values = shared + lane.warp * (kWarpFloats / 4);
  const int late = lane.k % 2;
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i)
#pragma unroll
    for (int m = 0; m < Values<kDim>::kOctets; ++m) {
      const float(&v)[8] = x[i].octet[m];
      float4* const to = values + (lane_token(lane.k, i) * kDim + 8 * (kTokenLanes * m + lane.j)) / 4;
      const float4 low{v[0], v[1], v[2], v[3]}, high{v[4], v[5], v[6], v[7]};
      to[late] = late != 0 ? high : low;
      to[1 - late] = late != 0 ? low : high;
    }

  std::uint32_t words[kLaneTokens][Values<kDim>::kOctets], bytes[kLaneTokens][Values<kDim>::kOctets];
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i)
#pragma unroll
    for (int m = 0; m < Values<kDim>::kOctets; ++m) {
      float amax = 0.f;
#pragma unroll
      for (int c = 0; c < 8; ++c) amax = fmaxf(amax, fabsf(x[i].octet[m][c]));
      const BlockScale scale = block_scale(fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, 1)), divisor, inverse, level);
      bytes[i][m] = scale.byte;
      words[i][m] = 0;
#pragma unroll
      for (int c = 0; c < 8; ++c) words[i][m] |= code_of(x[i].octet[m][c], scale) << 4 * c;
    }
  __syncwarp();

  const std::int64_t group = row / kGroupTokens;
#pragma unroll 1
  for (int r = 0; r < kDim / 32; ++r) {
    const int channel = 32 * r + in_warp;
    float v[kGroupTokens], amax = 0.f;
#pragma unroll
    for (int t = 0; t < kGroupTokens; ++t) {
      v[t] = reinterpret_cast<const float*>(values)[t * kDim + channel];
      amax = fmaxf(amax, fabsf(v[t]));
    }
    const BlockScale scale = block_scale(amax, divisor, inverse, level);
    uint2 codes{0, 0};
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      codes.x |= code_of(v[t], scale) << 4 * t;
      codes.y |= code_of(v[t + 8], scale) << 4 * t;
    }
    reinterpret_cast<uint2*>(p.column_codes)[group * kDim + channel] = codes;
    p.column_scales[group * kDim + channel] = static_cast<std::uint8_t>(scale.byte);
  }
  __syncwarp();

  // Rows by way of shared memory, so that whole lines leave.
  auto* const staged = reinterpret_cast<std::uint32_t*>(values);
  auto* const staged_scales = reinterpret_cast<std::uint8_t*>(staged + kGroupTokens * kDim / 8);
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i)
#pragma unroll
    for (int m = 0; m < Values<kDim>::kOctets; ++m) {
      const int at = lane_token(lane.k, i), index = kTokenLanes * m + lane.j;
      staged[at * (kDim / 8) + index] = words[i][m];
      if (lane.j % 2 == 0) staged_scales[at * (kDim / kScaleChannels) + index / 2] = static_cast<std::uint8_t>(bytes[i][m]);
    }
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 2; ++r)
    reinterpret_cast<uint4*>(p.row_codes + row * (kDim / 2))[32 * r + in_warp] =
        reinterpret_cast<const uint4*>(staged)[32 * r + in_warp];
  reinterpret_cast<std::uint32_t*>(p.row_scales + row * (kDim / kScaleChannels))[in_warp] =
      reinterpret_cast<const std::uint32_t*>(staged_scales)[in_warp];
}

template <bool kRotate, bool kGradient>
cudaError_t enqueue(const FullParams& p, cudaStream_t stream) {
  constexpr int shared_bytes = kWarps * kWarpFloats * static_cast<int>(sizeof(float));
  if (const cudaError_t error =
          cudaFuncSetAttribute(full_kernel<kRotate, kGradient>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
      error != cudaSuccess)
    return error;
  full_kernel<kRotate, kGradient><<<static_cast<unsigned>(p.tokens / 128 * p.heads), kThreads, shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_full(const FullParams& p, cudaStream_t stream) {
  if (p.tokens % 128 != 0 || (p.rotate && p.divisor != nullptr)) return cudaErrorInvalidValue;
  return p.divisor != nullptr ? enqueue<false, true>(p, stream)
         : p.rotate           ? enqueue<true, false>(p, stream)
                              : enqueue<false, false>(p, stream);
}

}  // namespace flamia::bench
