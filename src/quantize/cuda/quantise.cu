// SPDX-License-Identifier: Apache-2.0
//   warp                 both warps
//   load 16 tokens  ->   (rotate) -> maxima -> [token-block: exchange] -> exponents -> [sticky: look back] -> codes -> store
// A token-block of one head per thread block: nothing waits for another thread block but the look-back.
#include "quantize/cuda/quantise.hpp"

#include <limits>
#include <string>

#include "quantize/cuda/look_back.cuh"
#include "quantize/cuda/unit.cuh"

namespace flamia::quantize::gpu {
namespace {

template <int D>
struct Shared {
  Stage<D> stage[kUnitWarps];
  std::uint32_t exchange[kUnitWarps];
  std::uint32_t prefix[sm90::kBlock];  // bytes: of each token, then greatest up to it
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

/// Greatest byte of the document up to each of the lane's tokens. All threads of the unit.
template <int D>
__device__ __forceinline__ void find_prefix(const Lane& lane, const Scale (&scale)[kLaneTokens], const LookBack& before,
                                            Shared<D>& shared, std::uint32_t (&prefix)[kLaneTokens]) {
  if (lane.j == 0) {
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) shared.prefix[kGroupTokens * lane.warp + lane_token(lane.k, i)] = scale[i].prefix_byte();
  }
  __syncthreads();
  if (lane.warp == 0) {
    const std::uint32_t inside = warp_prefix_maximum(shared.prefix[threadIdx.x]);
    shared.prefix[threadIdx.x] = max(before.resolve(__shfl_sync(kFullWarp, inside, 31)), inside);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) prefix[i] = shared.prefix[kGroupTokens * lane.warp + lane_token(lane.k, i)];
}

/// Thread blocks that share a multiprocessor, a cap of 80 registers. Rotated values of d = 128 alone are 64, and the kernel waits for
/// shuffles: with 9 blocks (96 registers) it is 15 % slower (docs/log/quantise.md).
constexpr int kResidentUnits = 12;

template <int D, class Element, bool kRotate, Prefix kPrefix>
__global__ __launch_bounds__(kUnitThreads, kResidentUnits) void quantise_kernel(const __grid_constant__ QuantiseParams p) {
  __shared__ Shared<D> shared;
  const Lane lane;
  Unit unit;
  if (!unit.find(p.blocks, p.heads, lane.warp)) return;

  Raw<D> raw[kLaneTokens];
  load_input<D>(p, unit, lane, raw);
  [[maybe_unused]] const LookBack before(kPrefix == Prefix::none ? nullptr : p.scratch + unit.head * (p.slots / kGroupTokens),
                                         unit.block.slot, kPrefix == Prefix::none ? 0 : unit.block.position / sm90::kBlock);

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

  [[maybe_unused]] std::uint32_t prefix[kLaneTokens];
  if constexpr (kPrefix == Prefix::sticky) {
    find_prefix<D>(lane, scale, before, shared, prefix);
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) scale[i].exponent = static_cast<int>(prefix[i]) - 127;
  }

  if (unit.owned) {
    Codes<D> codes[kLaneTokens];
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      if constexpr (!kRotate) unpack<Element>(raw[i], x[i]);
    }
    encode(x, scale, kRotate ? numerics::rotation_norm(D) : 1.f, codes);
    const std::int64_t at = unit.head * p.slots + unit.slot;
    if (p.rows != nullptr) store_rows<D>(codes, lane, p.rows + at * D);
    if (p.transposed != nullptr) store_transposed<D>(codes, p.order, lane, shared.stage[lane.warp], p.transposed + at * D);
    const std::uint32_t bytes[kLaneTokens] = {scale[0].byte(), scale[1].byte()};
    store_bytes(bytes, lane, p.exponents + at);
  }
  if constexpr (kPrefix != Prefix::none) {
    if constexpr (kPrefix == Prefix::record) find_prefix<D>(lane, scale, before, shared, prefix);  // nothing waits for it
    if (unit.owned && p.prefix_exponents != nullptr)
      store_bytes(prefix, lane, p.prefix_exponents + unit.head * p.slots + unit.slot);
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

template <int D, class Element, bool kRotate>
void enqueue(const QuantiseParams& p, unsigned units, cudaStream_t stream) {
  if (p.group == Group::tensor) maximum_kernel<D, Element, kRotate><<<units, kUnitThreads, 0, stream>>>(p);
  switch (p.prefix) {
    case Prefix::none:
      quantise_kernel<D, Element, kRotate, Prefix::none><<<units, kUnitThreads, 0, stream>>>(p);
      break;
    case Prefix::record:
      quantise_kernel<D, Element, kRotate, Prefix::record><<<units, kUnitThreads, 0, stream>>>(p);
      break;
    case Prefix::sticky:
      quantise_kernel<D, Element, kRotate, Prefix::sticky><<<units, kUnitThreads, 0, stream>>>(p);
      break;
  }
}

template <int D, class Element>
void enqueue(const QuantiseParams& p, unsigned units, cudaStream_t stream) {
  p.rotate ? enqueue<D, Element, true>(p, units, stream) : enqueue<D, Element, false>(p, units, stream);
}

template <int D>
void enqueue(const QuantiseParams& p, unsigned units, cudaStream_t stream) {
  p.input.dtype == DType::bf16 ? enqueue<D, __nv_bfloat16>(p, units, stream) : enqueue<D, __half>(p, units, stream);
}

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
  if (scratch_bytes(p) > 0 && p.scratch == nullptr)
    return Status::invalid("scratch is null but " + std::to_string(scratch_bytes(p)) + " bytes are needed");
  if (p.block_capacity * p.heads > std::numeric_limits<std::int32_t>::max())
    return Status::unsupported(std::to_string(p.block_capacity) + " token-blocks of " + std::to_string(p.heads) +
                               " heads exceed the largest grid, 2^31 - 1; split the heads");
  return {};
}

}  // namespace

std::size_t scratch_bytes(const QuantiseParams& p) {
  if (p.group == Group::tensor) return sizeof(std::uint32_t);
  if (p.prefix == Prefix::none) return 0;
  return static_cast<std::size_t>(p.slots / kGroupTokens) * static_cast<std::size_t>(p.heads) * sizeof(std::uint32_t);
}

Status launch_quantise(const QuantiseParams& params, cudaStream_t stream) {
  QuantiseParams p = params;
  if (p.input.head_stride == 0) p.input.head_stride = p.head_dim;
  if (p.input.token_stride == 0) p.input.token_stride = static_cast<std::int64_t>(p.heads) * p.head_dim;
  if (Status status = check(p); !status.ok()) return status;
  cudaError_t error = cudaSuccess;
  if (const std::size_t bytes = scratch_bytes(p); bytes > 0) error = cudaMemsetAsync(p.scratch, 0, bytes, stream);
  if (error == cudaSuccess) {
    const auto units = static_cast<unsigned>(p.block_capacity * p.heads);
    p.head_dim == 128 ? enqueue<128>(p, units, stream) : enqueue<64>(p, units, stream);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess) return {};
  return {StatusCode::device_error, std::string("quantise: ") + cudaGetErrorName(error) + ", " + cudaGetErrorString(error)};
}

}  // namespace flamia::quantize::gpu
