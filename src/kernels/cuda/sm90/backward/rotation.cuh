// SPDX-License-Identifier: Apache-2.0
// The inverse rotation of rows that lie in accumulator fragments, without leaving the registers. A channel's bits are the register's parity (bit 0),
// the lane of the quad (bits 1, 2), the group of eight (bits 3 to 5) and the 64-column product (bit 6).
//
// Within 16 channels the tensor core adds: a fragment of 16 channels is the A operand of a small product with the Hadamard matrix of 16, whose columns
// are ordered such that each lane ends with four neighbouring channels. FP32 goes in as two BF16 numbers, which leaves out 2^-18; FP16 as it is. The
// stages between groups of 16 channels are additions of a lane's own registers.
#pragma once
#include "../../ptx/convert.cuh"
#include "../../ptx/mma_f16.cuh"
#include "fragments.hpp"
#include "numerics/hadamard.hpp"
#include "power.cuh"

namespace flamia::sm90::backward {

/// The butterfly between registers i and i + kDistance.
template <int kDistance, int kCount>
__device__ __forceinline__ void butterfly_in_thread(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if ((i & kDistance) == 0) {
      const float a = x[i], b = x[i + kDistance];
      x[i] = __fadd_rn(a, b);
      x[i + kDistance] = __fsub_rn(a, b);
    }
  }
}

/// A lane's words of the Hadamard matrix of 16, as two B operands of eight columns: column n of operand j is channel 4 (n / 2) + 2 j + n % 2.
struct HadamardOperand {
  std::uint32_t word[2][2];  // [j][upper half of the rows]

  /// `one`: 1 in the format of the products, in both halves.
  __device__ __forceinline__ HadamardOperand(int lane, std::uint32_t one) {
    const int row = 2 * (lane % 4), column = lane / 4;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int channel = 4 * (column / 2) + 2 * j + column % 2;
      const std::uint32_t odd = static_cast<std::uint32_t>(channel & 1) << 31;  // the second row of a word
      const std::uint32_t lower = (__popc(row & channel) & 1) != 0 ? 0x80008000u : 0u;
      const std::uint32_t upper = (channel & 8) != 0 ? 0x80008000u : 0u;
      word[j][0] = one ^ lower ^ odd;
      word[j][1] = word[j][0] ^ upper;
    }
  }
};
inline constexpr std::uint32_t kOnesBf16 = 0x3F803F80u, kOnesF16 = 0x3C003C00u;

/// FP32 accumulators, in place. Before, registers are in accumulator order (64-column product first); afterwards register 8 b + 4 j + 2 half + i
/// holds channel 16 b + 4 (lane % 4) + 2 j + i, but for the constant, the sign and the stages between groups of 16 channels.
template <int kCount>
__device__ __forceinline__ void turn_sixteens(float (&x)[kCount], int lane) {
  const HadamardOperand hadamard(lane, kOnesBf16);
#pragma unroll
  for (int b = 0; b < kCount; b += 8) {
    std::uint32_t high[4], low[4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float first = x[b + 2 * pair], second = x[b + 2 * pair + 1];
      high[pair] = ptx::pack_bf16x2(first, second);
      low[pair] = ptx::pack_bf16x2(__fsub_rn(first, __uint_as_float(high[pair] << 16)),
                                   __fsub_rn(second, __uint_as_float(high[pair] & 0xFFFF0000u)));
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      ptx::warp_product_bf16(sum, low, hadamard.word[j][0], hadamard.word[j][1]);
      ptx::warp_product_bf16(sum, high, hadamard.word[j][0], hadamard.word[j][1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[b + 4 * j + i] = sum[i];
    }
  }
}
/// Pairs in FP16, in the order of accumulators: word 4 b + i holds those of registers 8 b + 2 i and the next.
template <int kCount>
__device__ __forceinline__ void turn_sixteens(float (&x)[kCount], const std::uint32_t (&pairs)[kCount / 2], int lane) {
  const HadamardOperand hadamard(lane, kOnesF16);
#pragma unroll
  for (int b = 0; b < kCount; b += 8) {
    const std::uint32_t four[4] = {pairs[b / 2], pairs[b / 2 + 1], pairs[b / 2 + 2], pairs[b / 2 + 3]};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      ptx::warp_product_f16(sum, four, hadamard.word[j][0], hadamard.word[j][1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[b + 4 * j + i] = sum[i];
    }
  }
}

/// The rest: stages between groups of 16 channels, the constant, the signs and a factor for each of the two rows.
template <int kHeadDim>
__device__ __forceinline__ void finish_turn(float (&x)[kHeadDim / 2], const float (&factor)[2], int lane) {
  butterfly_in_thread<8>(x);
  butterfly_in_thread<16>(x);
  if constexpr (kHeadDim == 128) butterfly_in_thread<32>(x);
  std::uint32_t bits[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) bits[half] = __float_as_uint(__fmul_rn(factor[half], numerics::rotation_norm(kHeadDim)));
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) {
    const int block = i / 8, half = i / 2 % 2, channel = 16 * (block % 2) + 2 * (i / 4 % 2) + i % 2;
    const std::uint32_t word = block / 2 == 0   ? 0x243F6A88u
                               : block / 2 == 1 ? 0x85A308D3u
                               : block / 2 == 2 ? 0x13198A2Eu
                                                : 0x03707344u;
    const std::uint32_t sign = (word << 4 * (lane % 4) << channel) & 0x80000000u;
    x[i] = __fmul_rn(x[i], __uint_as_float(bits[half] ^ sign));
  }
}

}  // namespace flamia::sm90::backward
