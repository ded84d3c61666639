// SPDX-License-Identifier: Apache-2.0
// NVFP4 of the 16 tokens that a warp holds: 16 channels share an E4M3 scale, amax / 6 or amax / 4, whichever errs less (numerics.md,
// section 7). Codes, scales and their products in FP16, which are exact, equal the host's bit for bit.
//
// A lane's octet of channels is half of such a group; its neighbour (lane ^ 1) holds the other half.
#pragma once
#include <cuda_fp8.h>

#include "kernels/cuda/ptx/half.cuh"
#include "quantize/cuda/quantise.hpp"
#include "quantize/cuda/tile.cuh"

namespace flamia::quantize::gpu {

inline constexpr std::uint32_t kFlaggedScale = 0x7f;
inline constexpr int kScaleChannels = 16;

/// Nearest magnitude of E2M1, ties to even, from a quotient >= 0: the addition of 2^22 times one and a half of the power of two below it (at
/// least 1) leaves one bit of mantissa.
__device__ __forceinline__ float round_e2m1(float quotient) {
  const float q = fminf(quotient, 6.f);
  const float magic = __int_as_float((max(__float_as_int(q), 0x3f800000) & 0x7f800000) | 0x00400000);
  return numerics::fma(magic, -0x1p22f, numerics::fma(magic, 0x1p22f, q));
}
/// x / 6, rounded to nearest: equal to the division for every x that does not make a scale of zero.
__device__ __forceinline__ float sixth(float x) {
  constexpr float kInverse = 1.f / 6.f;
  const float near = numerics::mul(x, kInverse);
  return numerics::fma(numerics::fma(-6.f, near, x), kInverse, near);
}

/// One of the two scales, and what it makes of the lane's octet.
struct Candidate {
  float scale;       // 0: every code is 0
  float rounded[8];  // magnitudes of E2M1
  float error;       // of the whole group: squares summed in FP32, in the order of the channels
};

/// The quotient is a times 1 / scale in two words (however well the first approximates it, the second is what it leaves), so it is the nearest to a / scale unless that lies within 2^-47 of a midpoint, which never
/// decides: a scale has four significant bits, so a quotient that is not a tie of E2M1 lies more than .53 ulp away from one.
__device__ __forceinline__ void round_octet(const float (&a)[8], const Lane& lane, Candidate& candidate) {
  const float s = candidate.scale, y = s == 0.f ? 0.f : __fdividef(1.f, s);
  const float rest = numerics::mul(numerics::fma(-y, s, 1.f), y);
  float square[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    candidate.rounded[c] = round_e2m1(numerics::fma(a[c], y, numerics::mul(a[c], rest)));
    const float error = numerics::fma(candidate.rounded[c], s, -a[c]);  // the product is exact
    square[c] = numerics::mul(error, error);
  }
  float first = square[0];
#pragma unroll
  for (int c = 1; c < 8; ++c) first = numerics::add(first, square[c]);
  float sum = __shfl_xor_sync(kFullWarp, first, 1);  // the upper octet goes on from the lower one's
#pragma unroll
  for (int c = 0; c < 8; ++c) sum = numerics::add(sum, square[c]);
  const float upper = __shfl_xor_sync(kFullWarp, sum, 1);
  candidate.error = lane.j % 2 != 0 ? sum : upper;
}

/// What is stored of one token's octet.
struct Nvfp4Octet {
  std::uint32_t codes;    // low nibble = first channel
  std::uint32_t scale;    // E4M3
  std::uint32_t half[4];  // code * scale
};

__device__ __forceinline__ Nvfp4Octet encode_octet(const float (&x)[8], float norm, bool flagged, bool codes_wanted,
                                                   const Lane& lane) {
  float value[8], a[8], amax = 0.f;
#pragma unroll
  for (int c = 0; c < 8; ++c) value[c] = numerics::mul(x[c], norm);
  if (__any_sync(kFullWarp, flagged)) {
#pragma unroll
    for (int c = 0; c < 8; ++c) value[c] = flagged ? 0.f : value[c];
  }
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    a[c] = fabsf(value[c]);
    amax = fmaxf(amax, a[c]);
  }
  amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, 1));
  const std::uint16_t scales = ptx::pack_e4m3x2(sixth(amax), numerics::mul(amax, .25f));
  const __half2 decoded(__nv_cvt_fp8x2_to_halfraw2(scales, __NV_E4M3));
  Candidate six{__low2float(decoded), {}, 0.f}, four{__high2float(decoded), {}, 0.f};
  round_octet(a, lane, six);
  round_octet(a, lane, four);
  const bool smaller = four.error < six.error;
  const float scale = smaller ? four.scale : six.scale;

  Nvfp4Octet out{};
  out.scale = flagged ? kFlaggedScale : smaller ? scales >> 8 : scales & 0xff;
  float h[8], rounded[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    rounded[c] = smaller ? four.rounded[c] : six.rounded[c];
    h[c] = copysignf(numerics::mul(rounded[c], scale), value[c]);
  }
  if (scale == 0.f) {  // codes without a sign
#pragma unroll
    for (int c = 0; c < 8; ++c) h[c] = 0.f;
  }
#pragma unroll
  for (int p = 0; p < 4; ++p) out.half[p] = ptx::pack_f16x2(h[2 * p], h[2 * p + 1]);
  if (codes_wanted) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {  // times 2^-126 a magnitude of E2M1 becomes an FP32 number whose upper bits are its code
      const std::uint32_t magnitude = __float_as_uint(numerics::mul(rounded[c], 0x1p-126f)) >> 22;
      out.codes |= (magnitude | (__float_as_uint(h[c]) >> 28 & 8u)) << 4 * c;
    }
  }
  return out;
}

/// Both tokens of one octet in the `rows_f16` layout: they are neighbours of 16 bytes, so lanes j and j ^ 1 trade and each pair writes 32
/// consecutive bytes at once. `group` points at the 16 slots.
template <int D>
__device__ __forceinline__ void store_halves(const Nvfp4Octet (&octet)[kLaneTokens], int index, const Lane& lane,
                                             std::uint16_t* group) {
  const bool odd = lane.j % 2 != 0;
  std::uint32_t mine[4], other[4];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    mine[p] = odd ? octet[1].half[p] : octet[0].half[p];
    other[p] = __shfl_xor_sync(kFullWarp, odd ? octet[0].half[p] : octet[1].half[p], 1);
  }
  const uint4 own{mine[0], mine[1], mine[2], mine[3]}, got{other[0], other[1], other[2], other[3]};
  auto* const slot = reinterpret_cast<uint4*>(group + lane.k / 4 * 8 * D) + lane_token(lane.k, odd) % 8;
  slot[index / 2 * 2 * 8] = odd ? got : own;        // the even lane's octet
  slot[(index / 2 * 2 + 1) * 8] = odd ? own : got;  // the odd lane's
}

/// NVFP4 of the lane's tokens, from values that `norm` still multiplies. `slot`: of the warp's first token, counted through the heads.
/// The octets go round in the registers and are back in their places at the end: unrolled, the loop is 80 KB of instructions.
template <int D>
__device__ __forceinline__ void quantise_nvfp4(Values<D> (&x)[kLaneTokens], float norm, const bool (&flagged)[kLaneTokens],
                                               const Lane& lane, std::int64_t slot, const Nvfp4Outputs& out) {
  const std::uint32_t bytes[kLaneTokens] = {flagged[0] ? numerics::kFlagged : 127u, flagged[1] ? numerics::kFlagged : 127u};
  store_bytes(bytes, lane, out.exponents + slot);
#pragma unroll 1
  for (int m = 0; m < Values<D>::kOctets; ++m) {
    const int index = kTokenLanes * m + lane.j;
    Nvfp4Octet octet[kLaneTokens];
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) octet[i] = encode_octet(x[i].octet[0], norm, flagged[i], out.codes != nullptr, lane);
    store_halves<D>(octet, index, lane, out.halves + slot * D);
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i)
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float first = x[i].octet[0][c];
#pragma unroll
        for (int o = 1; o < Values<D>::kOctets; ++o) x[i].octet[o - 1][c] = x[i].octet[o][c];
        x[i].octet[Values<D>::kOctets - 1][c] = first;
      }
    if (out.codes == nullptr) continue;
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      const std::int64_t token = slot + lane_token(lane.k, i);
      reinterpret_cast<std::uint32_t*>(out.codes + token * (D / 2))[index] = octet[i].codes;
      if (lane.j % 2 == 0) out.scales[token * (D / kScaleChannels) + index / 2] = static_cast<std::uint8_t>(octet[i].scale);
    }
  }
}

}  // namespace flamia::quantize::gpu
