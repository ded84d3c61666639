// SPDX-License-Identifier: Apache-2.0
#include "quantize/cuda/quantise.hpp"

#include <limits>
#include <string>

#include "kernels/cuda/dense_strides.hpp"
#include "kernels/cuda/device_status.hpp"
#include "quantize/cuda/checks.hpp"
#include "quantize/cuda/quantise_kernel.cuh"

namespace flamia::quantize::gpu {
namespace {

/// Before the kernel that quantises, which waits for it only when it asks for what is known.
__global__ __launch_bounds__(256) void clear_kernel(uint4* words, std::int64_t count) {
  ptx::let_next_grid_start();
  const std::int64_t i = std::int64_t{256} * blockIdx.x + threadIdx.x;
  if (i < count) words[i] = {0, 0, 0, 0};
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
cudaError_t enqueue(const QuantiseParams& p, unsigned units, cudaStream_t stream) {
  if (p.group == Group::tensor) maximum_kernel<D, Element, kRotate><<<units, kUnitThreads, 0, stream>>>(p);
  return enqueue_codes<D, Element, kRotate, false>(p, units, stream);
}

template <int D, class Element>
cudaError_t enqueue(const QuantiseParams& p, unsigned units, cudaStream_t stream) {
  return p.rotate ? enqueue<D, Element, true>(p, units, stream) : enqueue<D, Element, false>(p, units, stream);
}

template <int D>
cudaError_t enqueue(const QuantiseParams& p, unsigned units, cudaStream_t stream) {
  return p.input.dtype == DType::bf16 ? enqueue<D, __nv_bfloat16>(p, units, stream) : enqueue<D, __half>(p, units, stream);
}

template <int D, class Element, bool kRotate>
cudaError_t enqueue_sticky(const QuantiseParams& p, dim3 grid, cudaStream_t stream) {
  return launch_overlapped(prefix_kernel<D, Element, kRotate, Prefix::sticky>, grid, 32 * kPrefixWarps, 0, stream, p);
}

template <int D, class Element>
cudaError_t enqueue_sticky(const QuantiseParams& p, dim3 grid, cudaStream_t stream) {
  return p.rotate ? enqueue_sticky<D, Element, true>(p, grid, stream) : enqueue_sticky<D, Element, false>(p, grid, stream);
}

template <int D>
cudaError_t enqueue_sticky(const QuantiseParams& p, dim3 grid, cudaStream_t stream) {
  return p.input.dtype == DType::bf16 ? enqueue_sticky<D, __nv_bfloat16>(p, grid, stream)
                                      : enqueue_sticky<D, __half>(p, grid, stream);
}

Status check(const QuantiseParams& p) {
  if (Status s = check_operand(p.input.dtype, p.heads, p.head_dim); !s.ok()) return s;
  if (p.input.data == nullptr || !aligned(p.input.data, 16))
    return Status::invalid("input data must be device memory aligned to 16 bytes");
  if (p.input.token_stride % 8 != 0 || p.input.head_stride % 8 != 0)
    return Status::invalid("strides " + std::to_string(p.input.token_stride) + ", " + std::to_string(p.input.head_stride) +
                           " of the input must be multiples of 8 elements (16 bytes)");
  if (p.exponents == nullptr || !aligned(p.rows, 16) || !aligned(p.transposed, 16) || !aligned(p.exponents, 16))
    return Status::invalid("outputs of the quantiser must be device memory aligned to 16 bytes; exponents may not be null");
  if (p.group == Group::tensor && p.prefix != Prefix::none)
    return Status::invalid("a prefix maximum of exponents needs groups of tokens, not one exponent for the tensor");
  if (p.nvfp4.halves != nullptr) {
    const Nvfp4Outputs& out = p.nvfp4;
    if (!p.rotate || p.group == Group::tensor)
      return Status::unsupported("NVFP4 is made of rotated values, beside codes with an exponent for groups of tokens");
    if (!aligned(out.halves, 16) || out.exponents == nullptr || !aligned(out.exponents, 16) || !aligned(out.codes, 4) ||
        (out.codes == nullptr) != (out.scales == nullptr))
      return Status::invalid(
          "outputs of NVFP4 must be aligned to 16 bytes; exponents may not be null, codes and scales go together");
  }
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

cudaError_t enqueue_clear(const QuantiseParams& p, cudaStream_t stream) {
  const auto words = static_cast<std::int64_t>(PrefixScratch::cleared_bytes(p.slots, p.heads) / sizeof(uint4));
  clear_kernel<<<static_cast<unsigned>((words + 255) / 256), 256, 0, stream>>>(reinterpret_cast<uint4*>(p.scratch), words);
  return cudaSuccess;  // what follows reports an error of the launch
}

cudaError_t enqueue_prefix(const QuantiseParams& p, cudaStream_t stream) {
  constexpr std::int64_t kSlots = kGroupTokens * kTileGroups * kPrefixWarps;  // of a thread block
  const dim3 grid(static_cast<unsigned>((p.slots + kSlots - 1) / kSlots), static_cast<unsigned>(p.heads));
  if (p.prefix == Prefix::record)  // a scan of bytes: which operand they belong to does not matter
    return launch_overlapped(prefix_kernel<64, __nv_bfloat16, false, Prefix::record>, grid, 32 * kPrefixWarps, 0, stream, p);
  return p.head_dim == 128 ? enqueue_sticky<128>(p, grid, stream) : enqueue_sticky<64>(p, grid, stream);
}

std::size_t scratch_bytes(const QuantiseParams& p) {
  if (p.group == Group::tensor) return sizeof(std::uint32_t);
  return p.prefix == Prefix::none ? 0 : PrefixScratch::bytes(p.slots, p.heads);
}

Status launch_quantise(const QuantiseParams& params, cudaStream_t stream) {
  QuantiseParams p = params;
  fill_dense_strides(p.input, p.heads, p.head_dim);
  if (Status status = check(p); !status.ok()) return status;
  cudaError_t error = cudaSuccess;
  if (p.group == Group::tensor) error = cudaMemsetAsync(p.scratch, 0, sizeof(std::uint32_t), stream);
  if (error == cudaSuccess) {
    const auto units = static_cast<unsigned>(p.block_capacity * p.heads);
    error = p.nvfp4.halves != nullptr ? enqueue_nvfp4(p, units, stream)
            : p.head_dim == 128       ? enqueue<128>(p, units, stream)
                                      : enqueue<64>(p, units, stream);
  }
  return device_status(error, "quantise");
}

}  // namespace flamia::quantize::gpu
