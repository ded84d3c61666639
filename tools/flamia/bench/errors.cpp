// SPDX-License-Identifier: Apache-2.0
#include "bench/errors.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/oracle.hpp"
#include "numerics/format.hpp"
#include "schedule/documents.hpp"

namespace flamia::cli {
namespace {

constexpr std::int64_t kCheckedTokens = 4096;
constexpr std::int64_t kCheckedPairs = 2 * kCheckedTokens * kCheckedTokens;  // over the heads: a few seconds of a CPU

using Rows = std::vector<std::uint16_t>;

/// Tokens [start, start + length) of the first `wanted` of `heads` heads.
struct Part {
  std::int64_t start, length;
  int dim;

  Status fetch(const DeviceBuffer& source, int heads, int wanted, Rows* rows) const {
    rows->resize(static_cast<std::size_t>(length) * static_cast<std::size_t>(wanted * dim));
    const std::size_t row = sizeof(std::uint16_t) * static_cast<std::size_t>(dim);
    return cuda_status(
        cudaMemcpy2D(rows->data(), row * static_cast<std::size_t>(wanted), source.as<std::uint16_t>() + start * heads * dim,
                     row * static_cast<std::size_t>(heads), row * static_cast<std::size_t>(wanted),
                     static_cast<std::size_t>(length), cudaMemcpyDeviceToHost),
        "copy of the checked rows");
  }
};

double relative_l2(const Rows& got, const std::vector<double>& want) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double d = static_cast<double>(numerics::decode_bf16(got[i])) - want[i];
    difference += d * d;
    norm += want[i] * want[i];
  }
  return std::sqrt(difference / std::max(norm, 1e-300));
}

}  // namespace

Status measure_errors(const Workload& workload, const Problem& problem, const CallBuffers& buffers, Errors* errors) {
  *errors = {};
  Part part{0, INT64_MAX, problem.head_dim};
  std::int64_t start = 0;
  for (const std::int32_t length : workload.lengths) {
    if (length > 0 && length < part.length) part.length = length, part.start = start;
    start += length;
  }
  const int group = problem.query_heads / problem.key_heads;
  const int key_heads = group == 1 ? std::min(2, problem.key_heads) : 1, heads = group * key_heads;
  if (part.length > kCheckedTokens || part.length * part.length * heads > kCheckedPairs) return {};
  const bool training = buffers.d_o.bytes() > 0;
  Rows q, k, v, o, d_o, d_q, d_k, d_v;
  if (Status s = part.fetch(buffers.q, problem.query_heads, heads, &q); !s.ok()) return s;
  if (Status s = part.fetch(buffers.k, problem.key_heads, key_heads, &k); !s.ok()) return s;
  if (Status s = part.fetch(buffers.v, problem.key_heads, key_heads, &v); !s.ok()) return s;
  if (Status s = part.fetch(buffers.o, problem.query_heads, heads, &o); !s.ok()) return s;
  if (training) {
    if (Status s = part.fetch(buffers.d_o, problem.query_heads, heads, &d_o); !s.ok()) return s;
    if (Status s = part.fetch(buffers.d_q, problem.query_heads, heads, &d_q); !s.ok()) return s;
    if (Status s = part.fetch(buffers.d_k, problem.key_heads, key_heads, &d_k); !s.ok()) return s;
    if (Status s = part.fetch(buffers.d_v, problem.key_heads, key_heads, &d_v); !s.ok()) return s;
  }
  Problem small = problem;
  small.tokens = part.length;
  small.documents = 1;
  small.query_heads = heads;
  small.key_heads = key_heads;
  ForwardTensors tensors;
  tensors.q = {q.data(), DType::bf16};
  tensors.k = {k.data(), DType::bf16};
  tensors.v = {v.data(), DType::bf16};
  const TensorView gradient{d_o.data(), DType::bf16};
  cpu::OracleResult oracle;
  const schedule::Documents document = schedule::Documents::single(part.length);
  if (Status s = cpu::oracle(small, document, tensors, training ? &gradient : nullptr, 0, &oracle); !s.ok()) return s;
  errors->output = relative_l2(o, oracle.o);
  if (training)
    errors->gradients = std::max({relative_l2(d_q, oracle.d_q), relative_l2(d_k, oracle.d_k), relative_l2(d_v, oracle.d_v)});
  return {};
}

}  // namespace flamia::cli
