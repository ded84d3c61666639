// SPDX-License-Identifier: Apache-2.0
// What `flamia bench` runs on: the packed workloads of bench/workloads.json, or lengths from the command line.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "flamia/status.hpp"

namespace flamia::cli {

struct Workload {
  std::string name;
  std::vector<std::int32_t> lengths;  // tokens of each document

  std::int64_t tokens() const;
  std::vector<std::int32_t> cu_seqlens() const;
  /// 4 L^2 d h a document, half of it when causal; a window counts the pairs that it leaves.
  double forward_flops(int heads, int head_dim, bool causal, std::int64_t left, std::int64_t right) const;
};

/// From a JSON file {"workloads": {name: [lengths]}}; `names` comma-separated, empty = all.
Status load_workloads(const std::string& path, const std::string& names, std::vector<Workload>* workloads);
/// "4096x16" (16 documents of 4096) or "100,200,4096x2"; every length at least 0, the sum below 2^31.
Status parse_lengths(const std::string& text, Workload* workload);

}  // namespace flamia::cli
