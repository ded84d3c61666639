// SPDX-License-Identifier: Apache-2.0
// A thread makes eight channels of a slot at a time: it reads 8 bytes and writes 16. A warp writes whole lines of 128 bytes.
#include "quantize/cuda/dequantise.hpp"

#include <string>

#include "kernels/cuda/sm90/layout.hpp"
#include "kernels/cuda/sm90/values16.cuh"
#include "numerics/exponent.hpp"

namespace flamia::quantize::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kOctetsPerThread = 4;  // loads in flight

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
    const std::int64_t slot =
        std::int64_t{blockIdx.x} * (kOctetsPerThread * kThreads / kPerSlot) + in_block / (8 * kPerSlot) * 8 + in_atom / 8 % 8;
    to[i] = -1;
    if (slot >= end) continue;
    to[i] = sm90::rows16_offset(p.slots, D, head, slot, 8 * octet);
    codes[i] = __ldg(reinterpret_cast<const uint2*>(rows + sm90::rows_offset(p.slots, D, head, slot, 8 * octet)));
    bytes[i] = __ldg(exponents + head * p.slots + slot);
  }
#pragma unroll
  for (int i = 0; i < kOctetsPerThread; ++i)
    if (to[i] >= 0) *reinterpret_cast<uint4*>(values + to[i]) = values_of(codes[i], bytes[i]);
}

template <int D>
cudaError_t enqueue(const DequantiseParams& p, cudaStream_t stream) {
  constexpr std::int64_t kSlots = kOctetsPerThread * kThreads / (D / 8);  // of a thread block
  const dim3 grid(static_cast<unsigned>((p.slots + kSlots - 1) / kSlots),
                  static_cast<unsigned>(p.operands[0].heads + p.operands[1].heads));
  dequantise_kernel<D><<<grid, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

constexpr int kMostHeads = 65535;  // a grid's y

bool aligned(const void* pointer, std::uintptr_t bytes) { return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0; }

Status check(const DequantiseParams& p) {
  if (p.head_dim != 64 && p.head_dim != 128)
    return Status::unsupported("head_dim = " + std::to_string(p.head_dim) + ": the GPU makes values of 64 and 128 channels");
  const int heads = p.operands[0].heads + p.operands[1].heads;
  if (heads <= 0 || heads > kMostHeads)
    return Status::invalid("heads of both operands = " + std::to_string(heads) + " must be 1 to " + std::to_string(kMostHeads));
  for (const DequantiseParams::Operand& operand : p.operands) {
    if (operand.heads == 0) continue;
    if (operand.rows == nullptr || operand.exponents == nullptr || operand.values == nullptr || !aligned(operand.rows, 16) ||
        !aligned(operand.values, 16))
      return Status::invalid("rows, exponents and values must be device memory, rows and values aligned to 16 bytes");
  }
  if (p.used_slots == nullptr || p.slots <= 0) return Status::invalid("the schedule is missing: used_slots is null, or no slots");
  return {};
}

}  // namespace

Status launch_dequantise(const DequantiseParams& params, cudaStream_t stream) {
  if (Status status = check(params); !status.ok()) return status;
  const cudaError_t error = params.head_dim == 128 ? enqueue<128>(params, stream) : enqueue<64>(params, stream);
  if (error == cudaSuccess) return {};
  return {StatusCode::device_error, std::string("dequantise: ") + cudaGetErrorName(error) + ", " + cudaGetErrorString(error)};
}

}  // namespace flamia::quantize::gpu
