// SPDX-License-Identifier: Apache-2.0
// A thread block takes eight neighbouring rows of the packed tokens and one head, and walks over the keys that any of them sees, 32 at a
// time, in double precision: scores into shared memory, one online softmax a row, then a channel a thread.
#include <cuda_bf16.h>

#include <cmath>

#include "schedule/mask.hpp"
#include "support/oracle_kernel.hpp"

namespace flamia::test {
namespace {

constexpr int kRows = 8, kKeys = 32, kThreads = 128;

struct Shared {
  double q[kRows][128 + 1], k[kKeys][128 + 1], v[kKeys][128 + 1];
  double p[kRows][kKeys];
  double keep[kRows], sum[kRows], greatest[kRows];
  double reduce[kThreads];
  std::int64_t start[kRows], length[kRows];  // of each row's document
};

__device__ double value(const std::uint16_t* x, std::int64_t at) {
  return static_cast<double>(__uint_as_float(static_cast<std::uint32_t>(x[at]) << 16));
}

__device__ double block_sum(Shared& s, double x) {
  __syncthreads();
  s.reduce[threadIdx.x] = x;
  __syncthreads();
  for (int n = kThreads / 2; n > 0; n /= 2) {
    if (static_cast<int>(threadIdx.x) < n) s.reduce[threadIdx.x] += s.reduce[threadIdx.x + n];
    __syncthreads();
  }
  return s.reduce[0];
}

__device__ double block_maximum(Shared& s, double x) {
  __syncthreads();
  s.reduce[threadIdx.x] = x;
  __syncthreads();
  for (int n = kThreads / 2; n > 0; n /= 2) {
    if (static_cast<int>(threadIdx.x) < n) s.reduce[threadIdx.x] = fmax(s.reduce[threadIdx.x], s.reduce[threadIdx.x + n]);
    __syncthreads();
  }
  return s.reduce[0];
}

__global__ __launch_bounds__(kThreads) void oracle_rows(const OracleCall call, RowReport* reports) {
  extern __shared__ double memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int t = static_cast<int>(threadIdx.x), d = call.dim;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kRows, head = blockIdx.y;
  const std::int64_t key_head = head / (call.query_heads / call.key_heads);
  const schedule::MaskReach reach = schedule::reach_of(call.causal, call.left, call.right);
  if (t < kRows) {
    s.start[t] = 0, s.length[t] = 0;
    for (std::int64_t b = 0; b < call.documents; ++b)
      if (first + t >= call.cu_seqlens[b] && first + t < call.cu_seqlens[b + 1])
        s.start[t] = call.cu_seqlens[b], s.length[t] = call.cu_seqlens[b + 1] - call.cu_seqlens[b];
    s.sum[t] = 0, s.greatest[t] = -INFINITY;
  }
  for (int i = t; i < kRows * d; i += kThreads) {
    const std::int64_t token = first + i / d;
    s.q[i / d][i % d] = token < call.tokens ? value(call.q, (token * call.query_heads + head) * d + i % d) : 0.;
  }
  __syncthreads();
  std::int64_t low = INT64_MAX, high = 0;  // keys, as rows of the packed tokens, that any of the block's rows sees
  for (int r = 0; r < kRows; ++r) {
    if (s.length[r] == 0) continue;
    const schedule::Interval keys = schedule::visible_keys(reach, first + r - s.start[r], s.length[r]);
    low = min(low, s.start[r] + keys.begin), high = max(high, s.start[r] + keys.end);
  }
  double acc[kRows] = {};
  for (std::int64_t tile = low; tile < high; tile += kKeys) {
    for (int i = t; i < kKeys * d; i += kThreads) {
      const std::int64_t token = min(tile + i / d, call.tokens - 1), at = (token * call.key_heads + key_head) * d + i % d;
      s.k[i / d][i % d] = value(call.k, at), s.v[i / d][i % d] = value(call.v, at);
    }
    __syncthreads();
    for (int i = t; i < kRows * kKeys; i += kThreads) {
      const int r = i / kKeys, key = i % kKeys;
      const std::int64_t position = first + r - s.start[r], j = tile + key - s.start[r];
      const schedule::Interval keys = schedule::visible_keys(reach, position, s.length[r]);
      double dot = -INFINITY;
      if (s.length[r] > 0 && j >= 0 && keys.contains(j)) {
        dot = 0;
        for (int c = 0; c < d; ++c) dot = fma(s.q[r][c], s.k[key][c], dot);
        dot *= call.scale;
      }
      s.p[r][key] = dot;
    }
    __syncthreads();
    if (t < kRows) {
      double greatest = s.greatest[t];
      for (int key = 0; key < kKeys; ++key) greatest = fmax(greatest, s.p[t][key]);
      s.keep[t] = greatest == -INFINITY ? 1. : exp(s.greatest[t] - greatest);
      s.greatest[t] = greatest;
    }
    __syncthreads();
    for (int i = t; i < kRows * kKeys; i += kThreads) {
      double& p = s.p[i / kKeys][i % kKeys];
      p = p == -INFINITY ? 0. : exp(p - s.greatest[i / kKeys]);
    }
    __syncthreads();
    if (t < kRows) {
      double sum = s.sum[t] * s.keep[t];
      for (int key = 0; key < kKeys; ++key) sum += s.p[t][key];
      s.sum[t] = sum;
    }
    if (t < d) {
      for (int r = 0; r < kRows; ++r) {
        double a = acc[r] * s.keep[r];
        for (int key = 0; key < kKeys; ++key) a = fma(s.p[r][key], s.v[key][t], a);
        acc[r] = a;
      }
    }
    __syncthreads();
  }
  for (int r = 0; r < kRows; ++r) {
    const std::int64_t token = first + r;
    if (token >= call.tokens) break;
    const bool inside = s.length[r] > 0;
    const double want = t < d && inside && s.sum[r] > 0 ? acc[r] / s.sum[r] : 0.;
    const double got = t < d ? value(call.o, (token * call.query_heads + head) * d + t) : 0.;
    RowReport report;
    report.dot = block_sum(s, got * want);
    report.got = block_sum(s, got * got);
    report.want = block_sum(s, want * want);
    report.difference = block_sum(s, (got - want) * (got - want));
    report.worst_element = block_maximum(s, t < d && inside ? fabs(got - want) / fmax(fabs(want), 1e-300) : 0.);
    const double lse = call.lse[head * call.tokens + token];
    const double want_lse = inside && s.sum[r] > 0 ? s.greatest[r] + log(s.sum[r]) : INFINITY;  // +: sees no key
    report.lse = lse == want_lse ? 0. : lse - want_lse;
    report.in_document = inside;
    const bool seen = inside && s.sum[r] > 0;
    report.wrong = !isfinite(report.got) || (seen ? !isfinite(lse) : report.got != 0. || lse != want_lse);
    if (t == 0) reports[head * call.tokens + token] = report;
  }
}

}  // namespace

cudaError_t launch_oracle(const OracleCall& call, RowReport* reports) {
  if (call.tokens == 0) return cudaSuccess;
  if (const cudaError_t e = cudaFuncSetAttribute(oracle_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
      e != cudaSuccess)
    return e;
  const dim3 grid(static_cast<unsigned>((call.tokens + kRows - 1) / kRows), static_cast<unsigned>(call.query_heads));
  oracle_rows<<<grid, kThreads, sizeof(Shared)>>>(call, reports);
  return cudaGetLastError();
}

}  // namespace flamia::test
