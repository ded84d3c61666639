// SPDX-License-Identifier: Apache-2.0
#include "quantize/cuda/means.hpp"

#include "kernels/cuda/dense_strides.hpp"
#include "kernels/cuda/device_status.hpp"
#include "quantize/cuda/checks.hpp"
#include "quantize/cuda/instance.cuh"
#include "quantize/cuda/tile.cuh"

namespace flamia::quantize::gpu {
namespace {

constexpr int kThreads = 256;

template <class Element>
__device__ __forceinline__ bool all_finite(const uint4& raw) {
  const std::uint32_t greatest =
      Pair<Element>::greater(Pair<Element>::greater(Pair<Element>::greater(Pair<Element>::greater(0, raw.x), raw.y), raw.z), raw.w);
  return fabsf(Pair<Element>::low(greatest)) < numerics::infinity() && fabsf(Pair<Element>::high(greatest)) < numerics::infinity();
}

/// A thread block per document and head. Threads of a row hold eight channels each; rows are dealt out, then added up.
template <int D, class Element>
__global__ __launch_bounds__(kThreads) void means_kernel(const __grid_constant__ MeanParams p) {
  constexpr int kRowThreads = D / 8, kRows = kThreads / kRowThreads, kUnroll = 4;
  __shared__ double sums[kRows][D];
  __shared__ int counts[kRows];
  const unsigned index = blockIdx.x / static_cast<unsigned>(p.heads), head = blockIdx.x % static_cast<unsigned>(p.heads);
  const sm90::Document document = p.documents[index];
  if (document.length <= 0) return;
  const int row = static_cast<int>(threadIdx.x) / kRowThreads, part = static_cast<int>(threadIdx.x) % kRowThreads;
  const unsigned neighbours = ((1u << kRowThreads) - 1u) << threadIdx.x % 32 / kRowThreads * kRowThreads;
  const auto* const first = static_cast<const std::uint16_t*>(p.input.data) + document.token_start * p.input.token_stride +
                            head * p.input.head_stride + 8 * part;
  double sum[8] = {};
  int count = 0;
  for (int begin = 0; begin < document.length; begin += kRows * kUnroll) {
    uint4 raw[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int token = begin + u * kRows + row;
      raw[u] =
          token < document.length ? __ldg(reinterpret_cast<const uint4*>(first + token * p.input.token_stride)) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if ((__ballot_sync(kFullWarp, all_finite<Element>(raw[u])) & neighbours) != neighbours ||
          begin + u * kRows + row >= document.length)
        continue;
      ++count;
      float x[8];
      unpack_octet<Element>(raw[u], x);
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[c] += static_cast<double>(x[c]);
    }
  }
#pragma unroll
  for (int c = 0; c < 8; ++c) sums[row][8 * part + c] = sum[c];
  if (part == 0) counts[row] = count;
  __syncthreads();
  if (threadIdx.x >= D) return;
  double total = 0;
  int tokens = 0;
  for (int r = 0; r < kRows; ++r) total += sums[r][threadIdx.x], tokens += counts[r];
  const std::int64_t at = p.layout == MeanLayout::slots ? mean_offset(p.slots, D, head, document.slot_start)
                                                        : (std::int64_t{index} * p.heads + head) * D;
  p.means[at + threadIdx.x] = tokens == 0 ? 0.f : static_cast<float>(total / static_cast<double>(tokens));
}

}  // namespace

Status launch_means(const MeanParams& params, cudaStream_t stream) {
  if (Status s = check_operand(params.input.dtype, params.heads, params.head_dim); !s.ok()) return s;
  if (Status s = check_rows("the input of the means", params.input); !s.ok()) return s;
  const std::int64_t units = params.document_capacity * params.heads;
  if (Status s = check_grid(units); !s.ok()) return s;
  if (units == 0) return {};
  MeanParams p = params;
  fill_dense_strides(p.input, p.heads, p.head_dim);
  with_instance(p.head_dim, p.input.dtype, [&]<int D, class Element>() {
    means_kernel<D, Element><<<static_cast<unsigned>(units), kThreads, 0, stream>>>(p);
  });
  return device_status(cudaGetLastError(), "means");
}

}  // namespace flamia::quantize::gpu
