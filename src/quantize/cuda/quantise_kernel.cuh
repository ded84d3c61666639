// SPDX-License-Identifier: Apache-2.0
//   warp                 both warps
//   load 16 tokens  ->   (rotate) -> maxima -> [token-block: exchange] -> exponents -> [sticky: guess what came before] -> (NVFP4) -> codes -> store
// A token-block of one head per thread block: nothing waits for another thread block. Prefix maxima: a second kernel (prefix.cuh).
#pragma once
#include "kernels/cuda/launch_overlapped.cuh"
#include "kernels/cuda/ptx/barrier.cuh"
#include "quantize/cuda/nvfp4.cuh"
#include "quantize/cuda/prefix.cuh"
#include "quantize/cuda/quantise.hpp"

namespace flamia::quantize::gpu {

inline constexpr int kSecondWarp = 1;  // named barrier at which the second warp waits for the first one's greatest byte

template <int D>
struct Shared {
  Stage<D> stage[kUnitWarps];
  std::uint32_t exchange[kUnitWarps];
  std::uint32_t first_warp;  // greatest byte of its tokens
};

template <int D>
__device__ __forceinline__ void load_input(const QuantiseParams& p, const Unit& unit, const Lane& lane,
                                           Raw<D> (&raw)[kLaneTokens]) {
  const std::int64_t token = unit.block.token + std::int64_t{kGroupTokens} * lane.warp;
  load(static_cast<const std::uint16_t*>(p.input.data) + token * p.input.token_stride + unit.head * p.input.head_stride,
       p.input.token_stride, unit.tokens, lane, raw);
}

/// Magnitudes are found before the norm is applied: rounding is monotone, so the greatest product is the greatest value's.
template <int D, bool kRotate>
__device__ __forceinline__ std::uint32_t normalised(std::uint32_t magnitude) {
  if (!kRotate || magnitude >= kNonFinite) return magnitude;
  return __float_as_uint(numerics::mul(__uint_as_float(magnitude), numerics::rotation_norm(D)));
}

/// Guess of the greatest byte of the document before this warp's tokens, `own` = theirs. All threads of the unit. Exact in a document's
/// first token-block.
template <int D>
__device__ __forceinline__ std::uint32_t guess_before(const Lane& lane, std::uint32_t own, const Guess& guess,
                                                      const PrefixScratch& scratch, Shared<D>& shared) {
  const std::uint32_t known = guess.before(own, scratch);
  if (lane.warp == 0) {
    if (threadIdx.x == 0) shared.first_warp = own;
    ptx::named_barrier_arrive(kSecondWarp, kUnitThreads);
    return known;
  }
  ptx::named_barrier_sync(kSecondWarp, kUnitThreads);
  return max(known, shared.first_warp);
}

/// Thread blocks that share a multiprocessor, a cap of 80 registers. Rotated values of d = 128 alone are 64, and the kernel waits for
/// shuffles: with 9 blocks (96 registers) it is 15 % slower (docs/log/quantise.md). NVFP4 needs its registers.
template <bool kNvfp4>
inline constexpr int kResidentUnits = kNvfp4 ? 8 : 12;

template <int D, class Element, bool kRotate, Prefix kPrefix, bool kNvfp4>
__global__ __launch_bounds__(kUnitThreads, kResidentUnits<kNvfp4>) void quantise_kernel(const __grid_constant__ QuantiseParams p) {
  __shared__ Shared<D> shared;
  if constexpr (kPrefix != Prefix::none) ptx::let_next_grid_start();
  const Lane lane;
  Unit unit;
  if (!unit.find(p.blocks, p.heads, lane.warp)) return;

  Raw<D> raw[kLaneTokens];
  load_input<D>(p, unit, lane, raw);
  [[maybe_unused]] const PrefixScratch scratch(p.scratch, p.slots, p.heads);
  if constexpr (kPrefix != Prefix::none) {
    ptx::wait_for_previous_grid();  // scratch is cleared
    scratch.describe(unit);
  }
  [[maybe_unused]] const Guess guess = kPrefix == Prefix::sticky ? Guess(scratch, unit) : Guess();

  [[maybe_unused]] Raw<D> signs;
  if constexpr (kRotate) signs = load_signs<D>(lane);
  Values<D> x[kLaneTokens];  // rotated values; without rotation the raw elements are kept instead: half the registers
  std::uint32_t greatest[kLaneTokens];
  [[maybe_unused]] Octets<D> octets[kLaneTokens];
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    if constexpr (kNvfp4) {
      rotate_unscaled<Element>(raw[i], signs, lane, x[i]);
      octets[i] = octet_magnitudes(x[i]);
      greatest[i] = magnitude(octets[i]);
    } else if constexpr (kRotate) {
      rotate_unscaled<Element>(raw[i], signs, lane, x[i]);
      greatest[i] = magnitude(x[i]);
    } else {
      greatest[i] = magnitude<Element>(raw[i]);
    }
  }
  Scale scale[kLaneTokens] = {Scale(0), Scale(0)};
  if (p.group == Group::token) {
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) scale[i] = Scale(normalised<D, kRotate>(token_maximum(greatest[i])));
  } else {
    const std::uint32_t all =
        p.group == Group::tensor ? *p.scratch : unit_maximum(max(greatest[0], greatest[1]), lane, shared.exchange);
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) scale[i] = Scale(normalised<D, kRotate>(all));
  }

  const std::int64_t at = unit.head * p.slots + unit.slot;
  if (unit.owned) {
    const std::uint32_t bytes[kLaneTokens] = {scale[0].byte(), scale[1].byte()};
    store_bytes(bytes, lane, p.exponents + at);
  }
  if constexpr (kPrefix != Prefix::none) {
    const std::uint32_t own = __reduce_max_sync(kFullWarp, max(scale[0].prefix_byte(), scale[1].prefix_byte()));
    std::uint32_t before = 0;
    if constexpr (kPrefix == Prefix::sticky) {
      before = guess_before<D>(lane, own, guess, scratch, shared);
      std::uint32_t prefix[kLaneTokens];
      prefix_in_group(lane, scale, before, own, prefix);
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i) scale[i].exponent = static_cast<int>(prefix[i]) - 127;
    }
    if (unit.owned && threadIdx.x % 32 == 0) scratch.summaries[at / kGroupTokens] = static_cast<std::uint16_t>(own | before << 8);
  }

  if (unit.owned) {
    Codes<D> codes[kLaneTokens];
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      if constexpr (!kRotate) unpack<Element>(raw[i], x[i]);
    }
    if constexpr (kNvfp4) {
      const bool flagged[kLaneTokens] = {token_maximum(greatest[0]) >= kNonFinite, token_maximum(greatest[1]) >= kNonFinite};
      quantise_nvfp4<D>(x, octets, numerics::rotation_norm(D), flagged, lane, at, p.nvfp4);
      if (p.rows == nullptr && p.transposed == nullptr) return;
    }
    encode(x, scale, kRotate ? numerics::rotation_norm(D) : 1.f, codes);
    if (p.rows != nullptr) store_rows<D>(codes, lane, p.rows + at * D);
    if (p.transposed != nullptr) store_transposed<D>(codes, p.order, lane, shared.stage[lane.warp], p.transposed + at * D);
  }
}

/// What comes before a kernel that leaves prefix maxima, and what comes after it (quantise.cu).
cudaError_t enqueue_clear(const QuantiseParams& p, cudaStream_t stream);
cudaError_t enqueue_prefix(const QuantiseParams& p, cudaStream_t stream);

template <class Kernel>
cudaError_t enqueue_with_prefix(Kernel kernel, const QuantiseParams& p, unsigned units, cudaStream_t stream) {
  if (const cudaError_t error = enqueue_clear(p, stream); error != cudaSuccess) return error;
  if (const cudaError_t error = launch_overlapped(kernel, dim3(units), kUnitThreads, 0, stream, p); error != cudaSuccess)
    return error;
  return enqueue_prefix(p, stream);
}

/// One operand by the recipe's groups and prefix maxima.
template <int D, class Element, bool kRotate, bool kNvfp4>
cudaError_t enqueue_codes(const QuantiseParams& p, unsigned units, cudaStream_t stream) {
  switch (p.prefix) {
    case Prefix::none:
      quantise_kernel<D, Element, kRotate, Prefix::none, kNvfp4><<<units, kUnitThreads, 0, stream>>>(p);
      return cudaGetLastError();
    case Prefix::record:
      return enqueue_with_prefix(quantise_kernel<D, Element, kRotate, Prefix::record, kNvfp4>, p, units, stream);
    case Prefix::sticky:
      return enqueue_with_prefix(quantise_kernel<D, Element, kRotate, Prefix::sticky, kNvfp4>, p, units, stream);
  }
  return cudaErrorInvalidValue;
}

/// With NVFP4 too (quantise_nvfp4.cu).
cudaError_t enqueue_nvfp4(const QuantiseParams& p, unsigned units, cudaStream_t stream);

}  // namespace flamia::quantize::gpu
