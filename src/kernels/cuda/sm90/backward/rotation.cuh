// SPDX-License-Identifier: Apache-2.0
// The inverse rotation of rows that lie in accumulator fragments, without leaving the registers. A channel's bits are the register's parity (bit 0),
// the lane of the quad (bits 1, 2), the group of eight (bits 3 to 5) and the 64-column product (bit 6).
//
// Stages between registers come first. For the two between lanes the quad trades registers: half as many shuffles as if each lane asked for the
// other's of every register, and each lane ends with eight neighbouring channels of every 32, which is what a store of BF16 takes.
#pragma once
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

/// The butterfly between lanes l and l ^ kMask. The lane without the bit takes both lanes' registers i, the other both lanes' i + kDistance: their sum
/// and their difference, whose sign is wrong in the other.
template <int kMask, int kDistance, int kCount>
__device__ __forceinline__ void butterfly_by_trade(float (&x)[kCount], int lane) {
  const bool upper = (lane & kMask) != 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if ((i & kDistance) == 0) {
      const float own = upper ? x[i + kDistance] : x[i];
      const float other = __shfl_xor_sync(kFullWarp, upper ? x[i] : x[i + kDistance], kMask);
      x[i] = __fadd_rn(own, other);
      x[i + kDistance] = __fsub_rn(own, other);
    }
  }
}

/// The additions of numerics::rotate_back in the same order. Before, registers are in accumulator order (64-column product first); afterwards
/// register 16 b + 4 p + 2 half + i holds channel 32 b + 8 (lane % 4) + 2 p + i, but for the constant and the sign.
template <int kHeadDim>
__device__ __forceinline__ void turn_back(float (&x)[kHeadDim / 2], int lane) {
  butterfly_in_thread<1>(x);
  butterfly_in_thread<4>(x);
  butterfly_in_thread<8>(x);
  butterfly_in_thread<16>(x);
  if constexpr (kHeadDim == 128) butterfly_in_thread<32>(x);
  butterfly_by_trade<1, 4>(x, lane);
  butterfly_by_trade<2, 8>(x, lane);
}

/// The constant, the signs and a factor for each of the two rows, after turn_back().
template <int kHeadDim>
__device__ __forceinline__ void scale_back(float (&x)[kHeadDim / 2], const float (&factor)[2], int lane) {
  const std::uint32_t odd = lane % 2 != 0 ? 0x80000000u : 0u, high = (lane & 2) != 0 ? 0x80000000u : 0u;
  const std::uint32_t of_pair[4] = {0, odd, high, odd ^ high};  // signs that the trades left
  std::uint32_t bits[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) bits[half] = __float_as_uint(__fmul_rn(factor[half], numerics::rotation_norm(kHeadDim)));
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) {
    const int block = i / 16, pair = i / 4 % 4, half = i / 2 % 2, channel = 2 * pair + i % 2;
    const std::uint32_t word = block == 0 ? 0x243F6A88u : block == 1 ? 0x85A308D3u : block == 2 ? 0x13198A2Eu : 0x03707344u;
    const std::uint32_t sign = (word << 8 * (lane % 4) << channel) & 0x80000000u;
    x[i] = __fmul_rn(x[i], __uint_as_float(bits[half] ^ of_pair[pair] ^ sign));
  }
}

}  // namespace flamia::sm90::backward
