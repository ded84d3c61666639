// SPDX-License-Identifier: Apache-2.0
#include "call.hpp"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "kernels/cpu/backward.hpp"
#include "kernels/cpu/forward.hpp"

#if defined(FLAMIA_CLI_CUDA)
#include "device/attend.hpp"
#endif

namespace flamia::cli {
namespace {

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<void, Free>;

Buffer allocate(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  Buffer buffer(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  if (!buffer) throw std::bad_alloc();
  return buffer;
}

}  // namespace

Problem with_options(const Problem& problem, const CallOptions& options) {
  Problem made = problem;
  made.mask = options.mask;
  made.scale = options.scale;
  return made;
}

Status attend(const Inputs& inputs, const Recipe& recipe, const CallOptions& options, CallResult* result, cpu::Probe* probe) {
  if (options.backward && !inputs.d_o)
    return Status::invalid("the backward pass needs the tensor \"dout\" [T, H, d], which the input does not have");
  Plan plan;
  const PlanOptions plan_options{options.device, options.threads, options.deterministic, options.backward};
  if (Status s = Plan::create(with_options(inputs.problem, options), recipe, plan_options, &plan); !s.ok()) return s;
#if defined(FLAMIA_CLI_CUDA)
  if (options.device == Device::cuda) {
    if (probe != nullptr) return Status::unsupported("what rounding does to P and dS is counted on the CPU only; use --device cpu");
    return attend_on_device(inputs, plan, options, result);
  }
#endif

  const std::size_t elements = inputs.q.bytes.size() / size_of(inputs.q.dtype);
  const std::size_t key_elements = inputs.k.bytes.size() / size_of(inputs.k.dtype);
  CallResult made;
  made.o.resize(elements * size_of(options.out_dtype));
  made.lse.resize(static_cast<std::size_t>(inputs.problem.tokens * inputs.problem.query_heads));
  const Buffer saved = allocate(plan.saved_bytes());
  Buffer workspace = allocate(plan.workspace_bytes(Pass::forward));
  ForwardTensors forward;
  forward.q = inputs.q.view(), forward.k = inputs.k.view(), forward.v = inputs.v.view();
  forward.cu_seqlens = inputs.cu_seqlens.data();
  forward.o = {made.o.data(), options.out_dtype, 0, 0};
  forward.lse = made.lse.data();
  const auto seconds_since = [](auto start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  auto start = std::chrono::steady_clock::now();
  Status done = probe == nullptr ? attention_forward(plan, forward, saved.get(), workspace.get())
                                 : cpu::forward(plan.problem(), recipe, inputs.documents, forward, saved.get(), workspace.get(),
                                                options.threads, probe);
  if (!done.ok()) return done;
  made.seconds = seconds_since(start);
  if (options.backward) {
    made.d_q.resize(elements);
    made.d_k.resize(key_elements);
    made.d_v.resize(key_elements);
    workspace = allocate(plan.workspace_bytes(Pass::backward));
    BackwardTensors backward;
    backward.o = {made.o.data(), options.out_dtype, 0, 0};
    backward.d_o = inputs.d_o->view();
    backward.cu_seqlens = inputs.cu_seqlens.data();
    backward.d_q = {made.d_q.data(), DType::f32, 0, 0};
    backward.d_k = {made.d_k.data(), DType::f32, 0, 0};
    backward.d_v = {made.d_v.data(), DType::f32, 0, 0};
    start = std::chrono::steady_clock::now();
    done = probe == nullptr ? attention_backward(plan, backward, saved.get(), workspace.get())
                            : cpu::backward(plan.problem(), recipe, inputs.documents, backward, saved.get(), workspace.get(),
                                            options.threads, probe);
    if (!done.ok()) return done;
    made.seconds += seconds_since(start);
  }
  *result = std::move(made);
  return {};
}

std::vector<float> output_f32(const CallResult& result) {
  std::vector<float> values(result.o.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), result.o.data(), result.o.size());
  return values;
}

}  // namespace flamia::cli
