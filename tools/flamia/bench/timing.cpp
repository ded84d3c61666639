// SPDX-License-Identifier: Apache-2.0
#include "bench/timing.hpp"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <memory>
#include <vector>

#include "device/memory.hpp"

namespace flamia::cli {
namespace {

class Event {
 public:
  Event() { cudaEventCreate(&event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { cudaEventDestroy(event_); }
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace

std::string ask_smi(const char* field) {
  int device = 0;
  char bus[32] = "";
  cudaGetDevice(&device);
  cudaDeviceGetPCIBusId(bus, sizeof bus, device);
  const std::string command =
      std::string("nvidia-smi -i ") + bus + " --query-gpu=" + field + " --format=csv,noheader,nounits 2>/dev/null";
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  char line[128] = "";
  if (!pipe || std::fgets(line, sizeof line, pipe.get()) == nullptr) return {};
  std::string text(line);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.pop_back();
  return text;
}

Status time_ms(const std::function<Status()>& enqueue, bool sustained, double* ms) {
  Event start, stop;
  for (int i = 0; i < 4; ++i)
    if (Status s = enqueue(); !s.ok()) return s;
  if (Status s = cuda_status(cudaDeviceSynchronize(), "warm-up"); !s.ok()) return s;
  const int series = sustained ? 5 : 15, batch = sustained ? 20 : 1;
  std::vector<double> times;
  for (int i = 0; i < series; ++i) {
    cudaEventRecord(start);
    for (int j = 0; j < batch; ++j)
      if (Status s = enqueue(); !s.ok()) return s;
    cudaEventRecord(stop);
    if (Status s = cuda_status(cudaEventSynchronize(stop), "timed launch"); !s.ok()) return s;
    float elapsed = 0;
    cudaEventElapsedTime(&elapsed, start, stop);
    times.push_back(elapsed / batch);
  }
  std::nth_element(times.begin(), times.begin() + series / 2, times.end());
  *ms = times[series / 2];
  return {};
}

Status machine(Machine* made) {
  int device = 0, runtime = 0;
  cudaDeviceProp properties{};
  if (Status s = cuda_status(cudaGetDevice(&device), "cudaGetDevice"); !s.ok()) return s;
  if (Status s = cuda_status(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties"); !s.ok()) return s;
  cudaRuntimeGetVersion(&runtime);
  const auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
  made->gpu = properties.name;
  made->driver = ask_smi("driver_version");
  made->cuda = version(runtime);
  DeviceBuffer from, to;
  constexpr std::size_t kBytes = std::size_t{2} << 30;
  if (Status s = from.allocate(kBytes); !s.ok()) return s;
  if (Status s = to.allocate(kBytes); !s.ok()) return s;
  double ms = 0;
  const auto copy = [&] { return cuda_status(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice), "copy"); };
  if (Status s = time_ms(copy, false, &ms); !s.ok()) return s;
  made->copy_bytes_per_second = 2. * kBytes / (ms * 1e-3);
  return {};
}

}  // namespace flamia::cli
