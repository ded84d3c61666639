// SPDX-License-Identifier: Apache-2.0
// Attention's gradients in double precision on the GPU, on the unquantised input: the oracle for sizes that a CPU would need minutes for. It
// shares the definition of the mask with the kernels and nothing else: plain matrix products over strips of rows.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "schedule/mask.hpp"
#include "support/training.hpp"

namespace flamia::test {

/// C[m][n] (+)= factor * sum over k of A(m, k) B(k, n); elements lie `row` and `column` apart.
struct Matrix64 {
  double* data;
  std::int64_t row, column;
};

inline constexpr int kEdge = 64, kDepth = 16, kPer = 4;  // 256 threads, 4 x 4 elements each

inline __global__ __launch_bounds__(256) void multiply64(Matrix64 a, Matrix64 b, Matrix64 c, int m, int n, int k, double factor,
                                                         bool add) {
  __shared__ double as[kDepth][kEdge + 1], bs[kDepth][kEdge + 1];
  const int t = static_cast<int>(threadIdx.x), tx = t % 16, ty = t / 16;
  const int m0 = static_cast<int>(blockIdx.y) * kEdge, n0 = static_cast<int>(blockIdx.x) * kEdge;
  double sum[kPer][kPer] = {};
  for (int k0 = 0; k0 < k; k0 += kDepth) {
    for (int i = t; i < kEdge * kDepth; i += 256) {  // neighbouring threads along whichever side is contiguous
      const int am = a.column == 1 ? i / kDepth : i % kEdge, ak = a.column == 1 ? i % kDepth : i / kEdge;
      as[ak][am] = m0 + am < m && k0 + ak < k ? a.data[(m0 + am) * a.row + (k0 + ak) * a.column] : 0.0;
      const int bn = b.column == 1 ? i % kEdge : i / kDepth, bk = b.column == 1 ? i / kEdge : i % kDepth;
      bs[bk][bn] = n0 + bn < n && k0 + bk < k ? b.data[(k0 + bk) * b.row + (n0 + bn) * b.column] : 0.0;
    }
    __syncthreads();
#pragma unroll
    for (int kk = 0; kk < kDepth; ++kk) {
      double x[kPer], y[kPer];
#pragma unroll
      for (int i = 0; i < kPer; ++i) x[i] = as[kk][ty + 16 * i], y[i] = bs[kk][tx + 16 * i];
#pragma unroll
      for (int i = 0; i < kPer; ++i)
#pragma unroll
        for (int j = 0; j < kPer; ++j) sum[i][j] = fma(x[i], y[j], sum[i][j]);
    }
    __syncthreads();
  }
  for (int i = 0; i < kPer; ++i)
    for (int j = 0; j < kPer; ++j) {
      const int row = m0 + ty + 16 * i, column = n0 + tx + 16 * j;
      if (row >= m || column >= n) continue;
      double& to = c.data[row * c.row + column * c.column];
      to = (add ? to : 0.0) + factor * sum[i][j];
    }
}

template <class Combine>
__device__ double over_block(double value, Combine combine) {
  __shared__ double partial[256];
  partial[threadIdx.x] = value;
  __syncthreads();
  for (int step = 128; step > 0; step /= 2) {
    if (static_cast<int>(threadIdx.x) < step) partial[threadIdx.x] = combine(partial[threadIdx.x], partial[threadIdx.x + step]);
    __syncthreads();
  }
  const double all = partial[0];
  __syncthreads();
  return all;
}

/// Scores to probabilities, dP to dS; a block takes the row of one query. `first`: position of the strip's first query, `from` of its first key.
inline __global__ void rows64(double* p, double* ds, int keys, schedule::MaskReach reach, std::int64_t first, std::int64_t from,
                              std::int64_t length) {
  const std::int64_t i = first + blockIdx.x;
  const schedule::Interval visible = schedule::visible_keys(reach, i, length);
  const int begin = static_cast<int>(max(visible.begin - from, std::int64_t{0})), end = static_cast<int>(visible.end - from);
  double* const row = p + static_cast<std::int64_t>(blockIdx.x) * keys;
  double* const gradient = ds + static_cast<std::int64_t>(blockIdx.x) * keys;
  double greatest = -1e300;
  for (int j = begin + static_cast<int>(threadIdx.x); j < end; j += 256) greatest = fmax(greatest, row[j]);
  greatest = over_block(greatest, [](double x, double y) { return fmax(x, y); });
  double sum = 0;
  for (int j = begin + static_cast<int>(threadIdx.x); j < end; j += 256) sum += exp(row[j] - greatest);
  sum = over_block(sum, [](double x, double y) { return x + y; });
  double d = 0;
  for (int j = static_cast<int>(threadIdx.x); j < keys; j += 256) {
    row[j] = j >= begin && j < end ? exp(row[j] - greatest) / sum : 0.0;
    d += row[j] * gradient[j];
  }
  d = over_block(d, [](double x, double y) { return x + y; });
  for (int j = static_cast<int>(threadIdx.x); j < keys; j += 256) gradient[j] = row[j] * (gradient[j] - d);
}

struct Gradients64 {
  std::vector<double> d_q, d_k, d_v;
};

inline Gradients64 gradients64(const Input& in) {
  const Problem& p = in.problem;
  const int d = p.head_dim, group = p.query_heads / p.key_heads;
  const double scale = p.scale != 0.f ? static_cast<double>(p.scale) : 1.0 / std::sqrt(static_cast<double>(d));
  const schedule::MaskReach reach = schedule::reach_of(p.mask.causal, p.mask.left, p.mask.right);
  constexpr std::int64_t kStrip = 1024;
  const auto upload = [](const std::vector<float>& x) { return std::vector<double>(x.begin(), x.end()); };
  const auto zeros = [](std::size_t n) { return std::vector<double>(n, 0.0); };
  DeviceBuffer<double> q{std::span<const double>(upload(in.q))}, k{std::span<const double>(upload(in.k))},
      v{std::span<const double>(upload(in.v))}, g{std::span<const double>(upload(in.d_o))};
  DeviceBuffer<double> d_q{std::span<const double>(zeros(in.q.size()))}, d_k{std::span<const double>(zeros(in.k.size()))},
      d_v{std::span<const double>(zeros(in.v.size()))};
  std::int64_t longest = 0;
  for (std::size_t b = 1; b < in.cu_seqlens.size(); ++b)
    longest = std::max<std::int64_t>(longest, in.cu_seqlens[b] - in.cu_seqlens[b - 1]);
  DeviceBuffer<double> pairs(kStrip * longest), gradients(kStrip * longest);
  const auto multiply = [](Matrix64 a, Matrix64 b, Matrix64 c, std::int64_t m, std::int64_t n, std::int64_t depth, double factor,
                           bool add) {
    const dim3 grid(static_cast<unsigned>((n + kEdge - 1) / kEdge), static_cast<unsigned>((m + kEdge - 1) / kEdge));
    multiply64<<<grid, 256>>>(a, b, c, static_cast<int>(m), static_cast<int>(n), static_cast<int>(depth), factor, add);
  };
  for (std::size_t b = 1; b < in.cu_seqlens.size(); ++b)
    for (int head = 0; head < p.query_heads; ++head) {
      const std::int64_t start = in.cu_seqlens[b - 1], length = in.cu_seqlens[b] - start;
      for (std::int64_t first = 0; first < length; first += kStrip) {
        const std::int64_t rows = std::min(kStrip, length - first);
        const std::int64_t from = schedule::visible_keys(reach, first, length).begin;
        const std::int64_t keys = schedule::visible_keys(reach, first + rows - 1, length).end - from;
        if (keys <= 0) continue;
        const auto of = [&](const DeviceBuffer<double>& x, std::int64_t token, int h, int heads) {
          return Matrix64{x.get() + ((start + token) * heads + h) * d, std::int64_t{heads} * d, 1};
        };
        const auto turned = [](Matrix64 x) { return Matrix64{x.data, x.column, x.row}; };
        const Matrix64 strip{pairs.get(), keys, 1}, strip_gradient{gradients.get(), keys, 1};
        const Matrix64 query = of(q, first, head, p.query_heads), out = of(g, first, head, p.query_heads);
        const Matrix64 key = of(k, from, head / group, p.key_heads), value = of(v, from, head / group, p.key_heads);
        multiply(query, turned(key), strip, rows, keys, d, scale, false);
        multiply(out, turned(value), strip_gradient, rows, keys, d, 1.0, false);
        rows64<<<static_cast<unsigned>(rows), 256>>>(pairs.get(), gradients.get(), static_cast<int>(keys), reach, first, from,
                                                     length);
        multiply(strip_gradient, key, of(d_q, first, head, p.query_heads), rows, d, keys, scale, false);
        multiply(turned(strip_gradient), query, of(d_k, from, head / group, p.key_heads), keys, d, rows, scale, true);
        multiply(turned(strip), out, of(d_v, from, head / group, p.key_heads), keys, d, rows, 1.0, true);
      }
    }
  cuda_ok(cudaGetLastError());
  cuda_ok(cudaDeviceSynchronize());
  return {d_q.download(), d_k.download(), d_v.download()};
}

}  // namespace flamia::test
