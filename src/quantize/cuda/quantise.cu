// SPDX-License-Identifier: Apache-2.0
//   warp                 both warps
//   load 16 tokens  ->   (rotate) -> maxima -> [token-block: exchange] -> exponents -> [sticky: guess what came before] -> codes -> store
// A token-block of one head per thread block: nothing waits for another thread block. Prefix maxima: a second kernel (prefix.cuh).
#include "quantize/cuda/quantise.hpp"

#include <limits>
#include <string>

#include "kernels/cuda/ptx/barrier.cuh"
#include "quantize/cuda/prefix.cuh"

namespace flamia::quantize::gpu {
namespace {

constexpr int kSecondWarp = 1;  // named barrier at which the second warp waits for the first one's greatest byte

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
/// shuffles: with 9 blocks (96 registers) it is 15 % slower (docs/log/quantise.md).
constexpr int kResidentUnits = 12;

template <int D, class Element, bool kRotate, Prefix kPrefix>
__global__ __launch_bounds__(kUnitThreads, kResidentUnits) void quantise_kernel(const __grid_constant__ QuantiseParams p) {
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
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    if constexpr (kRotate) {
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
    encode(x, scale, kRotate ? numerics::rotation_norm(D) : 1.f, codes);
    if (p.rows != nullptr) store_rows<D>(codes, lane, p.rows + at * D);
    if (p.transposed != nullptr) store_transposed<D>(codes, p.order, lane, shared.stage[lane.warp], p.transposed + at * D);
  }
}

/// Group::tensor: bits of the greatest magnitude, before the norm, in *p.scratch.
template <int D, class Element, bool kRotate>
__global__ __launch_bounds__(kUnitThreads) void maximum_kernel(const __grid_constant__ QuantiseParams p) {
  const Lane lane;
  Unit unit;
  if (!unit.find(p.blocks, p.heads, lane.warp) || unit.tokens == 0) return;  // warps do not meet
  Raw<D> raw[kLaneTokens];
  load_input<D>(p, unit, lane, raw);
  [[maybe_unused]] Raw<D> signs;
  if constexpr (kRotate) signs = load_signs<D>(lane);
  std::uint32_t greatest = 0;
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    if constexpr (kRotate) {
      Values<D> x;
      rotate_unscaled<Element>(raw[i], signs, lane, x);
      greatest = max(greatest, magnitude(x));
    } else {
      greatest = max(greatest, magnitude<Element>(raw[i]));
    }
  }
  raise_maximum(p.scratch, greatest);
}

/// A kernel that may start while the one before it still runs; it waits for it by itself.
template <class Kernel, class... Arguments>
cudaError_t launch_overlapped(Kernel kernel, dim3 grid, int threads, cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = grid;
  launch.blockDim = dim3(static_cast<unsigned>(threads));
  launch.stream = stream;
  launch.attrs = &overlap;
  launch.numAttrs = 1;
  return cudaLaunchKernelEx(&launch, kernel, arguments...);
}

/// Clear, quantise, scan. `prefix`: the kernel that scans.
template <class Quantise, class Prefix>
cudaError_t enqueue_with_prefix(Quantise quantise, Prefix prefix, const QuantiseParams& p, unsigned units, cudaStream_t stream) {
  const auto words = static_cast<std::int64_t>(PrefixScratch::cleared_bytes(p.slots, p.heads) / sizeof(uint4));
  clear_kernel<<<static_cast<unsigned>((words + 255) / 256), 256, 0, stream>>>(reinterpret_cast<uint4*>(p.scratch), words);
  if (const cudaError_t error = launch_overlapped(quantise, dim3(units), kUnitThreads, stream, p); error != cudaSuccess)
    return error;
  constexpr std::int64_t kSlots = kGroupTokens * kTileGroups * kPrefixWarps;  // of a thread block
  const dim3 grid(static_cast<unsigned>((p.slots + kSlots - 1) / kSlots), static_cast<unsigned>(p.heads));
  return launch_overlapped(prefix, grid, 32 * kPrefixWarps, stream, p);
}

template <int D, class Element, bool kRotate>
cudaError_t enqueue(const QuantiseParams& p, unsigned units, cudaStream_t stream) {
  if (p.group == Group::tensor) maximum_kernel<D, Element, kRotate><<<units, kUnitThreads, 0, stream>>>(p);
  switch (p.prefix) {
    case Prefix::none:
      quantise_kernel<D, Element, kRotate, Prefix::none><<<units, kUnitThreads, 0, stream>>>(p);
      return cudaGetLastError();
    case Prefix::record:  // a scan of bytes: which operand they belong to does not matter
      return enqueue_with_prefix(quantise_kernel<D, Element, kRotate, Prefix::record>,
                                 prefix_kernel<64, __nv_bfloat16, false, Prefix::record>, p, units, stream);
    case Prefix::sticky:
      return enqueue_with_prefix(quantise_kernel<D, Element, kRotate, Prefix::sticky>,
                                 prefix_kernel<D, Element, kRotate, Prefix::sticky>, p, units, stream);
  }
  return cudaErrorInvalidValue;
}

template <int D, class Element>
cudaError_t enqueue(const QuantiseParams& p, unsigned units, cudaStream_t stream) {
  return p.rotate ? enqueue<D, Element, true>(p, units, stream) : enqueue<D, Element, false>(p, units, stream);
}

template <int D>
cudaError_t enqueue(const QuantiseParams& p, unsigned units, cudaStream_t stream) {
  return p.input.dtype == DType::bf16 ? enqueue<D, __nv_bfloat16>(p, units, stream) : enqueue<D, __half>(p, units, stream);
}

constexpr int kMostHeads = 65535;  // a grid's y

bool aligned(const void* pointer, std::uintptr_t bytes) { return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0; }

Status check(const QuantiseParams& p) {
  if (p.head_dim != 64 && p.head_dim != 128)
    return Status::unsupported("head_dim = " + std::to_string(p.head_dim) + ": the GPU quantiser does 64 and 128; use the CPU");
  if (p.heads <= 0) return Status::invalid("heads = " + std::to_string(p.heads) + " must be positive");
  if (p.input.dtype == DType::f32)
    return Status::unsupported("dtype f32: the GPU quantiser reads bf16 and f16; convert first, or use the CPU");
  if (p.input.data == nullptr || !aligned(p.input.data, 16))
    return Status::invalid("input data must be device memory aligned to 16 bytes");
  if (p.input.token_stride % 8 != 0 || p.input.head_stride % 8 != 0)
    return Status::invalid("strides " + std::to_string(p.input.token_stride) + ", " + std::to_string(p.input.head_stride) +
                           " of the input must be multiples of 8 elements (16 bytes)");
  if (p.exponents == nullptr || !aligned(p.rows, 16) || !aligned(p.transposed, 16) || !aligned(p.exponents, 16))
    return Status::invalid("outputs of the quantiser must be device memory aligned to 16 bytes; exponents may not be null");
  if (p.group == Group::tensor && p.prefix != Prefix::none)
    return Status::invalid("a prefix maximum of exponents needs groups of tokens, not one exponent for the tensor");
  if (p.blocks == nullptr) return Status::invalid("the schedule is missing: blocks is null");
  if (scratch_bytes(p) > 0 && (p.scratch == nullptr || !aligned(p.scratch, 16)))
    return Status::invalid("scratch must be device memory of " + std::to_string(scratch_bytes(p)) + " bytes, aligned to 16");
  if (p.prefix != Prefix::none && (p.heads > kMostHeads || !aligned(p.prefix_exponents, 16)))
    return Status::unsupported("prefix maxima need prefix_exponents aligned to 16 bytes and at most " + std::to_string(kMostHeads) +
                               " heads; there are " + std::to_string(p.heads));
  if (p.block_capacity * p.heads > std::numeric_limits<std::int32_t>::max())
    return Status::unsupported(std::to_string(p.block_capacity) + " token-blocks of " + std::to_string(p.heads) +
                               " heads exceed the largest grid, 2^31 - 1; split the heads");
  return {};
}

}  // namespace

std::size_t scratch_bytes(const QuantiseParams& p) {
  if (p.group == Group::tensor) return sizeof(std::uint32_t);
  return p.prefix == Prefix::none ? 0 : PrefixScratch::bytes(p.slots, p.heads);
}

Status launch_quantise(const QuantiseParams& params, cudaStream_t stream) {
  QuantiseParams p = params;
  if (p.input.head_stride == 0) p.input.head_stride = p.head_dim;
  if (p.input.token_stride == 0) p.input.token_stride = static_cast<std::int64_t>(p.heads) * p.head_dim;
  if (Status status = check(p); !status.ok()) return status;
  cudaError_t error = cudaSuccess;
  if (p.group == Group::tensor) error = cudaMemsetAsync(p.scratch, 0, sizeof(std::uint32_t), stream);
  if (error == cudaSuccess) {
    const auto units = static_cast<unsigned>(p.block_capacity * p.heads);
    error = p.head_dim == 128 ? enqueue<128>(p, units, stream) : enqueue<64>(p, units, stream);
  }
  if (error == cudaSuccess) return {};
  return {StatusCode::device_error, std::string("quantise: ") + cudaGetErrorName(error) + ", " + cudaGetErrorString(error)};
}

}  // namespace flamia::quantize::gpu
