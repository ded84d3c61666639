// SPDX-License-Identifier: Apache-2.0
// The inverse rotation of rows that lie in accumulator fragments, without leaving the registers: a channel's bits are the register's parity
// (bit 0), the lane of the quad (bits 1, 2), the group of eight (bits 3 to 5) and the 64-column product (bit 6).
#pragma once
#include "fragments.hpp"
#include "numerics/hadamard.hpp"
#include "power.cuh"

namespace flamia::sm90::backward {

/// The butterfly between two lanes of a quad: the lane whose bit is clear gets the sum, the other the difference.
template <int kCount>
__device__ __forceinline__ void butterfly_between_lanes(float (&x)[kCount], int mask, int lane) {
  const float sign = (lane & mask) != 0 ? -1.0f : 1.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float other = __shfl_xor_sync(kFullWarp, x[i], mask);
    x[i] = __fmaf_rn(x[i], sign, other);  // exact product: one rounding
  }
}

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

/// numerics::rotate_back of the thread's rows, the same additions in the same order. Registers: 64-column product, then accumulator order.
template <int kHeadDim, int kCount>
__device__ __forceinline__ void rotate_back(float (&x)[kCount], int lane) {
  static_assert(kCount == kHeadDim / 2);
  butterfly_in_thread<1>(x);
  butterfly_between_lanes(x, 1, lane);
  butterfly_between_lanes(x, 2, lane);
  butterfly_in_thread<4>(x);
  butterfly_in_thread<8>(x);
  butterfly_in_thread<16>(x);
  if constexpr (kHeadDim == 128) butterfly_in_thread<32>(x);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int fixed = 64 * (i / kScores) + 8 * (i % kScores / 4) + i % 2;  // the channel but for 2 c
    const std::uint32_t word = fixed < 32 ? 0x243F6A88u : fixed < 64 ? 0x85A308D3u : fixed < 96 ? 0x13198A2Eu : 0x03707344u;
    const std::uint32_t sign = (word << fixed % 32 << 2 * (lane % 4)) & 0x80000000u;
    x[i] = __uint_as_float(__float_as_uint(__fmul_rn(x[i], numerics::rotation_norm(kHeadDim))) ^ sign);
  }
}

}  // namespace flamia::sm90::backward
