// SPDX-License-Identifier: Apache-2.0
// Times the Hopper forward kernel on the nine workloads. Usage: time [causal|full|both] [tilesum] [peaked] [d64] [burst]
// [sustain MS] [group HEADS] [only WORKLOAD] [headroom BINADES] [tensor|block|sticky|token|nvfp4|nvfp4b] [exp2s]
//
// exp2s: CSV instead, P by exp2 and by the two lines in turn (inference), tilesum.
#include <dlfcn.h>
#include <cstring>
#include <string>
#include <thread>

#include "line.hpp"
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
    auto handle = reinterpret_cast<int (*)(const char*, void**)>(dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2"));
    char bus[32];  // the driver counts all GPUs, CUDA those that it may use
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus, sizeof bus, 0));
    if (init == nullptr || handle == nullptr || init() != 0 || handle(bus, &device) != 0) return;
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

using flamia::sm90::forward::Exponential;

cudaError_t launch_as(const ForwardParams& params, const ForwardConfig& config, Exponential kind) {
  return kind == Exponential::hardware ? flamia::sm90::launch_forward(params, config, nullptr)
                                       : launch_line(params, config.scale_group, kind, nullptr);
}

struct Measured {
  double burst_ms = 0, sustained_ms = 0;  // 0: not wanted
  unsigned mhz = 0, watts = 0;
};

struct Timer {
  cudaEvent_t begin, end;
  Timer() {
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
  }
  ~Timer() {
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
  }
  template <class Launch>
  double run(Launch launch, int launches) const {
    CUDA_CHECK(cudaEventRecord(begin));
    for (int i = 0; i < launches; ++i) CUDA_CHECK(launch());
    CUDA_CHECK(cudaEventRecord(end));
    CUDA_CHECK(cudaEventSynchronize(end));
    float ms;
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    return ms / launches;
  }
};

/// All kinds in turn, launch by launch: the clock falls while a GPU works.
std::vector<Measured> measure(const ForwardParams& params, const ForwardConfig& config, const std::vector<Exponential>& kinds,
                              double sustain_ms) {
  static const Monitor monitor;
  const Timer timer;
  std::vector<Measured> results(kinds.size());
  std::vector<std::vector<double>> times(kinds.size());
  for (int i = 0; i < 11; ++i)
    for (std::size_t k = 0; k < kinds.size(); ++k) {
      const double ms = timer.run([&] { return launch_as(params, config, kinds[k]); }, 1);
      if (i >= 2) times[k].push_back(ms);
    }
  for (std::size_t k = 0; k < kinds.size(); ++k) {
    std::sort(times[k].begin(), times[k].end());
    results[k].burst_ms = times[k][times[k].size() / 2];
    if (sustain_ms <= 0) continue;
    const auto launch = [&] { return launch_as(params, config, kinds[k]); };
    const int launches = std::max(3, static_cast<int>(sustain_ms / results[k].burst_ms));
    for (int i = 0; i < launches / 2; ++i) CUDA_CHECK(launch());
    std::thread watch([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(static_cast<int>(sustain_ms)));
      results[k].mhz = monitor.megahertz();
      results[k].watts = monitor.watts();
    });
    results[k].sustained_ms = timer.run(launch, launches);
    watch.join();
  }
  return results;
}

void measure(const Workload& w, Scales scales, bool causal, const ForwardConfig& base, const Data& data, const char* scale_name,
             int d, double sustain_ms, int heads_per_group, bool exp2s) {
  const Shape shape{w.lengths, 16, 16, d};
  Problem problem(shape, scales, -1, causal ? 0 : -1, flamia::sm90::query_tile(base));
  problem.make_operands(data);
  ForwardConfig config = problem.config();
  config.reference = base.reference;
  ForwardParams params = problem.params();
  if (heads_per_group > 0) params.heads_per_group = heads_per_group;
  const double work = flops(w, 16, d, causal);
  const auto rate = [&](double ms) { return ms > 0 ? work / ms / 1e9 : 0.0; };
  const char* const mask = causal ? "causal" : "full";
  if (!exp2s) {
    const Measured t = measure(params, config, {Exponential::hardware}, sustain_ms)[0];
    std::printf("%-16s %-6s d%-3d %-6s burst %8.3f ms %7.1f TFLOP/s | sustained %7.1f TFLOP/s %4u MHz %3u W\n", w.name, mask, d,
                scale_name, t.burst_ms, rate(t.burst_ms), rate(t.sustained_ms), t.mhz, t.watts);
  } else {
    const char* const names[] = {"exp2", "mitchell", "schraudolph"};
    const auto results =
        measure(params, config, {Exponential::hardware, Exponential::mitchell, Exponential::schraudolph}, sustain_ms);
    for (std::size_t k = 0; k < results.size(); ++k) {
      const Measured& t = results[k];
      std::printf("%s,%s,%d,%s,%s,%.4f,%.1f,%.1f,%u,%u\n", w.name, mask, d, scale_name, names[k], t.burst_ms, rate(t.burst_ms),
                  rate(t.sustained_ms), t.mhz, t.watts);
    }
  }
  std::fflush(stdout);
}

}  // namespace bench

int main(int argc, char** argv) {
  using namespace bench;
  bool causal = true, full = false, exp2s = false;
  ForwardConfig config;
  Data data;
  data.seed = 5;
  data.headroom = 2;  // of mxfp8-exact and nvfp4-exact
  std::string only, kind;
  double sustain = 300;
  int heads_per_group = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i];
    if (a == "full") causal = false, full = true;
    if (a == "both") full = true;
    if (a == "exp2s") exp2s = true, config.reference = flamia::sm90::RowReference::tilesum;
    if (a == "tilesum") config.reference = flamia::sm90::RowReference::tilesum;
    if (a == "peaked") data.query_gain = 6;
    if (a == "burst") sustain = 0;
    if (a == "d64") config.head_dim = 64;
    if (a == "group" && i + 1 < argc) heads_per_group = std::atoi(argv[++i]);
    if (a == "sustain" && i + 1 < argc) sustain = std::atof(argv[++i]);
    if (a == "headroom" && i + 1 < argc) data.headroom = std::atoi(argv[++i]);
    if (a == "only" && i + 1 < argc) only = argv[++i];
    if (a == "tensor" || a == "block" || a == "sticky" || a == "token" || a == "nvfp4" || a == "nvfp4b") kind = a;
  }
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  std::printf("# %s, %s%s\n", properties.name, config.reference == flamia::sm90::RowReference::tilesum ? "tilesum" : "phase32",
              data.query_gain != 1 ? ", logits x 6" : "");
  if (exp2s) std::printf("workload,mask,head_dim,scales,p,burst_ms,burst_tflops,sustained_tflops,mhz,watts\n");
  const struct {
    Scales scales;
    const char* name;
  } kinds[] = {{Scales::tensor, "tensor"}, {Scales::block, "block"}, {Scales::sticky_block, "sticky"},
               {Scales::token, "token"},   {Scales::nvfp4, "nvfp4"}, {Scales::nvfp4_block, "nvfp4b"}};
  for (const Workload& w : workloads()) {
    if (!only.empty() && only != w.name) continue;
    for (const auto& k : kinds) {
      if (!kind.empty() && kind != k.name) continue;
      if (causal) measure(w, k.scales, true, config, data, k.name, config.head_dim, sustain, heads_per_group, exp2s);
      if (full) measure(w, k.scales, false, config, data, k.name, config.head_dim, sustain, heads_per_group, exp2s);
    }
  }
}
