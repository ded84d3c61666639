// SPDX-License-Identifier: Apache-2.0
// Times the Hopper forward kernel on the nine workloads. Usage: time [causal|full|both] [tilesum] [peaked] [d64] [burst]
// [sustain MS] [group HEADS] [only WORKLOAD] [tensor|block|sticky|token]
#include <dlfcn.h>
#include <cstring>
#include <string>
#include <thread>

#include "problem.cuh"
#include "workloads.cuh"

namespace bench {

/// SM clock in MHz and power in W as the driver reports them; zeros where its library is missing.
struct Monitor {
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  void* device = nullptr;
  int (*clock)(void*, int, unsigned*) = nullptr;
  int (*power)(void*, unsigned*) = nullptr;
  Monitor() {
    if (library == nullptr) return;
    auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
    auto handle = reinterpret_cast<int (*)(unsigned, void**)>(dlsym(library, "nvmlDeviceGetHandleByIndex_v2"));
    if (init == nullptr || handle == nullptr || init() != 0 || handle(0, &device) != 0) return;
    clock = reinterpret_cast<int (*)(void*, int, unsigned*)>(dlsym(library, "nvmlDeviceGetClockInfo"));
    power = reinterpret_cast<int (*)(void*, unsigned*)>(dlsym(library, "nvmlDeviceGetPowerUsage"));
  }
  unsigned megahertz() const {
    unsigned value = 0;
    if (clock != nullptr) clock(device, 1, &value);
    return value;
  }
  unsigned watts() const {
    unsigned value = 0;
    if (power != nullptr) power(device, &value);
    return value / 1000;
  }
};

void measure(const Workload& w, Scales scales, bool causal, const ForwardConfig& base, const Data& data, const char* scale_name,
             int d, double sustain_ms, int heads_per_group) {
  static const Monitor monitor;
  const Shape shape{w.lengths, 16, 16, d};
  Problem problem(shape, scales, -1, causal ? 0 : -1, flamia::sm90::query_tile(base));
  problem.make_operands(data);
  ForwardConfig config = problem.config();
  config.reference = base.reference;
  ForwardParams params = problem.params();
  if (heads_per_group > 0) params.heads_per_group = heads_per_group;
  cudaEvent_t begin, end;
  CUDA_CHECK(cudaEventCreate(&begin));
  CUDA_CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < 11; ++i) {
    CUDA_CHECK(cudaEventRecord(begin));
    CUDA_CHECK(flamia::sm90::launch_forward(params, config, nullptr));
    CUDA_CHECK(cudaEventRecord(end));
    CUDA_CHECK(cudaEventSynchronize(end));
    float ms;
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  const double burst = times[times.size() / 2], work = flops(w, 16, d, causal);
  double sustained = 0;
  unsigned mhz = 0, watts = 0;
  if (sustain_ms > 0) {
    const int launches = std::max(3, static_cast<int>(sustain_ms / burst));
    for (int i = 0; i < launches / 2; ++i) CUDA_CHECK(flamia::sm90::launch_forward(params, config, nullptr));
    CUDA_CHECK(cudaEventRecord(begin));
    for (int i = 0; i < launches; ++i) CUDA_CHECK(flamia::sm90::launch_forward(params, config, nullptr));
    CUDA_CHECK(cudaEventRecord(end));
    std::this_thread::sleep_for(std::chrono::milliseconds(static_cast<int>(sustain_ms)));
    mhz = monitor.megahertz();
    watts = monitor.watts();
    CUDA_CHECK(cudaEventSynchronize(end));
    float ms;
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    sustained = ms / launches;
  }
  std::printf("%-16s %-6s d%-3d %-6s burst %8.3f ms %7.1f TFLOP/s | sustained %7.1f TFLOP/s %4u MHz %3u W\n", w.name,
              causal ? "causal" : "full", d, scale_name, burst, work / burst / 1e9, sustained > 0 ? work / sustained / 1e9 : 0.0,
              mhz, watts);
  std::fflush(stdout);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
}

}  // namespace bench

int main(int argc, char** argv) {
  using namespace bench;
  bool causal = true, full = false;
  ForwardConfig config;
  Data data;
  data.seed = 5;
  std::string only, kind;
  double sustain = 300;
  int heads_per_group = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i];
    if (a == "full") causal = false, full = true;
    if (a == "both") full = true;
    if (a == "tilesum") config.reference = flamia::sm90::RowReference::tilesum;
    if (a == "peaked") data.query_gain = 6;
    if (a == "burst") sustain = 0;
    if (a == "d64") config.head_dim = 64;
    if (a == "group" && i + 1 < argc) heads_per_group = std::atoi(argv[++i]);
    if (a == "sustain" && i + 1 < argc) sustain = std::atof(argv[++i]);
    if (a == "only" && i + 1 < argc) only = argv[++i];
    if (a == "tensor" || a == "block" || a == "sticky" || a == "token") kind = a;
  }
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s, %s%s\n", properties.name, config.reference == flamia::sm90::RowReference::tilesum ? "tilesum" : "phase32",
              data.query_gain != 1 ? ", logits x 6" : "");
  const struct {
    Scales scales;
    const char* name;
  } kinds[] = {{Scales::tensor, "tensor"}, {Scales::block, "block"}, {Scales::sticky_block, "sticky"}, {Scales::token, "token"}};
  for (const Workload& w : workloads()) {
    if (!only.empty() && only != w.name) continue;
    for (const auto& k : kinds) {
      if (!kind.empty() && kind != k.name) continue;
      if (causal) measure(w, k.scales, true, config, data, k.name, config.head_dim, sustain, heads_per_group);
      if (full) measure(w, k.scales, false, config, data, k.name, config.head_dim, sustain, heads_per_group);
    }
  }
}
