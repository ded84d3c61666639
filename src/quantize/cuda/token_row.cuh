// SPDX-License-Identifier: Apache-2.0
// Rotated operands: a lane holds a whole token, so the butterfly, the maximum and NVFP4's groups need no other lane. The rows come through shared
// memory, because a lane that loaded its own row would read 16 bytes of 32 rows at a time.
#pragma once
#include "kernels/cuda/ptx/async_copy.cuh"
#include "kernels/cuda/ptx/registers.cuh"
#include "numerics/hadamard.hpp"
#include "quantize/cuda/tile.cuh"

namespace flamia::quantize::gpu {

inline constexpr int kRowTokens = 32;  // of a warp: a token-block
static_assert(kRowTokens == sm90::kBlock);

/// 32 rows of a head as they were read, 16-byte chunks permuted within a row so that neither the copy nor eight lanes that read the same
/// chunk of eight rows meet bank conflicts. Later the stage of the transposed store.
template <int D>
struct alignas(128) Rows {
  static constexpr int kChunks = D / 8;
  std::uint8_t bytes[kRowTokens * D * 2];
};

/// Starts copying, kThreads threads together. `head` points at the head's first channel of the first token; rows from `tokens` on become zero.
template <int D, int kThreads>
__device__ __forceinline__ void fetch_rows(const std::uint16_t* head, std::int64_t token_stride, int tokens, Rows<D>& rows) {
  constexpr int kTogether = kThreads / Rows<D>::kChunks;  // rows of one instruction
  static_assert(kTogether <= 8);
  // Asked for anew where registers are short: nothing that follows from it is then kept from unit to unit.
  const unsigned all = kThreads == 32 ? threadIdx.x : static_cast<unsigned>(ptx::thread_index());
  const int thread = static_cast<int>(all % kThreads), row = thread / Rows<D>::kChunks, chunk = thread % Rows<D>::kChunks;
  const std::uint32_t to = ptx::shared_address(rows.bytes) + static_cast<std::uint32_t>(row * 2 * D);
  const auto copy = [&](auto wanted) {
    const std::uint16_t* from = head + row * token_stride + 8 * chunk;
#pragma unroll
    for (int i = 0; i < kRowTokens / kTogether; ++i) {
      const auto place = static_cast<std::uint32_t>(chunk ^ row ^ (i * kTogether % 8));  // chunk ^ row of the copy % 8
      ptx::copy_async16(to + 16 * place + static_cast<std::uint32_t>(i * kTogether * 2 * D), from, wanted(i * kTogether + row));
      from += kTogether * token_stride;
    }
  };
  if (tokens == kRowTokens)
    copy([](int) { return true; });
  else
    copy([&](int r) { return r < tokens; });
}

/// The lane's row, rotated but for the multiplication by 1/sqrt(d): numerics::rotate's additions in its order, so the same bits.
template <class Element, int D>
__device__ __forceinline__ void rotate_row(const Rows<D>& rows, float (&x)[D]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::uint8_t* const row = rows.bytes + lane * 2 * D;
#pragma unroll
  for (int chunk = 0; chunk < Rows<D>::kChunks; ++chunk) {
    float v[8];
    unpack_octet<Element>(*reinterpret_cast<const uint4*>(row + 16 * (chunk ^ lane % 8)), v);
#pragma unroll
    for (int c = 0; c < 8; ++c) x[8 * chunk + c] = numerics::rotation_sign(8 * chunk + c) != 0 ? -v[c] : v[c];
  }
#pragma unroll
  for (int h = 1; h < D; h *= 2)
#pragma unroll
    for (int c = 0; c < D; ++c)
      if ((c & h) == 0) {
        const float a = x[c], b = x[c + h];
        x[c] = numerics::add(a, b);
        x[c + h] = numerics::add(a, -b);
      }
}

/// Bits of the greatest magnitude; infinity or NaN: kNonFinite or more.
template <int kCount, int D>
__device__ __forceinline__ std::uint32_t row_magnitude(const float (&x)[D], int first) {
  constexpr int kChains = kCount / 16 > 1 ? kCount / 16 : 2;
  float greatest[kChains];
#pragma unroll
  for (int c = 0; c < kCount; ++c)
    greatest[c % kChains] = c < kChains ? fabsf(x[first + c]) : ptx::max_or_nan(greatest[c % kChains], fabsf(x[first + c]));
#pragma unroll
  for (int step = kChains / 2; step > 0; step /= 2)
#pragma unroll
    for (int c = 0; c < step; ++c) greatest[c] = ptx::max_or_nan(greatest[c], greatest[c + step]);
  return __float_as_uint(greatest[0]) & 0x7fffffffu;
}

/// A token's codes, four channels a word.
template <int D>
struct RowCodes {
  std::uint32_t word[D / 4];
};

/// The factor that makes values of the exponent's scale: E4M3((x * norm) * 2^-e) = E4M3(x * factor). Where a product with the norm may be subnormal
/// and matter, x is multiplied here, for all of the warp.
template <int D>
__device__ __forceinline__ float code_factor(float (&x)[D], int exponent) {
  float norm = numerics::rotation_norm(D);
  if (__any_sync(kFullWarp, exponent < kFusedNorm)) {
    ptx::mark();  // a branch: selections would be made always
#pragma unroll
    for (int c = 0; c < D; ++c) x[c] = numerics::mul(x[c], norm);
    norm = 1.f;
  }
  return numerics::mul(norm, numerics::pow2(-exponent));
}

template <int D>
__device__ __forceinline__ void clear_row(bool flagged, float (&x)[D]) {
  if (!__any_sync(kFullWarp, flagged)) return;
  ptx::mark();
#pragma unroll
  for (int c = 0; c < D; ++c) x[c] = flagged ? 0.f : x[c];
}

template <int D>
__device__ __forceinline__ std::uint32_t encode_four(const float (&x)[D], int first, float factor) {
  return ptx::pack_e4m3x4(numerics::mul(x[first], factor), numerics::mul(x[first + 1], factor), numerics::mul(x[first + 2], factor),
                          numerics::mul(x[first + 3], factor));
}

/// `rows` layout; `block` points at the 32 slots' codes, `word(w)` makes four channels. A store of the warp writes 128 consecutive bytes four times.
template <int D, class Word>
__device__ __forceinline__ void store_row(Word word, std::uint8_t* block) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  std::uint8_t* const slot = block + lane / 8 * 8 * D + lane % 8 * 16;
#pragma unroll
  for (int m = 0; m < D / 16; ++m)
    *reinterpret_cast<uint4*>(slot + 128 * m) = uint4{word(4 * m), word(4 * m + 1), word(4 * m + 2), word(4 * m + 3)};
}

/// `transposed` layout; `block` points at the 32 slots' codes, `owned` says whose 16 slots may be written. The four lanes of tokens 2k, 2k + 1,
/// 2k + 8, 2k + 9 transpose their bytes, four channels at a time; 16 tokens of a channel meet in shared memory.
template <int D>
__device__ __forceinline__ void store_row_transposed(const RowCodes<D>& codes, sm90::TokenOrder order, bool first_owned,
                                                     bool second_owned, Rows<D>& stage, std::uint8_t* block) {
  constexpr int kGroupBytes = kGroupTokens * D, kGroupStride = kGroupBytes + 16;  // both groups' stores meet no bank conflicts
  static_assert(2 * kGroupStride <= static_cast<int>(sizeof(Rows<D>)));
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool odd = lane % 2 != 0, upper = lane / 8 % 2 != 0, pi = order == sm90::TokenOrder::pi;
  // byte selectors for (own, partner's)
  const std::uint32_t low = odd ? 0x1504 : 0x5140, high = odd ? 0x3726 : 0x7362;
  const std::uint32_t even_channel = pi ? (upper ? 0x1054 : 0x5410) : (upper ? 0x1504 : 0x5140);
  const std::uint32_t odd_channel = pi ? (upper ? 0x3276 : 0x7632) : (upper ? 0x3726 : 0x7362);
  __syncwarp();  // the rows have been read
  auto* const to =
      reinterpret_cast<std::uint32_t*>(stage.bytes + lane / 16 * kGroupStride) + (4 * odd + 2 * upper) * 4 + lane % 8 / 2;
#pragma unroll
  for (int w = 0; w < D / 4; w += 2) {
    const std::uint32_t own = odd ? codes.word[w + 1] : codes.word[w];
    const std::uint32_t partner = __shfl_xor_sync(kFullWarp, odd ? codes.word[w] : codes.word[w + 1], 1);
    const std::uint32_t channels01 = __byte_perm(own, partner, low), channels23 = __byte_perm(own, partner, high);  // of two tokens
    const std::uint32_t kept = upper ? channels23 : channels01;
    const std::uint32_t got = __shfl_xor_sync(kFullWarp, upper ? channels01 : channels23, 8);
    to[16 * w] = __byte_perm(kept, got, even_channel);  // a channel: four words
    to[16 * w + 4] = __byte_perm(kept, got, odd_channel);
  }
  __syncwarp();
#pragma unroll
  for (int r = 0; r < D / 16; ++r) {
    const int group = r / (D / 32), channel = r % (D / 32) * 32 + lane;
    if (group == 0 ? first_owned : second_owned)
      reinterpret_cast<uint4*>(block + group * kGroupBytes)[channel] =
          *reinterpret_cast<const uint4*>(stage.bytes + group * kGroupStride + 16 * channel);
  }
}

}  // namespace flamia::quantize::gpu
