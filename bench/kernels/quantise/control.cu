// SPDX-License-Identifier: Apache-2.0
#include "control.hpp"

#include "quantize/cuda/unit.cuh"

namespace flamia::bench {
namespace {

using namespace quantize::gpu;
constexpr int kDim = 128;

__device__ bool locate(const QuantiseParams& p, const Lane& lane, Unit& unit, const std::uint16_t*& head) {
  if (!unit.find(p.blocks, p.heads, lane.warp)) return false;
  head = static_cast<const std::uint16_t*>(p.input.data) +
         (unit.block.token + std::int64_t{kGroupTokens} * lane.warp) * p.input.token_stride + unit.head * p.input.head_stride;
  return true;
}

__global__ __launch_bounds__(kUnitThreads) void rotate(const __grid_constant__ QuantiseParams p, std::uint16_t* rotated) {
  const Lane lane;
  Unit unit;
  const std::uint16_t* head;
  if (!locate(p, lane, unit, head)) return;
  Raw<kDim> raw[kLaneTokens];
  load(head, p.input.token_stride, unit.tokens, lane, raw);
  const Raw<kDim> signs = load_signs<kDim>(lane);
  std::uint16_t* out = rotated + (head - static_cast<const std::uint16_t*>(p.input.data));
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    Values<kDim> x;
    rotate_unscaled<__nv_bfloat16>(raw[i], signs, lane, x);
    const int token = lane_token(lane.k, i);
    if (token >= unit.tokens) continue;
#pragma unroll
    for (int h = 0; h < Raw<kDim>::kOctets; ++h) {
      __nv_bfloat162 words[4];
#pragma unroll
      for (int c = 0; c < 4; ++c)
        words[c] = __floats2bfloat162_rn(x.octet[h][2 * c] * numerics::rotation_norm(kDim),
                                         x.octet[h][2 * c + 1] * numerics::rotation_norm(kDim));
      reinterpret_cast<uint4*>(out + token * p.input.token_stride)[lane.j + kTokenLanes * h] =
          reinterpret_cast<const uint4&>(words);
    }
  }
}

__global__ __launch_bounds__(kUnitThreads) void find_exponents(const __grid_constant__ QuantiseParams p) {
  __shared__ std::uint32_t exchange[kUnitWarps];
  const Lane lane;
  Unit unit;
  const std::uint16_t* head;
  if (!locate(p, lane, unit, head)) return;
  Raw<kDim> raw[kLaneTokens];
  load(head, p.input.token_stride, unit.tokens, lane, raw);
  std::uint32_t greatest = 0;
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) greatest = max(greatest, magnitude<__nv_bfloat16>(raw[i]));
  const Scale scale(unit_maximum(greatest, lane, exchange));
  const std::uint32_t bytes[kLaneTokens] = {scale.byte(), scale.byte()};
  if (unit.owned) store_bytes(bytes, lane, p.exponents + unit.head * p.slots + unit.slot);
}

__global__ __launch_bounds__(kUnitThreads) void encode_rows(const __grid_constant__ QuantiseParams p) {
  const Lane lane;
  Unit unit;
  const std::uint16_t* head;
  if (!locate(p, lane, unit, head) || !unit.owned) return;
  Raw<kDim> raw[kLaneTokens];
  load(head, p.input.token_stride, unit.tokens, lane, raw);
  const std::int64_t at = unit.head * p.slots + unit.slot;
  const std::uint8_t byte = p.exponents[at];
  Scale scale[kLaneTokens] = {Scale(0), Scale(0)};
  Values<kDim> x[kLaneTokens];
  Codes<kDim> codes[kLaneTokens];
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    scale[i].flagged = byte == numerics::kFlagged;
    scale[i].exponent = numerics::decode_ue8m0(byte);
    unpack<__nv_bfloat16>(raw[i], x[i]);
  }
  encode(x, scale, 1.f, codes);
  store_rows<kDim>(codes, lane, p.rows + at * kDim);
}

__global__ __launch_bounds__(kUnitThreads) void transpose(const __grid_constant__ QuantiseParams p) {
  __shared__ Stage<kDim> stage[kUnitWarps];
  const Lane lane;
  Unit unit;
  const std::uint16_t* head;
  if (!locate(p, lane, unit, head) || !unit.owned) return;
  const std::int64_t at = unit.head * p.slots + unit.slot;
  Codes<kDim> codes[kLaneTokens];
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i)
#pragma unroll
    for (int h = 0; h < Raw<kDim>::kOctets; ++h) {
      const std::int64_t from =
          sm90::rows_offset(p.slots, kDim, unit.head, unit.slot + lane_token(lane.k, i), 8 * (kTokenLanes * h + lane.j));
      const uint2 words = *reinterpret_cast<const uint2*>(p.rows + from);
      codes[i].octet[h][0] = words.x;
      codes[i].octet[h][1] = words.y;
    }
  store_transposed<kDim>(codes, p.order, lane, stage[lane.warp], p.transposed + at * kDim);
}

}  // namespace

cudaError_t launch_unfused(const QuantiseParams& params, void* rotated, cudaStream_t stream) {
  QuantiseParams p = params;
  if (p.input.head_stride == 0) p.input.head_stride = kDim;
  if (p.input.token_stride == 0) p.input.token_stride = static_cast<std::int64_t>(p.heads) * kDim;
  const auto units = static_cast<unsigned>(p.block_capacity * p.heads);
  if (p.rotate) {
    rotate<<<units, kUnitThreads, 0, stream>>>(p, static_cast<std::uint16_t*>(rotated));
    p.input.data = rotated;
  }
  find_exponents<<<units, kUnitThreads, 0, stream>>>(p);
  encode_rows<<<units, kUnitThreads, 0, stream>>>(p);
  if (p.transposed != nullptr) transpose<<<units, kUnitThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace flamia::bench
