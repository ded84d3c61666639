// SPDX-License-Identifier: Apache-2.0
#include "bench/measure.hpp"

#include <functional>
#include <tuple>

#include "bench/errors.hpp"
#include "bench/timing.hpp"
#include "device/fill.hpp"
#include "device/memory.hpp"
#include "kernels/cuda/backend/backward_call.hpp"
#include "kernels/cuda/backend/forward_call.hpp"

namespace flamia::cli {
namespace {

/// Everything a call reads and writes, filled or poisoned.
struct Call {
  Plan plan;
  CallBuffers buffers;
  DeviceBuffer cu_seqlens, lse, saved, forward_workspace, backward_workspace;
  ForwardTensors forward;
  BackwardTensors backward;

  Status make(const Workload& workload, const Recipe& recipe, const BenchOptions& options);
  Status run_forward() const { return attention_forward(plan, forward, saved.data(), forward_workspace.data()); }
  Status run_backward() const { return attention_backward(plan, backward, saved.data(), backward_workspace.data()); }
  Status run() const {
    Status s = run_forward();
    return s.ok() && plan.options().training ? run_backward() : s;
  }
  double bytes() const {
    double sum = 0;
    for (const DeviceBuffer* buffer : {&buffers.q, &buffers.k, &buffers.v, &buffers.o, &buffers.d_o, &buffers.d_q, &buffers.d_k,
                                       &buffers.d_v, &cu_seqlens, &lse, &saved, &forward_workspace, &backward_workspace})
      sum += static_cast<double>(buffer->bytes());
    return sum;
  }
};

Status Call::make(const Workload& workload, const Recipe& recipe, const BenchOptions& options) {
  if (Status s = make_plan(workload, recipe, options, &plan); !s.ok()) return s;
  const Problem& problem = plan.problem();

  const auto bytes = [&](int heads) { return static_cast<std::size_t>(problem.tokens * heads * options.head_dim) * 2; };
  const std::size_t queries = bytes(options.heads), keys = bytes(options.key_heads), training = options.training ? 1 : 0;
  const std::tuple<DeviceBuffer*, std::size_t, bool> tensors[] = {
      {&buffers.q, queries, true},
      {&buffers.k, keys, true},
      {&buffers.v, keys, true},
      {&buffers.d_o, queries * training, true},
      {&buffers.o, queries, false},
      {&buffers.d_q, queries * training, false},
      {&buffers.d_k, keys * training, false},
      {&buffers.d_v, keys * training, false},
      {&lse, static_cast<std::size_t>(problem.tokens * options.heads) * sizeof(float), false},
      {&saved, plan.saved_bytes(), false},
      {&forward_workspace, plan.workspace_bytes(Pass::forward), false},
      {&backward_workspace, options.training ? plan.workspace_bytes(Pass::backward) : 0, false}};
  std::uint64_t seed = options.seed * 4;
  for (const auto& [buffer, size, random] : tensors) {
    if (Status s = buffer->allocate(size); !s.ok()) return s;
    const cudaError_t error = random     ? fill_normal_bf16(buffer->data(), static_cast<std::int64_t>(size / 2), seed++, nullptr)
                              : size > 0 ? cudaMemset(buffer->data(), 0xff, size)
                                         : cudaSuccess;
    if (Status s = cuda_status(error, "fill"); !s.ok()) return s;
  }
  const std::vector<std::int32_t> offsets = workload.cu_seqlens();
  if (Status s = cu_seqlens.upload(offsets.data(), offsets.size() * sizeof(std::int32_t)); !s.ok()) return s;

  forward.q = {buffers.q.data(), DType::bf16};
  forward.k = {buffers.k.data(), DType::bf16};
  forward.v = {buffers.v.data(), DType::bf16};
  forward.cu_seqlens = cu_seqlens.as<const std::int32_t>();
  forward.o = {buffers.o.data(), DType::bf16};
  forward.lse = lse.as<float>();
  backward.o = {buffers.o.data(), DType::bf16};
  backward.d_o = {buffers.d_o.data(), DType::bf16};
  backward.cu_seqlens = forward.cu_seqlens;
  backward.d_q = {buffers.d_q.data(), DType::bf16};
  backward.d_k = {buffers.d_k.data(), DType::bf16};
  backward.d_v = {buffers.d_v.data(), DType::bf16};
  return {};
}

/// What the dO pass must move: dO and O are read in 2 bytes and written as two copies of the codes; dQ's sums are set to zero where a first one is not
/// stored.
double d_out_bytes(const Workload& workload, const Recipe& recipe, const BenchOptions& options) {
  const bool ds_bf16 = recipe.d_s.first.element == Element::bf16;
  double cleared = 0;  // tokens
  for (const std::int32_t length : workload.lengths)
    if (!options.deterministic && !(ds_bf16 && length <= sm90::kOneBlockTokens)) cleared += length;
  const auto tokens = static_cast<double>(workload.tokens());
  const double query_row = static_cast<double>(options.heads) * options.head_dim;
  return 6 * tokens * query_row + cleared * query_row * (recipe.accumulation.dq_f16 ? 2 : 4);
}

/// One part to time: what it enqueues, the operations and bytes that it stands for, its error.
struct Part {
  const char* name;
  std::function<Status()> enqueue;
  double flops = 0, bytes = 0, error = -1;
};

}  // namespace

Status make_plan(const Workload& workload, const Recipe& recipe, const BenchOptions& options, Plan* plan) {
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
  plan_options.deterministic = options.deterministic;
  return Plan::create(problem, recipe, plan_options, plan);
}

Status measure(const Workload& workload, const Recipe& recipe, const BenchOptions& options, std::vector<PartTime>* parts) {
  Call call;
  if (Status s = call.make(workload, recipe, options); !s.ok()) return s;
  if (Status s = call.run(); !s.ok()) return s;
  if (Status s = cuda_status(cudaDeviceSynchronize(), "first call"); !s.ok()) return s;
  Errors errors;
  if (Status s = measure_errors(workload, call.plan.problem(), call.buffers, &errors); !s.ok()) return s;

  const cuda::ForwardCall forward(call.plan, call.forward, call.saved.data(), call.forward_workspace.data(), nullptr);
  const double flops =
      workload.forward_flops(options.heads, options.head_dim, options.mask.causal, options.mask.left, options.mask.right);
  const double query_elements = static_cast<double>(workload.tokens()) * options.heads * options.head_dim;
  const double key_elements = static_cast<double>(workload.tokens()) * options.key_heads * options.head_dim;
  // written for an element of V: its codes once or both ways; of Q and K the same, or once where dS is BF16
  const bool ds_bf16 = recipe.d_s.first.element == Element::bf16;
  const double v_bytes = options.training ? 2 : 1, qk_bytes = ds_bf16 ? 1 : v_bytes;
  std::vector<Part> wanted{
      {"schedule", [&] { return forward.schedule(); }},
      {"quantise", [&] { return forward.quantise(); }, 0,
       (2. + qk_bytes) * (query_elements + key_elements) + (2. + v_bytes) * key_elements},
      {"forward", [&] { return forward.attend(); }, flops, 0, errors.output},
      {options.training ? "forward_call" : "inference", [&] { return call.run_forward(); }, flops, 0, errors.output}};
  if (options.training) {
    const cuda::BackwardCall backward(call.plan, call.backward, call.saved.data(), call.backward_workspace.data(), nullptr);
    wanted.push_back({"d_out", [backward] { return backward.quantise(); }, 0, d_out_bytes(workload, recipe, options)});
    wanted.push_back({"gradients", [backward] { return backward.differentiate(); }, 2.5 * flops, 0, errors.gradients});
    wanted.push_back({"backward", [&] { return call.run_backward(); }, 2.5 * flops, 0, errors.gradients});
    wanted.push_back({"call", [&] { return call.run(); }, 3.5 * flops, 0, errors.gradients});
  }
  for (const Part& part : wanted) {
    PartTime time{part.name, 0, part.flops, part.bytes, part.error, {}, call.bytes() * 1e-9};
    if (Status s = time_ms(part.enqueue, options.sustained, &time.ms); !s.ok()) return s;
    time.clock_mhz = ask_smi("clocks.sm");
    parts->push_back(time);
  }
  return {};
}

}  // namespace flamia::cli
