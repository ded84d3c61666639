// SPDX-License-Identifier: Apache-2.0
// A thread makes eight channels of a slot at a time: it reads 8 bytes and writes 16. A warp writes whole lines of 128 bytes.
#include "quantize/cuda/dequantise.hpp"

#include "kernels/cuda/device_status.hpp"
#include "kernels/cuda/launch_overlapped.cuh"
#include "kernels/cuda/ptx/grid.cuh"
#include "kernels/cuda/sm90/layout.hpp"
#include "kernels/cuda/sm90/values16.cuh"
#include "numerics/exponent.hpp"
#include "quantize/cuda/saved_values.cuh"

namespace flamia::quantize::gpu {
namespace {

/// Eight codes times the power of two that the byte stands for.
__device__ __forceinline__ uint4 values_of(uint2 codes, int byte) {
  const float factor = byte == numerics::kFlagged ? 0.f : numerics::pow2(byte - 127);
  const uint2 first = sm90::values16(codes.x, factor), second = sm90::values16(codes.y, factor);
  return {first.x, first.y, second.x, second.y};
}

/// Grid: slots in x, heads of all operands in y.
template <int D>
__global__ __launch_bounds__(kThreads) void dequantise_kernel(const __grid_constant__ DequantiseParams p) {
  constexpr int kPerSlot = D / 8;
  const bool second = static_cast<int>(blockIdx.y) >= p.operands[0].heads;
  const std::int64_t head = static_cast<int>(blockIdx.y) - (second ? p.operands[0].heads : 0);
  const std::uint8_t* const rows = second ? p.operands[1].rows : p.operands[0].rows;
  const std::uint8_t* const exponents = second ? p.operands[1].exponents : p.operands[0].exponents;
  std::uint16_t* const values = second ? p.operands[1].values : p.operands[0].values;
  const std::int64_t end = *p.used_slots + sm90::kTailSlots;
  uint2 codes[kOctetsPerThread];
  int bytes[kOctetsPerThread];
  std::int64_t to[kOctetsPerThread];
#pragma unroll
  for (int i = 0; i < kOctetsPerThread; ++i) {
    // eight octets of a slot, then eight slots, then the octets of the next 64 channels
    const int in_block = i * kThreads + static_cast<int>(threadIdx.x), in_atom = in_block % (8 * kPerSlot);
    const int octet = in_atom % 8 + in_atom / 64 * 8;
    const std::int64_t slot = std::int64_t{blockIdx.x} * kSlotsPerThreadBlock<D> + in_block / (8 * kPerSlot) * 8 + in_atom / 8 % 8;
    to[i] = -1;
    if (slot >= end) continue;
    to[i] = sm90::rows16_offset(p.slots, D, head, slot, 8 * octet);
    codes[i] = __ldg(reinterpret_cast<const uint2*>(rows + sm90::rows_offset(p.slots, D, head, slot, 8 * octet)));
    bytes[i] = __ldg(exponents + head * p.slots + slot);
  }
#pragma unroll
  for (int i = 0; i < kOctetsPerThread; ++i)
    if (to[i] >= 0) *reinterpret_cast<uint4*>(values + to[i]) = values_of(codes[i], bytes[i]);
  // It reads nothing of the grid before, but whoever waits for this one waits for both.
  if (blockIdx.x == gridDim.x - 1 && blockIdx.y == gridDim.y - 1) ptx::wait_for_previous_grid();
}

template <int D>
cudaError_t enqueue(const DequantiseParams& p, cudaStream_t stream) {
  return launch_overlapped(dequantise_kernel<D>, grid_of<D>(p.slots, p.operands[0].heads + p.operands[1].heads), kThreads, 0,
                           stream, p);
}

Status check(const DequantiseParams& p) {
  for (const DequantiseParams::Operand& operand : p.operands)
    if (operand.heads != 0 && (operand.rows == nullptr || operand.exponents == nullptr || operand.values == nullptr ||
                               !aligned(operand.rows) || !aligned(operand.values)))
      return Status::invalid("rows, exponents and values must be device memory, rows and values aligned to 16 bytes");
  return check_saved(p, p.operands[0].heads + p.operands[1].heads);
}

}  // namespace

Status launch_dequantise(const DequantiseParams& params, cudaStream_t stream) {
  if (Status status = check(params); !status.ok()) return status;
  const cudaError_t error = params.head_dim == 128 ? enqueue<128>(params, stream) : enqueue<64>(params, stream);
  return device_status(error, "dequantise");
}

}  // namespace flamia::quantize::gpu
