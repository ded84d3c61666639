// SPDX-License-Identifier: Apache-2.0
// A thread block per block of 128 tokens and head: load -> less the mean -> greatest magnitude -> codes -> shared memory -> rows and transposed
#include "quantize/cuda/int8.hpp"

#include <type_traits>

#include "kernels/cuda/dense_strides.hpp"
#include "kernels/cuda/device_status.hpp"
#include "kernels/cuda/ptx/convert.cuh"
#include "kernels/cuda/sm90/layout.hpp"
#include "numerics/platform.hpp"
#include "quantize/cuda/checks.hpp"
#include "quantize/cuda/instance.cuh"
#include "quantize/cuda/tile.cuh"

namespace flamia::quantize::gpu {
namespace {

constexpr int kThreads = 256, kTokens = 128;
constexpr float kLargest = 127.0f;

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

/// x / scale to nearest even (as divide.cuh); the sum's low byte is the rounded number.
__device__ __forceinline__ std::uint32_t encode(float x, float scale, float reciprocal) {
  const float q0 = __fmul_rn(x, reciprocal);
  const float q1 = __fmaf_rn(__fmaf_rn(-q0, scale, x), reciprocal, q0);
  const float q2 = __fmaf_rn(__fmaf_rn(-q1, scale, x), reciprocal, q1);
  constexpr float kIntegers = 12582912.0f;  // 1.5 * 2^23
  return __float_as_uint(__fadd_rn(q2, kIntegers));
}

/// Below this a scale's residuals may be inexact: x and the scale are multiplied by 2^64 first, which changes no quotient.
constexpr float kTinyScale = 0x1p-100f, kUp = 0x1p64f;

/// Codes of eight numbers less their means.
template <class Element, bool kTiny>
__device__ __forceinline__ uint2 encode_octet(const uint4& raw, const float (&mean)[8], float scale, float reciprocal) {
  float x[8];
  unpack_octet<Element>(raw, x);
  std::uint32_t word[2];
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    std::uint32_t code[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float centred = __fadd_rn(x[4 * w + c], -mean[4 * w + c]);
      code[c] = encode(kTiny ? __fmul_rn(centred, kUp) : centred, scale, reciprocal);
    }
    word[w] = __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040), 0x5410);
  }
  return {word[0], word[1]};
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
  std::uint8_t code[kTokens * kStride];
  std::uint32_t greatest[kThreads / 32];
  float sums[kTokens][Place<D>::kParts];  // of products of rows, by the warps that share a token
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

template <int D, class Element>
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
    float x[8], of_octet = 0.0f;
    unpack_octet<Element>(raw[i], x);
#pragma unroll
    for (int c = 0; c < 8; ++c) of_octet = ptx::max_or_nan(of_octet, fabsf(__fadd_rn(x[c], -mean[c])));
    if (at.token + kTokensAPass * i < tokens) greatest = ptx::max_or_nan(greatest, of_octet);
  }
  const std::uint32_t of_warp = __reduce_max_sync(kFullWarp, __float_as_uint(greatest) & 0x7fffffffu);
  if (threadIdx.x % 32 == 0) staging.greatest[threadIdx.x / 32] = of_warp;
  __syncthreads();
  std::uint32_t of_block = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) of_block = max(of_block, staging.greatest[w]);
  const bool flagged = of_block >= kNonFinite;
  const float scale = flagged ? __uint_as_float(0x7fc00000u) : __uint_as_float(of_block) / kLargest;
  const bool none = flagged || scale == 0.0f;
  const auto encode_all = [&](auto tiny) {
    constexpr bool kTiny = decltype(tiny)::value;
    const float divisor = kTiny ? __fmul_rn(scale, kUp) : scale, reciprocal = __frcp_rn(divisor);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int token = at.token + kTokensAPass * i;
      if (token >= 16 * groups) continue;
      const std::uint32_t kept = none || token >= tokens ? 0u : ~0u;
      const uint2 code = encode_octet<Element, kTiny>(raw[i], mean, divisor, reciprocal);
      *reinterpret_cast<uint2*>(staging.code + token * Staging<D>::kStride + 8 * at.octet) = {code.x & kept, code.y & kept};
    }
  };
  if (scale < kTinyScale)
    encode_all(std::true_type());
  else
    encode_all(std::false_type());
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int token = at.token + kTokensAPass * i;
    if (p.rows16 == nullptr || token >= 16 * groups) continue;
    const std::int64_t row = slot + token;
    const uint2 own = *reinterpret_cast<const uint2*>(staging.code + token * Staging<D>::kStride + 8 * at.octet);
    const std::uint32_t code[2] = {own.x, own.y};
    *reinterpret_cast<uint4*>(p.rows16 + row / 8 * 8 * D + at.octet * 64 + row % 8 * 8) =
        p.decoded ? decode(code, scale) : as_bf16<Element>(raw[i]);
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

}  // namespace

Status launch_int8(const Int8Params& params, cudaStream_t stream) {
  const std::int64_t units = params.block_capacity * params.heads;
  if (Status s = check_operand(params.input.dtype, params.heads, params.head_dim); !s.ok()) return s;
  if (Status s = check_rows("the input of the quantiser", params.input); !s.ok()) return s;
  if (Status s = check_grid(units); !s.ok()) return s;
  Int8Params p = params;
  fill_dense_strides(p.input, p.heads, p.head_dim);
  fill_dense_strides(p.output, p.heads, p.head_dim);
  with_instance(p.head_dim, p.input.dtype,
                [&]<int D, class Element>() { int8_kernel<D, Element><<<static_cast<unsigned>(units), kThreads, 0, stream>>>(p); });
  return device_status(cudaGetLastError(), "quantise in INT8");
}

}  // namespace flamia::quantize::gpu
