// SPDX-License-Identifier: Apache-2.0
// NVFP4 of the 16 tokens that a warp holds: 16 channels share an E4M3 scale, amax / 6 or amax / 4, whichever errs less (numerics.md,
// section 7). Codes, scales and their products in FP16, which are exact, equal the host's bit for bit.
//
// A lane's octet of channels is half of such a group; its neighbour (lane ^ 1) holds the other half.
#pragma once
#include <cuda_fp8.h>

#include "kernels/cuda/ptx/arithmetic.cuh"
#include "kernels/cuda/ptx/registers.cuh"
#include "quantize/cuda/block_scale.cuh"
#include "quantize/cuda/quantise.hpp"
#include "quantize/cuda/tile.cuh"

namespace flamia::quantize::gpu {

inline constexpr std::uint32_t kFlaggedScale = 0x7f;
inline constexpr int kScaleChannels = 16;

inline constexpr std::uint32_t kOne = 0x3c003c00, kSix = 0x46004600;  // FP16, twice
inline constexpr std::uint32_t kTwoTo9 = 0x60006000, kMinusTwoTo9 = 0xe000e000;
inline constexpr std::uint32_t kSigns = 0x80008000;

/// Nearest magnitudes of E2M1, ties to even, of two FP16 numbers in 0 ... 6: the addition of 2^9 times one and a half of the power of two below
/// a number (at least 1) leaves one bit of mantissa.
__device__ __forceinline__ std::uint32_t round_e2m1x2(std::uint32_t pair) {
  const std::uint32_t magic = (ptx::max_f16x2(pair, kOne) & 0x7c007c00u) | 0x02000200u;
  return ptx::fma_f16x2(magic, kMinusTwoTo9, ptx::fma_f16x2(magic, kTwoTo9, pair));
}
/// x / 6, rounded to nearest: equal to the division for every x that does not make a scale of zero.
__device__ __forceinline__ float sixth(float x) {
  constexpr float kInverse = 1.f / 6.f;
  const float near = numerics::mul(x, kInverse);
  return numerics::fma(numerics::fma(-6.f, near, x), kInverse, near);
}
/// One of the two scales, and what it makes of the lane's octet.
struct Candidate {
  std::uint32_t rounded[4];  // magnitudes of E2M1, FP16
  float error;               // of the group, in units of the scale squared (encode.hpp)
};

/// y: the inverse of the scale. The quotients are left for their signs.
__device__ __forceinline__ Candidate round_octet(const float (&value)[8], float y, std::uint32_t (&quotients)[4]) {
  Candidate candidate;
  std::uint32_t sums = 0;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    quotients[p] = ptx::pack_f16x2(numerics::mul(value[2 * p], y), numerics::mul(value[2 * p + 1], y));
    const std::uint32_t magnitudes = ptx::magnitude_f16x2(quotients[p]);
    candidate.rounded[p] = round_e2m1x2(ptx::min_f16x2(magnitudes, kSix));
    const std::uint32_t off = ptx::subtract_f16x2(magnitudes, candidate.rounded[p]);
    sums = ptx::fma_f16x2(off, off, sums);
  }
  float even, odd;
  ptx::unpack_f16x2(sums, even, odd);
  const float octet = numerics::add(even, odd);
  candidate.error = numerics::add(octet, __shfl_xor_sync(kFullWarp, octet, 1));
  return candidate;
}

/// What is stored of one token's octet.
struct Nvfp4Octet {
  std::uint32_t codes;    // low nibble = first channel
  std::uint32_t scale;    // E4M3
  std::uint32_t half[4];  // code * scale
};

/// Codes from the pairs' FP16: times 2^-14 a number of E2M1 has its code in the upper bits.
__device__ __forceinline__ std::uint32_t codes_of(const std::uint32_t (&rounded)[4]) {
  constexpr std::uint32_t kTwoToMinus14 = 0x04000400;
  std::uint32_t codes = 0;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const std::uint32_t bits = ptx::multiply_f16x2(rounded[p], kTwoToMinus14);  // sign at 15, magnitude from 9 on
    const std::uint32_t nibbles = (bits >> 9 & 0x00070007u) | (bits >> 12 & 0x00080008u);
    codes |= (nibbles | nibbles >> 12) << 8 * p & 0xffu << 8 * p;
  }
  return codes;
}

/// `greatest`: magnitude of the lane's octet, before the norm; a flagged token is zero.
__device__ __forceinline__ Nvfp4Octet encode_octet(const float (&x)[8], float greatest, float norm, bool flagged,
                                                   bool codes_wanted) {
  float value[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) value[c] = numerics::mul(x[c], norm);
  const float amax = numerics::mul(fmaxf(greatest, __shfl_xor_sync(kFullWarp, greatest, 1)), norm);
  const std::uint16_t scales = ptx::pack_e4m3x2(sixth(amax), numerics::mul(amax, .25f));
  const __half2_raw decoded = __nv_cvt_fp8x2_to_halfraw2(scales, __NV_E4M3);
  const std::uint32_t both = decoded.x | static_cast<std::uint32_t>(decoded.y) << 16;
  float six, four;
  ptx::unpack_f16x2(both, six, four);
  std::uint32_t quotients[4];
  const Candidate by_six = round_octet(value, nearest_inverse(fmaxf(six, 0x1p-9f)), quotients);
  const Candidate by_four = round_octet(value, four == 0.f ? 0.f : nearest_inverse(four), quotients);  // then every code is 0
  const float six_error = numerics::mul(numerics::mul(six, six), by_six.error);
  const bool smaller = (six == 0.f) | (numerics::mul(numerics::mul(four, four), by_four.error) < six_error);

  Nvfp4Octet out{};
  out.scale = flagged ? kFlaggedScale : smaller ? scales >> 8 : scales & 0xff;
  const std::uint32_t factor = __byte_perm(both, 0, smaller ? 0x3232 : 0x1010);
  const std::uint32_t signs = four == 0.f ? 0u : kSigns;
  std::uint32_t rounded[4];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    rounded[p] = (smaller ? by_four.rounded[p] : by_six.rounded[p]) | (quotients[p] & signs);
    out.half[p] = ptx::multiply_f16x2(rounded[p], factor);
  }
  if (codes_wanted) out.codes = codes_of(rounded);
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
template <int D>
__device__ __forceinline__ void quantise_nvfp4(Values<D> (&x)[kLaneTokens], Octets<D> (&greatest)[kLaneTokens], float norm,
                                               const bool (&flagged)[kLaneTokens], const Lane& lane, std::int64_t slot,
                                               const Nvfp4Outputs& out) {
  if (__any_sync(kFullWarp, flagged[0] | flagged[1])) {
    ptx::mark();  // a branch: selections would be made always
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i)
      if (flagged[i]) x[i] = {}, greatest[i] = {};
  }
  const std::uint32_t bytes[kLaneTokens] = {flagged[0] ? numerics::kFlagged : 127u, flagged[1] ? numerics::kFlagged : 127u};
  store_bytes(bytes, lane, out.exponents + slot);
#pragma unroll
  for (int m = 0; m < Values<D>::kOctets; ++m) {
    const int index = kTokenLanes * m + lane.j;
    Nvfp4Octet octet[kLaneTokens];
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i)
      octet[i] = encode_octet(x[i].octet[m], greatest[i].of[m], norm, flagged[i], out.codes != nullptr);
    store_halves<D>(octet, index, lane, out.halves + slot * D);
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
