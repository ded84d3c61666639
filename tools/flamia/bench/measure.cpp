// SPDX-License-Identifier: Apache-2.0
#include "bench/measure.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>

#include "device/fill.hpp"
#include "device/memory.hpp"
#include "kernels/cpu/oracle.hpp"
#include "kernels/cuda/backend/forward_call.hpp"
#include "numerics/format.hpp"
#include "schedule/documents.hpp"

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

/// One field of nvidia-smi for the current device; empty where the tool is missing.
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

/// Burst: median of 15 single launches. Sustained: median of 5 series of 20 launches back to back.
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

constexpr std::int64_t kCheckedTokens = 4096;

/// Relative L2 error of O on two heads of the shortest document that is not empty; -1 where even that is longer than 4096 tokens.
Status error_of(const Workload& workload, const BenchOptions& options, const Problem& problem, const DeviceBuffer (&operands)[3],
                const DeviceBuffer& o, double* error) {
  *error = -1;
  std::int64_t start = 0, best_start = 0, best = INT64_MAX;
  for (const std::int32_t length : workload.lengths) {
    if (length > 0 && length < best) best = length, best_start = start;
    start += length;
  }
  if (best > kCheckedTokens) return {};
  const int heads = std::min(2, options.heads), dim = options.head_dim, group = options.heads / options.key_heads;
  const int key_heads = (heads - 1) / group + 1;
  // rows of the checked heads only: [best][heads][dim]
  const auto fetch = [&](const DeviceBuffer& source, int all, int wanted, std::vector<std::uint16_t>* rows) {
    rows->resize(static_cast<std::size_t>(best) * wanted * dim);
    const auto* const from = source.as<std::uint16_t>() + best_start * all * dim;
    return cuda_status(cudaMemcpy2D(rows->data(), sizeof(std::uint16_t) * wanted * dim, from, sizeof(std::uint16_t) * all * dim,
                                    sizeof(std::uint16_t) * wanted * dim, best, cudaMemcpyDeviceToHost),
                       "copy of the checked rows");
  };
  std::vector<std::uint16_t> q, k, v, result;
  if (Status s = fetch(operands[0], options.heads, heads, &q); !s.ok()) return s;
  if (Status s = fetch(operands[1], options.key_heads, key_heads, &k); !s.ok()) return s;
  if (Status s = fetch(operands[2], options.key_heads, key_heads, &v); !s.ok()) return s;
  if (Status s = fetch(o, options.heads, heads, &result); !s.ok()) return s;
  Problem small = problem;
  small.tokens = best;
  small.documents = 1;
  small.query_heads = heads;
  small.key_heads = key_heads;
  small.scale = problem.scale;
  ForwardTensors tensors;
  tensors.q = {q.data(), DType::bf16};
  tensors.k = {k.data(), DType::bf16};
  tensors.v = {v.data(), DType::bf16};
  cpu::OracleResult oracle;
  if (Status s = cpu::oracle(small, schedule::Documents::single(best), tensors, nullptr, 0, &oracle); !s.ok()) return s;
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < oracle.o.size(); ++i) {
    const double d = numerics::decode_bf16(result[i]) - oracle.o[i];
    difference += d * d;
    norm += oracle.o[i] * oracle.o[i];
  }
  *error = std::sqrt(difference / std::max(norm, 1e-300));
  return {};
}

}  // namespace

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

Status measure(const Workload& workload, const Recipe& recipe, const BenchOptions& options, std::vector<PartTime>* parts) {
  Problem problem;
  problem.tokens = workload.tokens();
  problem.documents = static_cast<std::int64_t>(workload.lengths.size());
  problem.query_heads = options.heads;
  problem.key_heads = options.key_heads;
  problem.head_dim = options.head_dim;
  problem.mask = options.mask;
  PlanOptions plan_options;
  plan_options.device = Device::cuda;
  plan_options.training = options.training;
  Plan plan;
  if (Status s = Plan::create(problem, recipe, plan_options, &plan); !s.ok()) return s;

  const std::int64_t query_elements = problem.tokens * options.heads * options.head_dim;
  const std::int64_t key_elements = problem.tokens * options.key_heads * options.head_dim;
  DeviceBuffer operands[3], cu_seqlens, o, lse, saved, workspace;
  for (int i = 0; i < 3; ++i) {
    const std::int64_t elements = i == 0 ? query_elements : key_elements;
    if (Status s = operands[i].allocate(static_cast<std::size_t>(elements) * 2); !s.ok()) return s;
    if (Status s = cuda_status(fill_normal_bf16(operands[i].data(), elements, options.seed * 4 + i, nullptr), "fill"); !s.ok())
      return s;
  }
  const std::vector<std::int32_t> offsets = workload.cu_seqlens();
  if (Status s = cu_seqlens.upload(offsets.data(), offsets.size() * sizeof(std::int32_t)); !s.ok()) return s;
  if (Status s = o.allocate(static_cast<std::size_t>(query_elements) * 2); !s.ok()) return s;
  if (Status s = lse.allocate(static_cast<std::size_t>(problem.tokens) * options.heads * sizeof(float)); !s.ok()) return s;
  if (Status s = saved.allocate(plan.saved_bytes()); !s.ok()) return s;
  if (Status s = workspace.allocate(plan.workspace_bytes(Pass::forward)); !s.ok()) return s;
  cudaMemset(o.data(), 0xff, o.bytes());

  ForwardTensors tensors;
  tensors.q = {operands[0].data(), DType::bf16};
  tensors.k = {operands[1].data(), DType::bf16};
  tensors.v = {operands[2].data(), DType::bf16};
  tensors.cu_seqlens = cu_seqlens.as<const std::int32_t>();
  tensors.o = {o.data(), DType::bf16};
  tensors.lse = lse.as<float>();
  if (Status s = attention_forward(plan, tensors, saved.data(), workspace.data()); !s.ok()) return s;
  if (Status s = cuda_status(cudaDeviceSynchronize(), "first call"); !s.ok()) return s;
  double error = -1;
  if (Status s = error_of(workload, options, plan.problem(), operands, o, &error); !s.ok()) return s;

  const cuda::ForwardCall call(plan, tensors, saved.data(), workspace.data(), nullptr);
  const double flops =
      workload.forward_flops(options.heads, options.head_dim, options.mask.causal, options.mask.left, options.mask.right);
  const double copies = options.training ? 2 : 1;  // codes written an element of Q and K; V has its transposed copy beside
  const double bytes = 2. * (query_elements + 2. * key_elements) + copies * (query_elements + 2. * key_elements);
  const auto timed = [&](const char* part, const std::function<Status()>& enqueue, double part_flops, double part_bytes,
                         double part_error) {
    PartTime time{part, 0, part_flops, part_bytes, part_error, {}};
    Status s = time_ms(enqueue, options.sustained, &time.ms);
    time.clock_mhz = ask_smi("clocks.sm");
    if (s.ok()) parts->push_back(time);
    return s;
  };
  if (Status s = timed(
          "schedule", [&] { return call.schedule(); }, 0, 0, -1);
      !s.ok())
    return s;
  if (Status s = timed(
          "quantise", [&] { return call.quantise(); }, 0, bytes, -1);
      !s.ok())
    return s;
  if (Status s = timed(
          "forward", [&] { return call.attend(); }, flops, 0, error);
      !s.ok())
    return s;
  return timed(
      "call", [&] { return attention_forward(plan, tensors, saved.data(), workspace.data()); }, flops, 0, error);
}

}  // namespace flamia::cli
