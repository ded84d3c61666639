// SPDX-License-Identifier: Apache-2.0
// NVFP4 of a token that a lane holds (token_row.cuh): 16 channels share an E4M3 scale, amax / 6 or amax / 4, whichever errs less (numerics.md,
// section 7). Codes, scales and their products in FP16, which are exact, equal the host's bit for bit.
#pragma once
#include <cuda_fp8.h>

#include "kernels/cuda/ptx/arithmetic.cuh"
#include "kernels/cuda/ptx/registers.cuh"
#include "quantize/cuda/block_scale.cuh"
#include "quantize/cuda/quantise.hpp"
#include "quantize/cuda/token_row.cuh"

namespace flamia::quantize::gpu {

inline constexpr std::uint32_t kFlaggedScale = 0x7f;
inline constexpr int kScaleChannels = 16;

inline constexpr std::uint32_t kOne = 0x3c003c00, kSix = 0x46004600;  // FP16, twice
inline constexpr std::uint32_t kSigns = 0x80008000;

/// Nearest magnitudes of E2M1, ties to even, of two FP16 numbers in 0 ... 6: the addition of 768 = 2^9 * 1.5 times the power of two below a
/// number (at least 1) leaves one bit of mantissa.
__device__ __forceinline__ std::uint32_t round_e2m1x2(std::uint32_t pair) {
  constexpr std::uint32_t k768 = 0x62006200, kMinus768 = 0xe200e200;
  const std::uint32_t power = ptx::max_f16x2(pair, kOne) & 0x7c007c00u;
  return ptx::fma_f16x2(power, kMinus768, ptx::fma_f16x2(power, k768, pair));
}
/// x / 6, rounded to nearest: equal to the division for every x that does not make a scale of zero.
__device__ __forceinline__ float sixth(float x) {
  constexpr float kInverse = 1.f / 6.f;
  const float near = numerics::mul(x, kInverse);
  return numerics::fma(numerics::fma(-6.f, near, x), kInverse, near);
}
/// One of the two scales of 16 channels, and what it makes of them.
struct RowCandidate {
  std::uint32_t rounded[8];  // magnitudes of E2M1, FP16
  float error;               // in units of the scale squared (encode.hpp)
};

/// y: the inverse of the scale.
__device__ __forceinline__ RowCandidate round_group(const float* value, float y) {
  RowCandidate candidate;
  float octet[2];
#pragma unroll
  for (int o = 0; o < 2; ++o) {
    std::uint32_t sums = 0;
#pragma unroll
    for (int p = 4 * o; p < 4 * o + 4; ++p) {
      const std::uint32_t quotients =
          ptx::pack_f16x2(numerics::mul(fabsf(value[2 * p]), y), numerics::mul(fabsf(value[2 * p + 1]), y));
      candidate.rounded[p] = round_e2m1x2(ptx::min_f16x2(quotients, kSix));
      const std::uint32_t off = ptx::subtract_f16x2(quotients, candidate.rounded[p]);
      sums = ptx::fma_f16x2(off, off, sums);
    }
    float even, odd;
    ptx::unpack_f16x2(sums, even, odd);
    octet[o] = numerics::add(even, odd);
  }
  candidate.error = numerics::add(octet[0], octet[1]);
  return candidate;
}

/// Codes of eight channels from the pairs' FP16: times 2^-14 a number of E2M1 has its code in the upper bits.
__device__ __forceinline__ std::uint32_t codes_of(const std::uint32_t* rounded) {
  constexpr std::uint32_t kTwoToMinus14 = 0x04000400;
  std::uint32_t half[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    std::uint32_t nibbles[2];  // even channel from bit 0 on, odd channel from bit 16 on
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const std::uint32_t bits = ptx::multiply_f16x2(rounded[2 * h + p], kTwoToMinus14);  // sign at 15, magnitude from 9 on
      nibbles[p] = (bits >> 9 & 0x00070007u) | (bits >> 12 & 0x00080008u);
    }
    const std::uint32_t both = nibbles[0] + (nibbles[1] << 8);
    half[h] = both | both >> 12;  // its lower 16 bits
  }
  return __byte_perm(half[0], half[1], 0x5410);
}

/// What is stored of 16 channels.
struct Nvfp4Group {
  std::uint32_t codes[2];  // low nibble = first channel
  std::uint32_t scale;     // E4M3
  std::uint32_t half[8];   // code * scale
};

/// `amax`: of the group. All zero but for the scale if the token is flagged, whatever the values are.
__device__ __forceinline__ Nvfp4Group encode_group(const float* value, float amax, bool flagged, bool codes_wanted) {
  const std::uint16_t scales = ptx::pack_e4m3x2(sixth(amax), numerics::mul(amax, .25f));
  const __half2_raw decoded = __nv_cvt_fp8x2_to_halfraw2(scales, __NV_E4M3);
  const std::uint32_t both = decoded.x | static_cast<std::uint32_t>(decoded.y) << 16;
  float six, four;
  ptx::unpack_f16x2(both, six, four);
  const RowCandidate by_six = round_group(value, nearest_inverse(fmaxf(six, 0x1p-9f)));
  const RowCandidate by_four = round_group(value, four == 0.f ? 0.f : nearest_inverse(four));  // then every code is 0
  const float six_error = numerics::mul(numerics::mul(six, six), by_six.error);
  const bool smaller = (six == 0.f) | (numerics::mul(numerics::mul(four, four), by_four.error) < six_error);

  Nvfp4Group out{};
  out.scale = flagged ? kFlaggedScale : smaller ? scales >> 8 : scales & 0xff;
  const std::uint32_t factor = flagged ? 0u : __byte_perm(both, 0, smaller ? 0x3232 : 0x1010);
  const std::uint32_t signs = flagged || four == 0.f ? 0u : kSigns;
  std::uint32_t rounded[8];
#pragma unroll
  for (int p = 0; p < 8; ++p) {
    const std::uint32_t sign = __byte_perm(__float_as_uint(value[2 * p]), __float_as_uint(value[2 * p + 1]), 0x7632) & signs;
    rounded[p] = (smaller ? by_four.rounded[p] : by_six.rounded[p]) | sign;  // never NaN: that becomes 6
    out.half[p] = ptx::multiply_f16x2(rounded[p], factor);
  }
  if (codes_wanted) {
    out.codes[0] = flagged ? 0u : codes_of(rounded);
    out.codes[1] = flagged ? 0u : codes_of(rounded + 4);
  }
  return out;
}

/// Greatest magnitudes of a lane's groups of 16 channels, before the norm, where its row has been read: eight registers less.
template <int D>
struct GroupMagnitudes {
  static constexpr int kGroups = D / kScaleChannels, kBytes = kGroups * kRowTokens * static_cast<int>(sizeof(float));
  float* of_lane;  // 32 apart

  __device__ explicit GroupMagnitudes(Rows<D>& rows) : of_lane(reinterpret_cast<float*>(rows.bytes) + threadIdx.x % 32) {}
  /// All of the warp. The row's greatest magnitude.
  __device__ __forceinline__ std::uint32_t find(const float (&x)[D]) const {
    std::uint32_t greatest = 0;
    __syncwarp();  // the rows have been read
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const std::uint32_t bits = row_magnitude<kScaleChannels>(x, kScaleChannels * g);
      of_lane[32 * g] = __uint_as_float(bits);
      greatest = max(greatest, bits);
    }
    return greatest;
  }
  __device__ float operator[](int group) const { return of_lane[32 * group]; }
};

/// Codes of the unit, a token's D / 2 bytes after the other, leave through shared memory: a lane alone would write 16 bytes of 32 tokens at a time.
template <int D>
struct CodeStage {
  static constexpr int kPieces = D / 32, kStride = 16 * kPieces + 16;  // of 16 bytes; no bank conflicts
  std::uint8_t* bytes;

  __device__ explicit CodeStage(Rows<D>& rows) : bytes(rows.bytes + GroupMagnitudes<D>::kBytes) {
    static_assert(GroupMagnitudes<D>::kBytes + kRowTokens * kStride <= sizeof(Rows<D>));
  }
  __device__ void put(int piece, const uint4& codes) const {
    *reinterpret_cast<uint4*>(bytes + threadIdx.x % 32 * kStride + 16 * piece) = codes;
  }
  /// All of the warp. `codes` points at the unit's first token.
  __device__ __forceinline__ void store(const bool (&owned)[2], std::uint8_t* codes) const {
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kPieces; ++r) {
      const int i = 32 * r + static_cast<int>(threadIdx.x % 32), token = i / kPieces;
      if (owned[32 * r / kPieces / kGroupTokens])
        reinterpret_cast<uint4*>(codes)[i] = *reinterpret_cast<const uint4*>(bytes + token * kStride + 16 * (i % kPieces));
    }
  }
};

/// NVFP4 of the lane's token. `block`: of the unit's first slot, counted through the heads; `rows`: where `greatest` lies.
template <int D>
__device__ __forceinline__ void quantise_nvfp4(const float (&x)[D], const GroupMagnitudes<D>& greatest, bool flagged,
                                               const bool (&owned)[2], std::int64_t block, const Nvfp4Outputs& out, Rows<D>& rows) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool own = lane < kGroupTokens ? owned[0] : owned[1];
  const std::int64_t slot = block + lane;
  if (own) out.exponents[slot] = static_cast<std::uint8_t>(flagged ? numerics::kFlagged : 127);
  std::uint16_t* const halves = out.halves + (block + lane / 8 * 8) * D + lane % 8 * 8;
  const CodeStage<D> stage(rows);
  std::uint32_t codes[4], scales[D / 64] = {};
#pragma unroll
  for (int g = 0; g < D / kScaleChannels; ++g) {
    const float amax = numerics::mul(greatest[g], numerics::rotation_norm(D));
    const Nvfp4Group group = encode_group(x + kScaleChannels * g, amax, flagged, out.codes != nullptr);
    auto* const at = reinterpret_cast<uint4*>(halves + 128 * g);  // an octet of eight slots: 64 elements
    if (own) at[0] = {group.half[0], group.half[1], group.half[2], group.half[3]};
    if (own) at[8] = {group.half[4], group.half[5], group.half[6], group.half[7]};
    scales[g / 4] |= group.scale << 8 * (g % 4);
    codes[g % 2 * 2] = group.codes[0];
    codes[g % 2 * 2 + 1] = group.codes[1];
    if (out.codes != nullptr && g % 2 == 1) stage.put(g / 2, {codes[0], codes[1], codes[2], codes[3]});
  }
  if (out.codes == nullptr) return;
  stage.store(owned, out.codes + block * (D / 2));
  if (!own) return;
  auto* const to = reinterpret_cast<std::uint32_t*>(out.scales + slot * (D / kScaleChannels));
#pragma unroll
  for (int w = 0; w < D / 64; ++w) to[w] = scales[w];
}

}  // namespace flamia::quantize::gpu
