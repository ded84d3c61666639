// SPDX-License-Identifier: Apache-2.0
// How the forward kernel's work should be handed out: sorted or not, claimed or dealt, from one end or both. The nine workloads,
// causal, `mxfp8-exact`, medians of single launches in one run. CSV on stdout; the rule drawn from it: docs/log/schedule.md.
//
//   build: build.sh [folder]      run: schedule [workload]
#include <cstring>
#include <iterator>

#include "../forward/problem.cuh"
#include "../forward/workloads.cuh"
#include "dealing.cuh"

namespace bench {

struct Variant {
  const char* name;
  bool sorted;
  cudaError_t (*launch)(const ForwardParams&, cudaStream_t);
};
const Variant kVariants[] = {
    {"sorted claimed", true, flamia::sm90::forward::launch<Claimed>},
    {"unsorted claimed", false, flamia::sm90::forward::launch<Claimed>},
    {"sorted dealt from one end", true, flamia::sm90::forward::launch<Dealt<OneEnd>>},
    {"sorted dealt to and fro", true, flamia::sm90::forward::launch<Dealt<Snake>>},
    {"sorted dealt from both ends", true, flamia::sm90::forward::launch<Dealt<BothEnds>>},
    {"unsorted dealt", false, flamia::sm90::forward::launch<Dealt<OneEnd>>},
};
constexpr int kRounds = 9;

float once_ms(const Variant& variant, const ForwardParams& params) {
  static cudaEvent_t begin = [] {
    cudaEvent_t e;
    CUDA_CHECK(cudaEventCreate(&e));
    return e;
  }();
  static cudaEvent_t end = [] {
    cudaEvent_t e;
    CUDA_CHECK(cudaEventCreate(&e));
    return e;
  }();
  CUDA_CHECK(cudaEventRecord(begin));
  CUDA_CHECK(variant.launch(params, nullptr));
  CUDA_CHECK(cudaEventRecord(end));
  CUDA_CHECK(cudaEventSynchronize(end));
  float ms;
  CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
  return ms;
}

__global__ void add_digests(const std::uint16_t* bits, std::size_t count, unsigned long long* sum) {
  unsigned long long own = 0;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += std::size_t{gridDim.x} * blockDim.x)
    own += mix(i * 65536 + bits[i]);
  atomicAdd(sum, own);
}

std::uint64_t digest(const Problem& problem) {
  Buffer<unsigned long long> sum(1);
  sum.fill(0);
  add_digests<<<1024, 256>>>(reinterpret_cast<const std::uint16_t*>(problem.output.data), problem.output.count, sum.data);
  return sum.host()[0];
}

void measure(const Workload& w) {
  const int query_tile = Claimed::kQueryTile;
  Problem problem({w.lengths, 16, 16, 128}, Scales::token, -1, 0, query_tile);
  problem.make_operands({});
  std::vector<WorkItem> in_order;
  for (int i = 0; i < static_cast<int>(w.lengths.size()); ++i)
    for (int first = 0; first < w.lengths[i]; first += query_tile) in_order.push_back({i, first});
  Buffer<WorkItem> unsorted(in_order.size());
  unsorted.from(in_order);
  double mean = 0, longest = 0;
  for (const double length : w.lengths) mean += length / w.lengths.size(), longest = std::max(longest, length);

  constexpr std::size_t count = std::size(kVariants);
  std::vector<float> times[count];
  std::uint64_t first_digest = 0;
  for (int round = -1; round < kRounds; ++round) {  // variants take turns, so that none has the cool chip for itself
    for (std::size_t v = 0; v < count; ++v) {
      ForwardParams params = problem.params();
      if (!kVariants[v].sorted) params.items = unsorted.data;
      if (round < 0) problem.poison_outputs();
      const float ms = once_ms(kVariants[v], params);
      if (round >= 0) {
        times[v].push_back(ms);
        continue;
      }
      const std::uint64_t made = digest(problem);
      if (v == 0) first_digest = made;
      if (made != first_digest) {
        std::printf("%s: %s gives other results\n", w.name, kVariants[v].name);
        std::exit(1);
      }
    }
  }
  for (std::size_t v = 0; v < count; ++v) {
    std::nth_element(times[v].begin(), times[v].begin() + kRounds / 2, times[v].end());
    const double ms = times[v][kRounds / 2];
    std::printf("%s,%.1f,%s,%.4f,%.0f\n", w.name, longest / mean, kVariants[v].name, ms, flops(w, 16, 128, true) / ms * 1e-9);
  }
  std::fflush(stdout);
}

}  // namespace bench

int main(int argc, char** argv) {
  std::printf("workload,longest_over_mean,variant,ms,tflops\n");
  for (const bench::Workload& w : bench::workloads())
    if (argc < 2 || std::strcmp(argv[1], w.name) == 0) bench::measure(w);
}
