// SPDX-License-Identifier: Apache-2.0
#include "schedule/cuda/clear.hpp"

#include <string>

#include "kernels/cuda/dense_strides.hpp"
#include "kernels/cuda/device_status.hpp"
#include "kernels/cuda/ptx/grid.cuh"

namespace flamia::schedule::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 264;  // two per multiprocessor of an H200; any number is right

/// A dense walk over [token][head][channel] of the uncovered tokens, one 16-bit or 32-bit element a thread: rows may have any stride.
template <class Element>
__device__ void clear(const ClearTensor& target, int head_dim, std::int64_t begin, std::int64_t end, std::int64_t tokens) {
  const MutableTensorView& t = target.tensor;
  const std::int64_t row = static_cast<std::int64_t>(target.heads) * head_dim;
  const std::int64_t uncovered = begin + (tokens - end);
  auto* data = static_cast<Element*>(t.data);
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x; i < uncovered * row;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    const std::int64_t n = i / row, in_row = i % row;
    const std::int64_t token = n < begin ? n : end + (n - begin);
    data[token * t.token_stride + in_row / head_dim * t.head_stride + in_row % head_dim] = Element{0};
  }
}

__global__ __launch_bounds__(kThreads) void clear_uncovered(const ClearParams p, const Totals* totals) {
  ptx::let_next_grid_start();
  const std::int64_t begin = totals->covered_begin, end = totals->covered_end;
  const std::int64_t uncovered = begin + (p.tokens - end);
  if (uncovered == 0) return;
  for (const ClearTensor& target : p.tensors) {
    if (target.tensor.data == nullptr) continue;
    if (size_of(target.tensor.dtype) == 2)
      clear<std::uint16_t>(target, p.head_dim, begin, end, p.tokens);
    else
      clear<std::uint32_t>(target, p.head_dim, begin, end, p.tokens);
  }
  if (p.lse == nullptr) return;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x; i < uncovered * p.tensors[0].heads;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    const std::int64_t head = i / uncovered, n = i % uncovered;
    p.lse[head * p.tokens + (n < begin ? n : end + (n - begin))] = __int_as_float(0x7f800000);
  }
}

}  // namespace

Status launch_clear_uncovered(const ClearParams& params, const Totals* totals, cudaStream_t stream) {
  ClearParams p = params;
  if (p.head_dim <= 0) return Status::invalid("head_dim = " + std::to_string(p.head_dim) + " must be positive");
  for (ClearTensor& target : p.tensors) {
    if (target.tensor.data != nullptr && target.heads <= 0)
      return Status::invalid("heads = " + std::to_string(target.heads) + " of a tensor to clear must be positive");
    fill_dense_strides(target.tensor, target.heads, p.head_dim);
  }
  clear_uncovered<<<kBlocks, kThreads, 0, stream>>>(p, totals);
  return device_status(cudaGetLastError(), "clearing rows outside documents");
}

}  // namespace flamia::schedule::gpu
