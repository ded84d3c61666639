// SPDX-License-Identifier: Apache-2.0
// 16 tokens of one head in the registers of a warp: load, rotate, find maxima, encode, store in both layouts.
//
// Lane (k, j) = (lane / 8, lane % 8) holds four tokens, 2k, 2k + 1, 2k + 8 and 2k + 9, and of each the channels 8j ... 8j + 7 of
// every 64. So
//   - a load of 16 bytes a lane takes 128 consecutive bytes of each of four tokens;
//   - the butterfly stays in registers but for h = 8, 16, 32, which exchange lanes 1, 2, 4 apart;
//   - a lane's codes of one channel are a word of the transposed layout: columns 4k ... 4k + 3 hold these four tokens, in the order
//     (0, 1, 2, 3) for `pi` and (0, 2, 1, 3) for `rho` (checked below).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/ptx/convert.cuh"
#include "kernels/cuda/sm90/layout.hpp"
#include "numerics/exponent.hpp"
#include "quantize/cuda/signs.hpp"

namespace flamia::quantize::gpu {

inline constexpr int kGroupTokens = 16;
inline constexpr int kLaneTokens = 4;
inline constexpr std::uint32_t kFullWarp = 0xffffffffu;
inline constexpr std::uint32_t kNonFinite = 0x7f800000u;  // magnitudes from here on are infinity and NaN

/// The i-th token of quad k.
__host__ __device__ constexpr int lane_token(int k, int i) { return 2 * k + i % 2 + i / 2 * 8; }

namespace layout_check {
constexpr bool columns_match() {
  for (int k = 0; k < 4; ++k)
    for (int i = 0; i < kLaneTokens; ++i) {
      if (sm90::pi_column(lane_token(k, i)) != 4 * k + i) return false;
      if (sm90::rho_column(lane_token(k, i)) != 4 * k + i % 2 * 2 + i / 2) return false;
    }
  return true;
}
}  // namespace layout_check
static_assert(layout_check::columns_match());

struct Lane {
  int j, k, warp;
  __device__ Lane() : j(threadIdx.x % 8), k(threadIdx.x % 32 / 8), warp(threadIdx.x / 32) {}
};

/// Two 16-bit elements of a register.
template <class Element>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  static __device__ float low(std::uint32_t w) { return __uint_as_float(w << 16); }
  static __device__ float high(std::uint32_t w) { return __uint_as_float(w & 0xffff0000u); }
  static __device__ std::uint32_t greater(std::uint32_t a, std::uint32_t b) {  // of magnitudes; NaN wins
    const __nv_bfloat162 m = __hmax2_nan(reinterpret_cast<const __nv_bfloat162&>(a), __habs2(reinterpret_cast<const __nv_bfloat162&>(b)));
    return reinterpret_cast<const std::uint32_t&>(m);
  }
};

template <>
struct Pair<__half> {
  static __device__ float low(std::uint32_t w) { return __low2float(reinterpret_cast<const __half2&>(w)); }
  static __device__ float high(std::uint32_t w) { return __high2float(reinterpret_cast<const __half2&>(w)); }
  static __device__ std::uint32_t greater(std::uint32_t a, std::uint32_t b) {
    const __half2 m = __hmax2_nan(reinterpret_cast<const __half2&>(a), __habs2(reinterpret_cast<const __half2&>(b)));
    return reinterpret_cast<const std::uint32_t&>(m);
  }
};

/// A lane's share of one token as it was loaded: kHalves times 8 elements.
template <int D>
struct Raw {
  static constexpr int kHalves = D / 64;
  uint4 half[kHalves];
};

template <int D>
struct Values {
  static constexpr int kHalves = D / 64;
  float half[kHalves][8];
};

template <int D>
struct Codes {
  static constexpr int kHalves = D / 64;
  std::uint32_t half[kHalves][2];  // four channels a word
};

/// `head` points at the head's first channel of the group's first token.
template <int D>
__device__ __forceinline__ void load(const std::uint16_t* head, std::int64_t token_stride, int tokens, const Lane& lane,
                                     Raw<D> (&raw)[kLaneTokens]) {
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    const int token = lane_token(lane.k, i);
    const auto* at = reinterpret_cast<const uint4*>(head + token * token_stride) + lane.j;
#pragma unroll
    for (int h = 0; h < Raw<D>::kHalves; ++h) raw[i].half[h] = token < tokens ? __ldg(at + 8 * h) : uint4{0, 0, 0, 0};
  }
}

/// Bits of the greatest magnitude in the lane's share of a token; infinity or NaN: kNonFinite or more.
template <class Element, int D>
__device__ __forceinline__ std::uint32_t magnitude(const Raw<D>& raw) {
  std::uint32_t greatest = 0;
#pragma unroll
  for (int h = 0; h < Raw<D>::kHalves; ++h) {
    greatest = Pair<Element>::greater(greatest, raw.half[h].x);
    greatest = Pair<Element>::greater(greatest, raw.half[h].y);
    greatest = Pair<Element>::greater(greatest, raw.half[h].z);
    greatest = Pair<Element>::greater(greatest, raw.half[h].w);
  }
  return __float_as_uint(ptx::max_or_nan(Pair<Element>::low(greatest), Pair<Element>::high(greatest))) & 0x7fffffffu;
}

template <int D>
__device__ __forceinline__ std::uint32_t magnitude(const Values<D>& x) {
  float greatest = 0.f;
#pragma unroll
  for (int h = 0; h < Values<D>::kHalves; ++h)
#pragma unroll
    for (int c = 0; c < 8; ++c) greatest = ptx::max_or_nan(greatest, fabsf(x.half[h][c]));
  return __float_as_uint(greatest) & 0x7fffffffu;
}

/// Over the eight lanes that share a token.
__device__ __forceinline__ std::uint32_t token_maximum(std::uint32_t bits) {
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) bits = max(bits, __shfl_xor_sync(kFullWarp, bits, distance));
  return bits;
}

template <class Element, int D>
__device__ __forceinline__ void unpack(const Raw<D>& raw, Values<D>& x) {
#pragma unroll
  for (int h = 0; h < Raw<D>::kHalves; ++h) {
    const std::uint32_t words[4] = {raw.half[h].x, raw.half[h].y, raw.half[h].z, raw.half[h].w};
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      x.half[h][2 * p] = Pair<Element>::low(words[p]);
      x.half[h][2 * p + 1] = Pair<Element>::high(words[p]);
    }
  }
}

/// numerics::rotate without its last step, the multiplication by 1/sqrt(d). The same additions in the same order, so the same bits.
template <class Element, int D>
__device__ __forceinline__ void rotate_unscaled(Raw<D>& raw, const Lane& lane, Values<D>& x) {
#pragma unroll
  for (int h = 0; h < Raw<D>::kHalves; ++h) {
    const std::uint32_t signs = sign_octet(8 * h + lane.j);
    raw.half[h].x ^= packed_signs(signs, 0);
    raw.half[h].y ^= packed_signs(signs, 1);
    raw.half[h].z ^= packed_signs(signs, 2);
    raw.half[h].w ^= packed_signs(signs, 3);
  }
  unpack<Element>(raw, x);
#pragma unroll
  for (int h = 0; h < Values<D>::kHalves; ++h) {
    float(&v)[8] = x.half[h];
#pragma unroll
    for (int step = 1; step < 8; step *= 2)
#pragma unroll
      for (int c = 0; c < 8; ++c)
        if ((c & step) == 0) {
          const float a = v[c], b = v[c + step];
          v[c] = numerics::add(a, b);
          v[c + step] = numerics::add(a, -b);
        }
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) {
      const float sign = (lane.j & distance) != 0 ? -1.f : 1.f;  // own * sign + partner: a + b below, a - b above, one rounding
#pragma unroll
      for (int c = 0; c < 8; ++c) v[c] = numerics::fma(v[c], sign, __shfl_xor_sync(kFullWarp, v[c], distance));
    }
  }
  if constexpr (D == 128) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float a = x.half[0][c], b = x.half[1][c];
      x.half[0][c] = numerics::add(a, b);
      x.half[1][c] = numerics::add(a, -b);
    }
  }
}

/// Below this exponent a product with 1/sqrt(d) may be subnormal and still matter; above it, one factor norm * 2^-e rounds as two.
inline constexpr int kFusedNorm = -96;

/// Codes of one token: E4M3(x * 2^-e), or with `norm` E4M3((x * norm) * 2^-e). A flagged token: zero.
template <int D>
__device__ __forceinline__ void encode(Values<D>& x, bool flagged, int exponent, float norm, Codes<D>& codes) {
  float factor = numerics::pow2(-exponent);
  if (norm != 1.f) {
    if (exponent < kFusedNorm) {
#pragma unroll
      for (int h = 0; h < Values<D>::kHalves; ++h)
#pragma unroll
        for (int c = 0; c < 8; ++c) x.half[h][c] = numerics::mul(x.half[h][c], norm);
    } else {
      factor = numerics::mul(norm, factor);
    }
  }
#pragma unroll
  for (int h = 0; h < Values<D>::kHalves; ++h)
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const float* v = x.half[h] + 4 * q;
      const std::uint32_t word = ptx::pack_e4m3x4(numerics::mul(v[0], factor), numerics::mul(v[1], factor),
                                                  numerics::mul(v[2], factor), numerics::mul(v[3], factor));
      codes.half[h][q] = flagged ? 0u : word;
    }
}

/// `rows` layout. `group` points at the 16 slots' codes (D * 16 bytes). Lanes j and j ^ 1 hold 8 bytes each of 16 channels: of two
/// neighbouring slots each lane keeps one and trades the other, then a store writes 512 consecutive bytes a warp.
template <int D>
__device__ __forceinline__ void store_rows(const Codes<D> (&codes)[kLaneTokens], const Lane& lane, std::uint8_t* group) {
  const bool odd = lane.j % 2 != 0;
#pragma unroll
  for (int h = 0; h < Codes<D>::kHalves; ++h)
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const std::uint32_t(&even_slot)[2] = codes[2 * s].half[h];
      const std::uint32_t(&odd_slot)[2] = codes[2 * s + 1].half[h];
      const std::uint32_t got0 = __shfl_xor_sync(kFullWarp, odd ? even_slot[0] : odd_slot[0], 1);
      const std::uint32_t got1 = __shfl_xor_sync(kFullWarp, odd ? even_slot[1] : odd_slot[1], 1);
      const uint4 piece = odd ? uint4{got0, got1, odd_slot[0], odd_slot[1]} : uint4{even_slot[0], even_slot[1], got0, got1};
      const int chunk = 4 * h + lane.j / 2;  // 16 channels
      *reinterpret_cast<uint4*>(group + 8 * s * D + chunk * 128 + (2 * lane.k + odd) * 16) = piece;
    }
}

/// Staging of the transposed store: 8 channels' 16 bytes each, then 16 bytes of padding, so that neither side meets bank conflicts.
template <int D>
struct Stage {
  uint4 piece[D / 8][9];
};

/// `transposed` layout. `group` points at the 16 slots' codes.
template <int D>
__device__ __forceinline__ void store_transposed(const Codes<D> (&codes)[kLaneTokens], sm90::TokenOrder order, const Lane& lane,
                                                 Stage<D>& stage, std::uint8_t* group) {
  const bool pi = order == sm90::TokenOrder::pi;
  const std::uint32_t first = pi ? 0x5410 : 0x5140, second = pi ? 0x7632 : 0x7362;  // byte selectors
#pragma unroll
  for (int h = 0; h < Codes<D>::kHalves; ++h)
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      auto* word = reinterpret_cast<std::uint32_t*>(&stage.piece[8 * h + lane.j][4 * q]) + lane.k;  // channel c: 4 words further
      const std::uint32_t t0 = codes[0].half[h][q], t1 = codes[1].half[h][q], t2 = codes[2].half[h][q], t3 = codes[3].half[h][q];
      const std::uint32_t low01 = __byte_perm(t0, t1, 0x5140), low23 = __byte_perm(t2, t3, 0x5140);    // channels 0, 1
      const std::uint32_t high01 = __byte_perm(t0, t1, 0x7362), high23 = __byte_perm(t2, t3, 0x7362);  // channels 2, 3
      word[0] = __byte_perm(low01, low23, first);
      word[4] = __byte_perm(low01, low23, second);
      word[8] = __byte_perm(high01, high23, first);
      word[12] = __byte_perm(high01, high23, second);
    }
  __syncwarp();
  const int in_warp = 8 * lane.k + lane.j;
#pragma unroll
  for (int r = 0; r < D / 32; ++r) {
    const int channel = 32 * r + in_warp;
    reinterpret_cast<uint4*>(group)[channel] = stage.piece[channel / 8][channel % 8];
  }
}

/// One byte a token; lanes with j = 0 write for their four tokens. `group` points at the 16 slots' bytes.
__device__ __forceinline__ void store_bytes(const std::uint32_t (&bytes)[kLaneTokens], const Lane& lane, std::uint8_t* group) {
  if (lane.j != 0) return;
  auto* pairs = reinterpret_cast<std::uint16_t*>(group);
  pairs[lane.k] = static_cast<std::uint16_t>(bytes[0] | bytes[1] << 8);
  pairs[lane.k + 4] = static_cast<std::uint16_t>(bytes[2] | bytes[3] << 8);
}

}  // namespace flamia::quantize::gpu
