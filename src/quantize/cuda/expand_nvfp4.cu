// SPDX-License-Identifier: Apache-2.0
// A thread makes eight channels of a slot at a time: it reads 4 bytes of codes and a scale, and writes 16. Eight threads write a core matrix of
// 128 bytes.
#include "quantize/cuda/expand_nvfp4.hpp"

#include "kernels/cuda/device_status.hpp"
#include "kernels/cuda/sm90/layout.hpp"
#include "kernels/cuda/sm90/nvfp4_values.cuh"
#include "quantize/cuda/quantise.hpp"
#include "quantize/cuda/saved_values.cuh"

namespace flamia::quantize::gpu {
namespace {

/// Grid: slots in x, heads in y.
template <int D>
__global__ __launch_bounds__(kThreads) void expand_nvfp4_kernel(const __grid_constant__ ExpandNvfp4Params p) {
  constexpr int kPerSlot = D / 8;
  const std::int64_t head = blockIdx.y;
  const std::int64_t used = *p.used_slots;
  std::uint32_t code[kOctetsPerThread], scale[kOctetsPerThread];
  std::int64_t to[kOctetsPerThread];
#pragma unroll
  for (int i = 0; i < kOctetsPerThread; ++i) {
    const int in_block = i * kThreads + static_cast<int>(threadIdx.x), in_rows = in_block % (8 * kPerSlot), octet = in_rows / 8;
    const std::int64_t slot = std::int64_t{blockIdx.x} * kSlotsPerThreadBlock<D> + in_block / (8 * kPerSlot) * 8 + in_rows % 8;
    const std::int64_t at = head * p.slots + slot;
    to[i] = slot < used + sm90::kTailSlots ? rows_f16_offset(p.slots, D, head, slot, 8 * octet) : -1;
    const bool read = slot < used;
    code[i] = read ? __ldg(reinterpret_cast<const std::uint32_t*>(p.codes + at * (D / 2)) + octet) : 0u;
    scale[i] = read ? __ldg(p.scales + at * (D / 16) + octet / 2) : 0u;
  }
#pragma unroll
  for (int i = 0; i < kOctetsPerThread; ++i)
    if (to[i] >= 0) *reinterpret_cast<uint4*>(p.halves + to[i]) = sm90::nvfp4_values(code[i], scale[i]);
}

template <int D>
cudaError_t enqueue(const ExpandNvfp4Params& p, cudaStream_t stream) {
  expand_nvfp4_kernel<D><<<grid_of<D>(p.slots, p.heads), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

Status check(const ExpandNvfp4Params& p) {
  if (p.codes == nullptr || p.scales == nullptr || p.halves == nullptr || !aligned(p.codes, 4) || !aligned(p.halves))
    return Status::invalid("codes, scales and halves must be device memory, codes aligned to 4 bytes and halves to 16");
  return check_saved(p, p.heads);
}

}  // namespace

Status launch_expand_nvfp4(const ExpandNvfp4Params& params, cudaStream_t stream) {
  if (Status status = check(params); !status.ok()) return status;
  const cudaError_t error = params.head_dim == 128 ? enqueue<128>(params, stream) : enqueue<64>(params, stream);
  return device_status(error, "expanding NVFP4");
}

}  // namespace flamia::quantize::gpu
