// SPDX-License-Identifier: Apache-2.0
// 16 tokens of one head in the registers of a warp: load, rotate, find maxima, encode, store in every layout asked for.
//
// Lane (k, j) = (lane / 4, lane % 4) holds two neighbouring tokens, 2 (k % 4) + 8 (k / 4) and the next, and of each the octets of
// channels j, j + 4, j + 8, ... So
//   - a load of 16 bytes a lane takes 64 consecutive bytes of each of eight tokens;
//   - the butterfly stays in registers but for h = 8 and 16, which exchange lanes 1 and 2 apart. (Eight lanes a token need a third
//     exchange: shuffles were what the kernel waited for.)
//   - lanes k and k ^ 4 together hold columns 4 (k % 4) ... 4 (k % 4) + 3 of the transposed layout: they trade half of their octets,
//     then each has words of it, four tokens in the order (0, 1, 2, 3) for `pi` and (0, 2, 1, 3) for `rho` (checked below).
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
inline constexpr int kLaneTokens = 2;
inline constexpr int kTokenLanes = 4;  // lanes that share a token
inline constexpr std::uint32_t kFullWarp = 0xffffffffu;
inline constexpr std::uint32_t kNonFinite = 0x7f800000u;  // magnitudes from here on are infinity and NaN

/// The i-th token of lane (k, j).
__host__ __device__ constexpr int lane_token(int k, int i) { return k % 4 * 2 + k / 4 * 8 + i; }

namespace layout_check {
constexpr bool columns_match() {
  for (int k = 0; k < 4; ++k)
    for (int i = 0; i < 4; ++i) {
      const int token = lane_token(k + i / 2 * 4, i % 2);
      if (sm90::pi_column(token) != 4 * k + i) return false;
      if (sm90::rho_column(token) != 4 * k + i % 2 * 2 + i / 2) return false;
    }
  return true;
}
}  // namespace layout_check
static_assert(layout_check::columns_match());

struct Lane {
  int j, k, warp;
  __device__ Lane() : j(threadIdx.x % kTokenLanes), k(threadIdx.x % 32 / kTokenLanes), warp(threadIdx.x / 32) {}
};

/// Two 16-bit elements of a register.
template <class Element>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  static __device__ float low(std::uint32_t w) { return __uint_as_float(w << 16); }
  static __device__ float high(std::uint32_t w) { return __uint_as_float(w & 0xffff0000u); }
  static __device__ std::uint32_t greater(std::uint32_t a, std::uint32_t b) {  // of magnitudes; NaN wins
    const __nv_bfloat162 m =
        __hmax2_nan(reinterpret_cast<const __nv_bfloat162&>(a), __habs2(reinterpret_cast<const __nv_bfloat162&>(b)));
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

/// Eight elements of a row.
template <class Element>
__device__ __forceinline__ void unpack_octet(const uint4& raw, float (&x)[8]) {
  const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    x[2 * p] = Pair<Element>::low(words[p]);
    x[2 * p + 1] = Pair<Element>::high(words[p]);
  }
}

/// A lane's share of one token as it was loaded: kOctets times 8 elements.
template <int D>
struct Raw {
  static constexpr int kOctets = D / (8 * kTokenLanes);
  uint4 octet[kOctets];
};

template <int D>
struct Values {
  static constexpr int kOctets = Raw<D>::kOctets;
  float octet[kOctets][8];
};

template <int D>
struct Codes {
  static constexpr int kOctets = Raw<D>::kOctets;
  std::uint32_t octet[kOctets][2];  // four channels a word
};

/// A group's exponent from the bits of its greatest magnitude.
struct Scale {
  bool flagged;
  int exponent;
  __device__ explicit Scale(std::uint32_t magnitude) : flagged(magnitude >= kNonFinite) {
    exponent = flagged ? 0 : numerics::ceil_exponent<numerics::kE4M3>(__uint_as_float(magnitude));
  }
  __device__ Scale(bool is_flagged, int known_exponent) : flagged(is_flagged), exponent(known_exponent) {}
  /// The first group of a document whose exponents are sticky.
  __device__ void raise(int headroom) {
    if (!flagged) exponent = static_cast<int>(numerics::with_headroom(static_cast<std::uint32_t>(exponent + 127), headroom)) - 127;
  }
  /// What the group adds to a prefix maximum.
  __device__ std::uint32_t prefix_byte() const { return flagged ? 0u : static_cast<std::uint32_t>(exponent + 127); }
  __device__ std::uint32_t byte() const { return flagged ? numerics::kFlagged : static_cast<std::uint32_t>(exponent + 127); }
};

/// `head` points at the head's first channel of the group's first token.
template <int D>
__device__ __forceinline__ void load(const std::uint16_t* head, std::int64_t token_stride, int tokens, const Lane& lane,
                                     Raw<D> (&raw)[kLaneTokens]) {
  const std::uint16_t* first = head + lane_token(lane.k, 0) * token_stride + 8 * lane.j;
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    const auto* at = reinterpret_cast<const uint4*>(first + i * token_stride);
#pragma unroll
    for (int m = 0; m < Raw<D>::kOctets; ++m)
      raw[i].octet[m] = lane_token(lane.k, i) < tokens ? __ldg(at + kTokenLanes * m) : uint4{0, 0, 0, 0};
  }
}

/// Bits of the greatest magnitude in the lane's share of a token; infinity or NaN: kNonFinite or more.
template <class Element, int D>
__device__ __forceinline__ std::uint32_t magnitude(const Raw<D>& raw) {
  std::uint32_t greatest = 0;
#pragma unroll
  for (int h = 0; h < Raw<D>::kOctets; ++h) {
    greatest = Pair<Element>::greater(greatest, raw.octet[h].x);
    greatest = Pair<Element>::greater(greatest, raw.octet[h].y);
    greatest = Pair<Element>::greater(greatest, raw.octet[h].z);
    greatest = Pair<Element>::greater(greatest, raw.octet[h].w);
  }
  return __float_as_uint(ptx::max_or_nan(Pair<Element>::low(greatest), Pair<Element>::high(greatest))) & 0x7fffffffu;
}

/// Greatest magnitude of each of a lane's octets; NaN wins.
template <int D>
struct Octets {
  float of[Values<D>::kOctets];
};
template <int D>
__device__ __forceinline__ Octets<D> octet_magnitudes(const Values<D>& x) {
  Octets<D> greatest;
#pragma unroll
  for (int h = 0; h < Values<D>::kOctets; ++h) {
    greatest.of[h] = 0.f;
#pragma unroll
    for (int c = 0; c < 8; ++c) greatest.of[h] = ptx::max_or_nan(greatest.of[h], fabsf(x.octet[h][c]));
  }
  return greatest;
}

template <int D>
__device__ __forceinline__ std::uint32_t magnitude(const Octets<D>& octets) {
  float greatest = octets.of[0];
#pragma unroll
  for (int h = 1; h < Values<D>::kOctets; ++h) greatest = ptx::max_or_nan(greatest, octets.of[h]);
  return __float_as_uint(greatest) & 0x7fffffffu;
}

template <int D>
__device__ __forceinline__ std::uint32_t magnitude(const Values<D>& x) {
  float greatest = 0.f;
#pragma unroll
  for (int h = 0; h < Values<D>::kOctets; ++h)
#pragma unroll
    for (int c = 0; c < 8; ++c) greatest = ptx::max_or_nan(greatest, fabsf(x.octet[h][c]));
  return __float_as_uint(greatest) & 0x7fffffffu;
}

/// Over the lanes that share a token.
__device__ __forceinline__ std::uint32_t token_maximum(std::uint32_t bits) {
#pragma unroll
  for (int distance = 1; distance < kTokenLanes; distance *= 2) bits = max(bits, __shfl_xor_sync(kFullWarp, bits, distance));
  return bits;
}

template <class Element, int D>
__device__ __forceinline__ void unpack(const Raw<D>& raw, Values<D>& x) {
#pragma unroll
  for (int h = 0; h < Raw<D>::kOctets; ++h) unpack_octet<Element>(raw.octet[h], x.octet[h]);
}

/// The rotation's sign bits of the lane's channels, to be combined with what `load` gives.
template <int D>
__device__ __forceinline__ Raw<D> load_signs(const Lane& lane) {
  Raw<D> signs;
#pragma unroll
  for (int h = 0; h < Raw<D>::kOctets; ++h)
    signs.octet[h] = __ldg(reinterpret_cast<const uint4*>(kPackedSigns.word) + kTokenLanes * h + lane.j);
  return signs;
}

/// numerics::rotate without its last step, the multiplication by 1/sqrt(d). The same additions in the same order, so the same bits.
template <class Element, int D>
__device__ __forceinline__ void rotate_unscaled(Raw<D>& raw, const Raw<D>& signs, const Lane& lane, Values<D>& x) {
#pragma unroll
  for (int h = 0; h < Raw<D>::kOctets; ++h) {
    raw.octet[h].x ^= signs.octet[h].x;
    raw.octet[h].y ^= signs.octet[h].y;
    raw.octet[h].z ^= signs.octet[h].z;
    raw.octet[h].w ^= signs.octet[h].w;
  }
  unpack<Element>(raw, x);
#pragma unroll
  for (int h = 0; h < Values<D>::kOctets; ++h) {
    float(&v)[8] = x.octet[h];
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
    for (int distance = 1; distance < kTokenLanes; distance *= 2) {
      const float sign = (lane.j & distance) != 0 ? -1.f : 1.f;  // own * sign + partner: a + b below, a - b above, one rounding
#pragma unroll
      for (int c = 0; c < 8; ++c) v[c] = numerics::fma(v[c], sign, __shfl_xor_sync(kFullWarp, v[c], distance));
    }
  }
#pragma unroll
  for (int step = 1; step < Values<D>::kOctets; step *= 2)
#pragma unroll
    for (int m = 0; m < Values<D>::kOctets; ++m)
      if ((m & step) == 0) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          const float a = x.octet[m][c], b = x.octet[m + step][c];
          x.octet[m][c] = numerics::add(a, b);
          x.octet[m + step][c] = numerics::add(a, -b);
        }
      }
}

/// Below this exponent a product with 1/sqrt(d) may be subnormal and still matter; above it, one factor norm * 2^-e rounds as two.
inline constexpr int kFusedNorm = -96;

template <int D>
__device__ __forceinline__ void encode_token(const Values<D>& x, float factor, Codes<D>& codes) {
#pragma unroll
  for (int h = 0; h < Values<D>::kOctets; ++h)
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const float* v = x.octet[h] + 4 * q;
      codes.octet[h][q] = ptx::pack_e4m3x4(numerics::mul(v[0], factor), numerics::mul(v[1], factor), numerics::mul(v[2], factor),
                                           numerics::mul(v[3], factor));
    }
}

template <int D>
__device__ __forceinline__ void clear_flagged(const Scale (&scale)[kLaneTokens], Codes<D> (&codes)[kLaneTokens]) {
  if (!scale[0].flagged && !scale[1].flagged) return;
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i)
    if (scale[i].flagged) codes[i] = Codes<D>{};
}

/// Codes of the lane's tokens: E4M3(x * 2^-e), or with `norm` E4M3((x * norm) * 2^-e). A flagged token: zero.
template <int D>
__device__ __forceinline__ void encode(Values<D> (&x)[kLaneTokens], const Scale (&scale)[kLaneTokens], float norm,
                                       Codes<D> (&codes)[kLaneTokens]) {
  if (norm != 1.f && min(scale[0].exponent, scale[1].exponent) < kFusedNorm) {
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i)
#pragma unroll
      for (int h = 0; h < Values<D>::kOctets; ++h)
#pragma unroll
        for (int c = 0; c < 8; ++c) x[i].octet[h][c] = numerics::mul(x[i].octet[h][c], norm);
    norm = 1.f;
  }
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) encode_token(x[i], numerics::mul(norm, numerics::pow2(-scale[i].exponent)), codes[i]);
  clear_flagged(scale, codes);
}

/// `rows` layout. `group` points at the 16 slots' codes (D * 16 bytes). Lanes j and j ^ 1 hold 8 bytes each of the same 16 channels
/// of two neighbouring slots: each keeps one slot's and trades the other's; a store then writes 256 consecutive bytes twice a warp.
template <int D>
__device__ __forceinline__ void store_rows(const Codes<D> (&codes)[kLaneTokens], const Lane& lane, std::uint8_t* group) {
  const bool odd = lane.j % 2 != 0;
  std::uint8_t* slot = group + lane.k / 4 * 8 * D + (lane_token(lane.k, odd) % 8) * 16;
#pragma unroll
  for (int m = 0; m < Codes<D>::kOctets; ++m) {
    const std::uint32_t(&even_slot)[2] = codes[0].octet[m];
    const std::uint32_t(&odd_slot)[2] = codes[1].octet[m];
    const std::uint32_t got0 = __shfl_xor_sync(kFullWarp, odd ? even_slot[0] : odd_slot[0], 1);
    const std::uint32_t got1 = __shfl_xor_sync(kFullWarp, odd ? even_slot[1] : odd_slot[1], 1);
    const uint4 piece = odd ? uint4{got0, got1, odd_slot[0], odd_slot[1]} : uint4{even_slot[0], even_slot[1], got0, got1};
    *reinterpret_cast<uint4*>(slot + (kTokenLanes * m + lane.j) / 2 * 128) = piece;  // chunks of 16 channels
  }
}

/// Staging of the transposed store: 8 channels' 16 bytes each, then 16 bytes of padding, so that neither side meets bank conflicts.
template <int D>
struct Stage {
  uint4 piece[D / 8][9];
};

/// `transposed` layout. `group` points at the 16 slots' codes. Lanes k < 4 take the even octets of the pair, the others the odd ones.
template <int D>
__device__ __forceinline__ void store_transposed(const Codes<D> (&codes)[kLaneTokens], sm90::TokenOrder order, const Lane& lane,
                                                 Stage<D>& stage, std::uint8_t* group) {
  const bool pi = order == sm90::TokenOrder::pi, upper = lane.k >= 4;
  const std::uint32_t first = pi ? 0x5410 : 0x5140, second = pi ? 0x7632 : 0x7362;  // byte selectors
#pragma unroll
  for (int m = 0; m < Codes<D>::kOctets; m += 2) {
    const int octet = kTokenLanes * (m + upper) + lane.j;
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      std::uint32_t kept[kLaneTokens], got[kLaneTokens];
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i) {
        kept[i] = upper ? codes[i].octet[m + 1][q] : codes[i].octet[m][q];
        got[i] = __shfl_xor_sync(kFullWarp, upper ? codes[i].octet[m][q] : codes[i].octet[m + 1][q], 16);
      }
      const std::uint32_t t0 = upper ? got[0] : kept[0], t1 = upper ? got[1] : kept[1];
      const std::uint32_t t2 = upper ? kept[0] : got[0], t3 = upper ? kept[1] : got[1];
      const std::uint32_t low01 = __byte_perm(t0, t1, 0x5140), low23 = __byte_perm(t2, t3, 0x5140);    // channels 0, 1
      const std::uint32_t high01 = __byte_perm(t0, t1, 0x7362), high23 = __byte_perm(t2, t3, 0x7362);  // channels 2, 3
      auto* word = reinterpret_cast<std::uint32_t*>(&stage.piece[octet][4 * q]) + lane.k % 4;          // channel c: 4 words further
      word[0] = __byte_perm(low01, low23, first);
      word[4] = __byte_perm(low01, low23, second);
      word[8] = __byte_perm(high01, high23, first);
      word[12] = __byte_perm(high01, high23, second);
    }
  }
  __syncwarp();
  const int in_warp = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int r = 0; r < D / 32; ++r) {
    const int channel = 32 * r + in_warp;
    reinterpret_cast<uint4*>(group)[channel] = stage.piece[channel / 8][channel % 8];
  }
}

/// One byte a token; lanes with j = 0 write for their two tokens. `group` points at the 16 slots' bytes.
__device__ __forceinline__ void store_bytes(const std::uint32_t (&bytes)[kLaneTokens], const Lane& lane, std::uint8_t* group) {
  if (lane.j == 0)
    reinterpret_cast<std::uint16_t*>(group)[lane_token(lane.k, 0) / 2] = static_cast<std::uint16_t>(bytes[0] | bytes[1] << 8);
}

}  // namespace flamia::quantize::gpu
