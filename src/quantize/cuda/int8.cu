// SPDX-License-Identifier: Apache-2.0
//   means      a thread block per document and head: sums in double
//   quantise   a thread block per block of 64 or 128 tokens and head:
//              load -> less the mean -> greatest magnitude -> codes -> shared memory -> rows and transposed
#include "quantize/cuda/int8.hpp"

#include <limits>
#include <string>
#include <type_traits>

#include "kernels/cuda/dense_strides.hpp"
#include "kernels/cuda/device_status.hpp"
#include "kernels/cuda/ptx/convert.cuh"
#include "kernels/cuda/sm90/layout.hpp"
#include "numerics/platform.hpp"
#include "quantize/cuda/checks.hpp"
#include "quantize/cuda/tile.cuh"

namespace flamia::quantize::gpu {
namespace {

constexpr int kThreads = 256, kMeanWarps = 16;
constexpr float kLargest = 127.0f;

// ---- means ---------------------------------------------------------------------------------------------------------------------

template <int D, class Element>
__global__ void __launch_bounds__(32 * kMeanWarps) means_kernel(const __grid_constant__ MeanParams p) {
  constexpr int kWords = D / 64;  // of two channels, a lane
  __shared__ double sums[kMeanWarps][D];
  __shared__ int counts[kMeanWarps];
  const sm90::Document document = p.documents[blockIdx.x / static_cast<unsigned>(p.heads)];
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.heads)), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (document.length <= 0) return;
  const auto* const data = static_cast<const std::uint16_t*>(p.input.data) + document.token_start * p.input.token_stride +
                           head * p.input.head_stride + 2 * kWords * lane;
  double sum[2 * kWords] = {};
  int count = 0;
#pragma unroll 4
  for (int token = warp; token < document.length; token += kMeanWarps) {
    const auto* const words = reinterpret_cast<const std::uint32_t*>(data + token * p.input.token_stride);
    float x[2 * kWords];
    bool finite = true;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const std::uint32_t pair = __ldg(words + i);
      x[2 * i] = Pair<Element>::low(pair), x[2 * i + 1] = Pair<Element>::high(pair);
      finite = finite && fabsf(x[2 * i]) <= 3.4e38f && fabsf(x[2 * i + 1]) <= 3.4e38f;
    }
    if (!__all_sync(kFullWarp, finite)) continue;
    ++count;
#pragma unroll
    for (int i = 0; i < 2 * kWords; ++i) sum[i] += static_cast<double>(x[i]);
  }
#pragma unroll
  for (int i = 0; i < 2 * kWords; ++i) sums[warp][2 * kWords * lane + i] = sum[i];
  if (lane == 0) counts[warp] = count;
  __syncthreads();
  if (threadIdx.x >= D) return;
  double total = 0;
  int tokens = 0;
  for (int w = 0; w < kMeanWarps; ++w) {
    total += sums[w][threadIdx.x];
    tokens += counts[w];
  }
  p.means[mean_offset(p.slots, D, head, document.slot_start) + threadIdx.x] =
      tokens == 0 ? 0.0f : static_cast<float>(total / static_cast<double>(tokens));
}

// ---- codes ---------------------------------------------------------------------------------------------------------------------

/// A thread's place: one octet of channels, and of the tokens every kTokensAPass-th. A warp has eight tokens by four octets: it loads 64 bytes of each
/// token, and what it stores of `rows16` are whole core matrices.
template <int D>
struct Place {
  static constexpr int kOctets = D / 8, kTokensAPass = kThreads / kOctets, kParts = kOctets / 4;  // warps that share a token
  int octet, token, part;
  __device__ Place() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    part = warp % kParts;
    octet = 4 * part + lane / 8;
    token = warp / kParts * 8 + lane % 8;
  }
};

/// Eight BF16-rounded numbers of a row of O.
__device__ __forceinline__ void load_output(const TensorView& o, std::int64_t token, int head, int channel, float (&x)[8]) {
  const std::int64_t at = token * o.token_stride + head * o.head_stride + channel;
  if (o.dtype == DType::bf16) {
    unpack_octet<__nv_bfloat16>(__ldg(reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(o.data) + at)), x);
    return;
  }
  const auto* const four = reinterpret_cast<const float4*>(static_cast<const float*>(o.data) + at);
  const float4 a = __ldg(four), b = __ldg(four + 1);
  const float all[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = __bfloat162float(__float2bfloat16_rn(all[i]));
}

template <class Element>
__device__ __forceinline__ uint4 as_bf16(const uint4& octet) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) return octet;
  float x[8];
  unpack_octet<Element>(octet, x);
  return {ptx::pack_bf16x2(x[0], x[1]), ptx::pack_bf16x2(x[2], x[3]), ptx::pack_bf16x2(x[4], x[5]), ptx::pack_bf16x2(x[6], x[7])};
}

/// x / scale to nearest even (as divide.cuh), as a byte. `plain`: the scale is too small for the residuals.
__device__ __forceinline__ std::uint32_t encode(float x, float scale, float reciprocal, bool plain) {
  const float q0 = __fmul_rn(x, reciprocal);
  const float q1 = __fmaf_rn(__fmaf_rn(-q0, scale, x), reciprocal, q0);
  const float q2 = __fmaf_rn(__fmaf_rn(-q1, scale, x), reciprocal, q1);
  const float quotient = plain ? x / scale : q2;
  constexpr float integers = 12582912.0f;  // 1.5 * 2^23: the sum's low byte is the rounded number
  return __float_as_uint(__fadd_rn(quotient, integers)) & 0xffu;
}

/// What eight codes stand for, in BF16.
__device__ __forceinline__ uint4 decode(const std::uint32_t (&code)[2], float scale) {
  float x[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) x[c] = __fmul_rn(static_cast<float>(static_cast<std::int8_t>(code[c / 4] >> 8 * (c % 4))), scale);
  return {ptx::pack_bf16x2(x[0], x[1]), ptx::pack_bf16x2(x[2], x[3]), ptx::pack_bf16x2(x[4], x[5]), ptx::pack_bf16x2(x[6], x[7])};
}

template <int D>
struct Staging {
  static constexpr int kStride = D + 16;  // bytes of a token: neither side meets bank conflicts
  std::uint8_t code[128 * kStride];
  std::uint32_t greatest[kThreads / 32];
  float sums[128][Place<D>::kParts];  // of products of rows, by the warps that share a token
};

/// A warp's share of a token's sum, `x` = a thread's.
template <int D>
__device__ __forceinline__ void keep_sum(Staging<D>& staging, const Place<D>& at, int token, float x) {
  x = __fadd_rn(x, __shfl_xor_sync(kFullWarp, x, 8));
  x = __fadd_rn(x, __shfl_xor_sync(kFullWarp, x, 16));
  if (threadIdx.x % 32 < 8) staging.sums[token][at.part] = x;
}
template <int D>
__device__ __forceinline__ float sum_of(const Staging<D>& staging, int token) {
  float sum = staging.sums[token][0];
#pragma unroll
  for (int part = 1; part < Place<D>::kParts; ++part) sum = __fadd_rn(sum, staging.sums[token][part]);
  return sum;
}

/// x as the sum of three BF16 numbers (24 bits), as eight of which five are 0.
__device__ __forceinline__ uint4 three_parts(float x) {
  const auto bits = [](__nv_bfloat16 part) { return static_cast<std::uint32_t>(__bfloat16_as_ushort(part)); };
  const __nv_bfloat16 high = __float2bfloat16_rn(x);
  const float rest = __fadd_rn(x, -__bfloat162float(high));
  const __nv_bfloat16 middle = __float2bfloat16_rn(rest);
  const __nv_bfloat16 low = __float2bfloat16_rn(__fadd_rn(rest, -__bfloat162float(middle)));
  return {bits(high) | bits(middle) << 16, bits(low), 0, 0};
}

/// Slots behind the last document.
template <int D>
__device__ void clear_tail(const Int8Params& p, std::int64_t slot) {
  const uint4 zero{0, 0, 0, 0};
  for (int i = threadIdx.x; i < sm90::kBlock * D / 16; i += kThreads) {
    if (p.rows != nullptr) reinterpret_cast<uint4*>(p.rows + slot * D)[i] = zero;
    if (p.transposed != nullptr) reinterpret_cast<uint4*>(p.transposed + slot * D)[i] = zero;
  }
  for (int i = threadIdx.x; p.rows16 != nullptr && i < sm90::kBlock * D / 8; i += kThreads)
    reinterpret_cast<uint4*>(p.rows16 + slot * D)[i] = zero;
  for (int i = threadIdx.x; p.row_d != nullptr && i < sm90::kBlock; i += kThreads) {
    reinterpret_cast<uint4*>(p.row_d)[slot + i] = zero;
    p.row_lse[slot + i] = 0.0f;
  }
  if (threadIdx.x < sm90::kBlock / sm90::kSlotAlign) p.scales[slot / sm90::kSlotAlign + threadIdx.x] = 0.0f;
}

/// Codes leave: `groups` groups of 16 slots from `slot` (counted through all heads) on.
template <int D>
__device__ __forceinline__ void store_codes(const Int8Params& p, const std::uint8_t* code, std::int64_t slot, int groups) {
  constexpr int kStride = Staging<D>::kStride;
  if (p.rows != nullptr) {
    auto* const out = reinterpret_cast<uint4*>(p.rows + slot * D);
    for (int i = threadIdx.x; i < groups * D; i += kThreads) {
      const int row = i / (D / 2) * 8 + i % 8, chunk = i / 8 % (D / 16);
      out[i] = *reinterpret_cast<const uint4*>(code + row * kStride + chunk * 16);
    }
  }
  if (p.transposed != nullptr) {
    auto* const out = reinterpret_cast<uint4*>(p.transposed + slot * D);
    for (int i = threadIdx.x; i < groups * D; i += kThreads) {
      const std::uint8_t* const column = code + i / D * 16 * kStride + i % D;
      const auto word = [&](int token) {  // columns of order pi: tokens t, t + 1, t + 8, t + 9
        return static_cast<std::uint32_t>(column[token * kStride] | column[(token + 1) * kStride] << 8 |
                                          column[(token + 8) * kStride] << 16) |
               static_cast<std::uint32_t>(column[(token + 9) * kStride]) << 24;
      };
      out[i] = {word(0), word(2), word(4), word(6)};
    }
  }
}

template <int D, int kTokens, class Element>
__global__ void __launch_bounds__(kThreads) int8_kernel(const __grid_constant__ Int8Params p) {
  __shared__ alignas(16) Staging<D> staging;
  constexpr int kTokensAPass = Place<D>::kTokensAPass, kPasses = kTokens / kTokensAPass;
  const unsigned index = blockIdx.x / static_cast<unsigned>(p.heads);
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.heads));
  const int4 words = __ldg(reinterpret_cast<const int4*>(p.blocks + index));
  const schedule::gpu::TokenBlock block{words.x, words.y, words.z, words.w};
  const std::int64_t slot = head * p.slots + block.slot;
  if (block.length == 0) clear_tail<D>(p, slot);
  if (block.length <= 0 || block.position % kTokens != 0) return;

  const Place<D> at;
  const int tokens = min(block.length - block.position, kTokens), groups = (tokens + 15) / 16;
  const auto* const data = static_cast<const std::uint16_t*>(p.input.data) + block.token * p.input.token_stride +
                           head * p.input.head_stride + 8 * at.octet;
  uint4 raw[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int token = at.token + kTokensAPass * i;
    raw[i] = token < tokens ? __ldg(reinterpret_cast<const uint4*>(data + token * p.input.token_stride)) : uint4{0, 0, 0, 0};
  }
  const std::int64_t document = block.slot - block.position;
  float mean[8] = {};
  if (p.means != nullptr) {
    const float* const from = p.means + mean_offset(p.slots, D, head, document) + 8 * at.octet;
#pragma unroll
    for (int c = 0; c < 8; ++c) mean[c] = __ldg(from + c);
  }
  float greatest = 0.0f;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    float x[8];
    unpack_octet<Element>(raw[i], x);
#pragma unroll
    for (int c = 0; c < 8; ++c)
      if (at.token + kTokensAPass * i < tokens) greatest = ptx::max_or_nan(greatest, fabsf(__fadd_rn(x[c], -mean[c])));
  }
  const std::uint32_t of_warp = __reduce_max_sync(kFullWarp, __float_as_uint(greatest) & 0x7fffffffu);
  if (threadIdx.x % 32 == 0) staging.greatest[threadIdx.x / 32] = of_warp;
  __syncthreads();
  std::uint32_t of_block = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) of_block = max(of_block, staging.greatest[w]);
  const bool flagged = of_block >= kNonFinite;
  const float scale = flagged ? __uint_as_float(0x7fc00000u) : __uint_as_float(of_block) / kLargest;
  const bool none = flagged || scale == 0.0f, plain = scale < 0x1p-100f;
  const float reciprocal = __frcp_rn(scale);

#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int token = at.token + kTokensAPass * i;
    if (token >= 16 * groups) continue;
    float x[8];
    unpack_octet<Element>(raw[i], x);
    std::uint32_t code[2] = {};
#pragma unroll
    for (int c = 0; c < 8; ++c)
      code[c / 4] |= none || token >= tokens ? 0u : encode(__fadd_rn(x[c], -mean[c]), scale, reciprocal, plain) << 8 * (c % 4);
    *reinterpret_cast<uint2*>(staging.code + token * Staging<D>::kStride + 8 * at.octet) = {code[0], code[1]};
    if (p.rows16 != nullptr) {
      const std::int64_t row = slot + token;
      *reinterpret_cast<uint4*>(p.rows16 + row / 8 * 8 * D + at.octet * 64 + row % 8 * 8) =
          p.decoded ? decode(code, scale) : as_bf16<Element>(raw[i]);
    }
  }
  if (p.key_mean_score != nullptr) {
    const int key_head = head / (p.heads / p.key_heads);
    const float* const from = p.key_means + mean_offset(p.slots, D, key_head, document) + 8 * at.octet;
    float key_mean[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) key_mean[c] = __ldg(from + c);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      float x[8], sum = 0.0f;
      unpack_octet<Element>(raw[i], x);
#pragma unroll
      for (int c = 0; c < 8; ++c) sum = __fmaf_rn(x[c], key_mean[c], sum);
      keep_sum(staging, at, at.token + kTokensAPass * i, sum);
    }
  }
  if (p.row_d != nullptr) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int token = at.token + kTokensAPass * i;
      float x[8], o[8] = {}, sum = 0.0f;
      unpack_octet<__nv_bfloat16>(as_bf16<Element>(raw[i]), x);
      if (token < tokens) load_output(p.output, std::int64_t{block.token} + token, head, 8 * at.octet, o);
#pragma unroll
      for (int c = 0; c < 8; ++c) sum = __fmaf_rn(x[c], o[c], sum);
      keep_sum(staging, at, token, sum);
    }
  }
  if (threadIdx.x < groups) p.scales[slot / sm90::kSlotAlign + threadIdx.x] = scale;
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < 16 * groups) {
    const std::int64_t row = slot + threadIdx.x;
    const bool present = static_cast<int>(threadIdx.x) < tokens;
    if (p.key_mean_score != nullptr && present) p.key_mean_score[row] = sum_of(staging, threadIdx.x);
    if (p.row_d != nullptr) {  // slots between two documents, too: the backward kernels copy whole tiles of rows
      const float l = present ? p.row_sum[row] : 0.0f;
      reinterpret_cast<uint4*>(p.row_d)[row] = three_parts(l == 0.0f ? 0.0f : -sum_of(staging, threadIdx.x));
      p.row_lse[row] = l == 0.0f ? 0.0f : __fadd_rn(p.row_reference[row], log2f(l));
    }
  }
  store_codes<D>(p, staging.code, slot, groups);
}

template <int D, int kTokens>
void enqueue(const Int8Params& p, unsigned units, cudaStream_t stream) {
  if (p.input.dtype == DType::bf16)
    int8_kernel<D, kTokens, __nv_bfloat16><<<units, kThreads, 0, stream>>>(p);
  else
    int8_kernel<D, kTokens, __half><<<units, kThreads, 0, stream>>>(p);
}

template <int D>
void enqueue_means(const MeanParams& p, unsigned units, cudaStream_t stream) {
  if (p.input.dtype == DType::bf16)
    means_kernel<D, __nv_bfloat16><<<units, 32 * kMeanWarps, 0, stream>>>(p);
  else
    means_kernel<D, __half><<<units, 32 * kMeanWarps, 0, stream>>>(p);
}

Status check(const TensorView& input, int heads, int head_dim, std::int64_t units) {
  if (Status s = check_operand(input.dtype, heads, head_dim); !s.ok()) return s;
  if (input.data == nullptr || !aligned(input.data, 16) || input.token_stride % 8 != 0 || input.head_stride % 8 != 0)
    return Status::invalid("input data must be device memory aligned to 16 bytes, its strides multiples of 8 elements");
  if (units > std::numeric_limits<std::int32_t>::max())
    return Status::unsupported(std::to_string(units) + " thread blocks exceed the largest grid, 2^31 - 1; split the heads");
  return {};
}

}  // namespace

Status launch_means(const MeanParams& params, cudaStream_t stream) {
  const std::int64_t units = params.document_capacity * params.heads;
  if (Status status = check(params.input, params.heads, params.head_dim, units); !status.ok()) return status;
  if (units == 0) return {};
  MeanParams p = params;
  fill_dense_strides(p.input, p.heads, p.head_dim);
  p.head_dim == 128 ? enqueue_means<128>(p, static_cast<unsigned>(units), stream)
                    : enqueue_means<64>(p, static_cast<unsigned>(units), stream);
  return device_status(cudaGetLastError(), "means");
}

Status launch_int8(const Int8Params& params, cudaStream_t stream) {
  const std::int64_t units = params.block_capacity * params.heads;
  if (Status status = check(params.input, params.heads, params.head_dim, units); !status.ok()) return status;
  if (params.block_tokens != 64 && params.block_tokens != 128)
    return Status::unsupported("block_tokens = " + std::to_string(params.block_tokens) + ": the GPU quantiser does 64 and 128");
  Int8Params p = params;
  fill_dense_strides(p.input, p.heads, p.head_dim);
  fill_dense_strides(p.output, p.heads, p.head_dim);
  const auto blocks = static_cast<unsigned>(units);
  if (p.head_dim == 128)
    p.block_tokens == 128 ? enqueue<128, 128>(p, blocks, stream) : enqueue<128, 64>(p, blocks, stream);
  else
    p.block_tokens == 128 ? enqueue<64, 128>(p, blocks, stream) : enqueue<64, 64>(p, blocks, stream);
  return device_status(cudaGetLastError(), "quantise in INT8");
}

}  // namespace flamia::quantize::gpu
