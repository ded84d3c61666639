// SPDX-License-Identifier: Apache-2.0
// The same unit of work as the quantiser of Q, K and V: a token-block of one head, two warps.
#include "quantize/cuda/gradient.hpp"

#include <cuda_fp8.h>

#include <string>

#include "kernels/cuda/dense_strides.hpp"
#include "kernels/cuda/device_status.hpp"
#include "quantize/cuda/checks.hpp"
#include "quantize/cuda/divide.cuh"
#include "quantize/cuda/instance.cuh"
#include "quantize/cuda/prescale.hpp"
#include "quantize/cuda/unit.cuh"

namespace flamia::quantize::gpu {
namespace {

/// A lane's channels of its tokens of O, rounded to BF16 (the layout of Raw).
template <int D>
__device__ __forceinline__ void load_output(const GradientParams& p, std::int64_t token, int head, int tokens, const Lane& lane,
                                            Raw<D> (&o)[kLaneTokens]) {
  const std::int64_t first = token * p.o.token_stride + head * p.o.head_stride;
  if (p.o.dtype == DType::bf16) {
    load(static_cast<const std::uint16_t*>(p.o.data) + first, p.o.token_stride, tokens, lane, o);
    return;
  }
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i)
#pragma unroll
    for (int h = 0; h < Raw<D>::kOctets; ++h) {
      const int t = lane_token(lane.k, i);
      const auto* at = reinterpret_cast<const float4*>(static_cast<const float*>(p.o.data) + first + t * p.o.token_stride +
                                                       8 * (kTokenLanes * h + lane.j));
      const float4 a = t < tokens ? __ldg(at) : float4{0, 0, 0, 0}, b = t < tokens ? __ldg(at + 1) : float4{0, 0, 0, 0};
      const __nv_bfloat162 words[4] = {__floats2bfloat162_rn(a.x, a.y), __floats2bfloat162_rn(a.z, a.w),
                                       __floats2bfloat162_rn(b.x, b.y), __floats2bfloat162_rn(b.z, b.w)};
      o[i].octet[h] = reinterpret_cast<const uint4&>(words);
    }
}

/// Sums over the lane's channels: code * O, and code^2.
struct Sums {
  float with_output, squares;
};
template <int D>
__device__ __forceinline__ Sums sum_codes(const Codes<D>& codes, const Raw<D>& output) {
  Sums sums{0.f, 0.f};
  Values<D> o;
  unpack<__nv_bfloat16>(output, o);
#pragma unroll
  for (int h = 0; h < Raw<D>::kOctets; ++h)
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const std::uint32_t word = codes.octet[h][pair / 2];
      const auto two = static_cast<__nv_fp8x2_storage_t>(pair % 2 == 0 ? word : word >> 16);
      const float2 values = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
      const float low = values.x, high = values.y;
      sums.with_output = numerics::fma(high, o.octet[h][2 * pair + 1], numerics::fma(low, o.octet[h][2 * pair], sums.with_output));
      sums.squares = numerics::fma(high, high, numerics::fma(low, low, sums.squares));
    }
#pragma unroll
  for (int distance = 1; distance < kTokenLanes; distance *= 2) {
    sums.with_output = numerics::add(sums.with_output, __shfl_xor_sync(kFullWarp, sums.with_output, distance));
    sums.squares = numerics::add(sums.squares, __shfl_xor_sync(kFullWarp, sums.squares, distance));
  }
  return sums;
}

/// Exponents of the greatest key and value that a row sees. `position` of the row in its document, `start` = slot of position 0.
struct Reached {
  int key, value;
};
__device__ __forceinline__ Reached reached_exponents(const GradientParams& p, int head, std::int64_t start, std::int64_t position,
                                                     std::int64_t length) {
  const std::int64_t last = schedule::visible_keys(p.reach, position, length).end - 1;
  const std::int64_t at = head / (p.heads / p.key_heads) * p.slots + start + last;
  return {static_cast<int>(__ldg(p.key_prefix + at)) - 127, static_cast<int>(__ldg(p.value_prefix + at)) - 127};
}

template <int D>
__device__ __forceinline__ void clear_accumulator(const GradientParams& p, std::int64_t at) {
  const int pieces = kGroupTokens * D * p.dq_accumulator_bytes / 16;
  auto* to = reinterpret_cast<uint4*>(static_cast<char*>(p.dq_accumulator) + at * D * p.dq_accumulator_bytes);
  for (int i = static_cast<int>(threadIdx.x % 32); i < pieces; i += 32) to[i] = uint4{0, 0, 0, 0};
}

/// Of a lane's tokens: l, whether there is nothing to divide (no token, or a row without a visible key), and the bits of the
/// greatest quotient in the lane's channels. Rounding is monotone: the greatest quotient is the greatest element's.
struct Quotients {
  float l[kLaneTokens];
  bool empty[kLaneTokens];
  std::uint32_t greatest[kLaneTokens];
  __device__ std::uint32_t all() const { return max(greatest[0], greatest[1]); }
};
template <int D, class Element>
__device__ __forceinline__ Quotients find_quotients(const GradientParams& p, std::int64_t at, int tokens, const Lane& lane,
                                                    const Raw<D> (&raw)[kLaneTokens]) {
  Quotients row;
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    const int t = lane_token(lane.k, i);
    row.l[i] = t < tokens ? __ldg(p.row_sum + at + t) : 0.f;
    row.empty[i] = row.l[i] == 0.f || row.l[i] == numerics::infinity();
    const float quotient = __fdiv_rn(__uint_as_float(magnitude<Element>(raw[i])), row.l[i]);
    row.greatest[i] = row.empty[i] ? 0u : __float_as_uint(quotient) & 0x7fffffffu;
  }
  return row;
}

/// Codes of dO / l. One token after the other: its 16 quotients are the only ones alive.
template <class Element, int D, class MakeDivider>
__device__ __forceinline__ void encode_quotients(const Raw<D> (&raw)[kLaneTokens], const Quotients& row,
                                                 const Scale (&scale)[kLaneTokens], MakeDivider divider,
                                                 Codes<D> (&codes)[kLaneTokens]) {
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    Values<D> x;
    unpack<Element>(raw[i], x);
    const auto divide = divider(row.l[i]);
#pragma unroll
    for (int h = 0; h < Raw<D>::kOctets; ++h)
#pragma unroll
      for (int c = 0; c < 8; ++c) x.octet[h][c] = divide(x.octet[h][c]);
    encode_token(x, numerics::pow2(-scale[i].exponent), codes[i]);
    if (row.empty[i]) codes[i] = Codes<D>{};
  }
  clear_flagged(scale, codes);
}

template <class Element, int D>
__device__ __forceinline__ void encode_gradient(const Raw<D> (&raw)[kLaneTokens], const Quotients& row,
                                                const Scale (&scale)[kLaneTokens], Codes<D> (&codes)[kLaneTokens]) {
  bool safe = true;
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) safe = safe && (row.empty[i] || Divider::safe(row.l[i], scale[i].exponent));
  if (safe)
    encode_quotients<Element>(
        raw, row, scale, [](float l) { return Divider(l); }, codes);
  else
    encode_quotients<Element>(
        raw, row, scale, [](float l) { return [l](float v) { return __fdiv_rn(v, l); }; }, codes);
}

template <int D>
__device__ __forceinline__ void load_gradient(const GradientParams& p, const Unit& unit, std::int64_t token, const Lane& lane,
                                              Raw<D> (&raw)[kLaneTokens]) {
  load(static_cast<const std::uint16_t*>(p.d_o.data) + token * p.d_o.token_stride + unit.head * p.d_o.head_stride,
       p.d_o.token_stride, unit.tokens, lane, raw);
}

/// Group::tensor: bits of the greatest quotient in *p.scratch.
template <int D, class Element>
__global__ __launch_bounds__(kUnitThreads) void gradient_maximum_kernel(const __grid_constant__ GradientParams p) {
  const Lane lane;
  Unit unit;
  if (!unit.find(p.blocks, p.heads, lane.warp) || unit.tokens == 0) return;
  Raw<D> raw[kLaneTokens];
  load_gradient<D>(p, unit, unit.block.token + std::int64_t{kGroupTokens} * lane.warp, lane, raw);
  raise_maximum(p.scratch, find_quotients<D, Element>(p, unit.head * p.slots + unit.slot, unit.tokens, lane, raw).all());
}

template <int D, class Element>
__global__ __launch_bounds__(kUnitThreads, D == 128 ? 8 : 12) void gradient_kernel(const __grid_constant__ GradientParams p) {
  __shared__ Stage<D> stage[kUnitWarps];
  __shared__ std::uint32_t exchange[kUnitWarps];
  const Lane lane;
  Unit unit;
  if (!unit.find(p.blocks, p.heads, lane.warp)) return;
  const std::int64_t at = unit.head * p.slots + unit.slot;
  const std::int64_t token = unit.block.token + std::int64_t{kGroupTokens} * lane.warp;

  Raw<D> raw[kLaneTokens];
  load_gradient<D>(p, unit, token, lane, raw);
  Raw<D> o[kLaneTokens];
  load_output<D>(p, token, unit.head, unit.tokens, lane, o);
  if (unit.owned && p.dq_accumulator != nullptr && unit.block.length > p.dq_untouched_tokens) clear_accumulator<D>(p, at);

  const Quotients row = find_quotients<D, Element>(p, at, unit.tokens, lane, raw);
  const std::uint32_t(&greatest)[kLaneTokens] = row.greatest;
  Scale scale[kLaneTokens] = {Scale(0), Scale(0)};
  if (p.group == Group::token) {
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) scale[i] = Scale(token_maximum(greatest[i]));
  } else {
    const std::uint32_t all = p.group == Group::tensor ? *p.scratch : unit_maximum(row.all(), lane, exchange);
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) scale[i] = Scale(all);
  }
  if (!unit.owned) return;

  Codes<D> codes[kLaneTokens];
  encode_gradient<Element>(raw, row, scale, codes);
  if (p.rows != nullptr) store_rows<D>(codes, lane, p.rows + at * D);
  if (p.transposed != nullptr) store_transposed<D>(codes, sm90::TokenOrder::pi, lane, stage[lane.warp], p.transposed + at * D);
  const std::uint32_t bytes[kLaneTokens] = {scale[0].byte(), scale[1].byte()};
  store_bytes(bytes, lane, p.exponents + at);

#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    const int t = lane_token(lane.k, i);
    const Sums sums = sum_codes<D>(codes[i], o[i]);
    if (lane.j != 0) continue;
    p.d_prime[at + t] = numerics::scale_pow2(sums.with_output, scale[i].exponent);
    if (p.dq_exponent == nullptr) continue;
    int z = 0;
    if (t < unit.tokens) {
      const std::int64_t start = unit.block.slot - unit.block.position;
      const std::int64_t position = unit.block.position + kGroupTokens * lane.warp + t;
      const Reached reached = reached_exponents(p, unit.head, start, position, unit.block.length);
      z = dq_exponent(sums.squares, row.l[i], D, scale[i].exponent, reached.key, reached.value);
    }
    p.dq_exponent[at + t] = static_cast<std::int16_t>(z);
  }
}

template <int D, class Element>
void enqueue(const GradientParams& p, unsigned units, cudaStream_t stream) {
  if (p.group == Group::tensor) gradient_maximum_kernel<D, Element><<<units, kUnitThreads, 0, stream>>>(p);
  gradient_kernel<D, Element><<<units, kUnitThreads, 0, stream>>>(p);
}

Status check(const GradientParams& p) {
  if (Status status = check_head_dim(p.head_dim); !status.ok()) return status;
  if (p.heads <= 0 || p.key_heads <= 0 || p.heads % p.key_heads != 0)
    return Status::invalid("key_heads = " + std::to_string(p.key_heads) + " must divide heads = " + std::to_string(p.heads));
  if (p.d_o.dtype == DType::f32)
    return Status::unsupported("d_o in f32: the GPU quantiser reads bf16 and f16; convert first, or use the CPU");
  if (p.o.dtype == DType::f16) return Status::unsupported("o in f16: the forward pass writes bf16 or f32");
  if (Status status = check_rows("d_o", p.d_o); !status.ok()) return status;
  if (Status status = check_rows("o", p.o); !status.ok()) return status;
  if (p.group == Group::tensor && p.scratch == nullptr)
    return Status::invalid("scratch is null but one exponent for the tensor needs 4 bytes of it");
  if (p.row_sum == nullptr || p.exponents == nullptr || p.d_prime == nullptr)
    return Status::invalid("row_sum, exponents and d_prime may not be null");
  if (!aligned(p.rows) || !aligned(p.transposed) || !aligned(p.exponents) || !aligned(p.dq_accumulator))
    return Status::invalid("outputs of the dO pass must be aligned to 16 bytes");
  if (p.dq_accumulator != nullptr && p.dq_accumulator_bytes != 2 && p.dq_accumulator_bytes != 4)
    return Status::invalid("dq_accumulator_bytes = " + std::to_string(p.dq_accumulator_bytes) + " must be 2 or 4");
  if (p.dq_exponent != nullptr && (p.key_prefix == nullptr || p.value_prefix == nullptr))
    return Status::invalid("dq_exponent needs key_prefix and value_prefix, the prefix exponents of K and V");
  if (p.blocks == nullptr) return Status::invalid("the schedule is missing: blocks is null");
  return check_grid(p.block_capacity * p.heads);
}

}  // namespace

Status launch_gradient(const GradientParams& params, cudaStream_t stream) {
  GradientParams p = params;
  for (TensorView* t : {&p.d_o, &p.o}) fill_dense_strides(*t, p.heads, p.head_dim);
  if (Status status = check(p); !status.ok()) return status;
  cudaError_t error = p.group == Group::tensor ? cudaMemsetAsync(p.scratch, 0, sizeof(std::uint32_t), stream) : cudaSuccess;
  if (error == cudaSuccess) {
    const auto units = static_cast<unsigned>(p.block_capacity * p.heads);
    with_instance(p.head_dim, p.d_o.dtype, [&]<int D, class Element>() { enqueue<D, Element>(p, units, stream); });
    error = cudaGetLastError();
  }
  return device_status(error, "dO pass");
}

}  // namespace flamia::quantize::gpu
