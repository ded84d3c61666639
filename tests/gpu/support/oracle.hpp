// SPDX-License-Identifier: Apache-2.0
// A forward call on the GPU against float64 attention on the GPU (oracle_kernel.hpp): sizes for which the CPU's oracle takes minutes.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "flamia/attention.hpp"
#include "support/device.hpp"
#include "support/oracle_kernel.hpp"

namespace flamia::test {

struct DevicePointers {
  const std::uint16_t *q, *k, *v, *o;  // BF16, dense
  const float* lse;
  const std::int32_t* cu_seqlens;
};

inline std::vector<RowReport> compare_with_oracle(const Problem& problem, const DevicePointers& at) {
  const double scale = problem.scale > 0.f ? double{problem.scale} : 1. / std::sqrt(double{1} * problem.head_dim);
  const OracleCall call{at.q,
                        at.k,
                        at.v,
                        at.o,
                        at.lse,
                        at.cu_seqlens,
                        problem.tokens,
                        problem.documents,
                        problem.query_heads,
                        problem.key_heads,
                        problem.head_dim,
                        scale,
                        problem.mask.causal,
                        problem.mask.left,
                        problem.mask.right};
  DeviceBuffer<RowReport> reports(problem.tokens * problem.query_heads);
  cuda_ok(launch_oracle(call, reports.get()));
  cuda_ok(cudaDeviceSynchronize());
  return reports.download();
}

struct Comparison {
  double cosine = 0;         // mean over heads
  double relative_l2 = 0;    // of everything
  double worst_row = 0;      // relative to the row's norm or a tenth of the rms row norm, whichever is more
  double worst_element = 0;  // among the rows from `first_token` on
  double worst_lse = 0;
  std::int64_t wrong_rows = 0;
};

inline Comparison summarise(const std::vector<RowReport>& rows, int heads, std::int64_t first_token = 0) {
  Comparison c;
  const auto tokens = static_cast<std::int64_t>(rows.size()) / heads;
  double difference = 0, want = 0, count = 0;
  for (const RowReport& row : rows) {
    difference += row.difference, want += row.want, count += row.in_document;
    c.wrong_rows += row.wrong;
    c.worst_lse = std::max(c.worst_lse, std::fabs(row.lse));
  }
  const double floor = 0.1 * std::sqrt(want / std::max(count, 1.));
  for (std::int64_t head = 0; head < heads; ++head) {
    double dot = 0, got2 = 0, want2 = 0;
    for (std::int64_t t = 0; t < tokens; ++t) {
      const RowReport& row = rows[static_cast<std::size_t>(head * tokens + t)];
      dot += row.dot, got2 += row.got, want2 += row.want;
      c.worst_row = std::max(c.worst_row, std::sqrt(row.difference) / std::max({std::sqrt(row.want), floor, 1e-300}));
      if (t >= first_token) c.worst_element = std::max(c.worst_element, row.worst_element);
    }
    c.cosine += dot / std::sqrt(std::max(got2 * want2, 1e-300)) / heads;
  }
  c.relative_l2 = std::sqrt(difference / std::max(want, 1e-300));
  return c;
}

}  // namespace flamia::test
