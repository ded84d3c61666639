// SPDX-License-Identifier: Apache-2.0
#include "device/attend.hpp"

#include <chrono>
#include <cstring>
#include <functional>
#include <utility>

#include "device/memory.hpp"
#include "numerics/format.hpp"

namespace flamia::cli {
namespace {

/// BF16 rows in the dtype that the caller asked for.
std::vector<std::uint8_t> in_dtype(const std::vector<std::uint16_t>& rows, DType dtype) {
  std::vector<std::uint8_t> bytes(rows.size() * size_of(dtype));
  if (dtype == DType::bf16) {
    std::memcpy(bytes.data(), rows.data(), bytes.size());
    return bytes;
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const float value = numerics::decode_bf16(rows[i]);
    std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
  }
  return bytes;
}

Status timed(const std::function<Status()>& call, double* seconds) {
  const auto start = std::chrono::steady_clock::now();
  if (Status s = call(); !s.ok()) return s;
  if (Status s = cuda_status(cudaDeviceSynchronize(), "attention call"); !s.ok()) return s;
  *seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return {};
}

}  // namespace

Status attend_on_device(const Inputs& inputs, const Plan& plan, const CallOptions& options, CallResult* result) {
  DeviceBuffer q, k, v, cu_seqlens, o, lse, saved, workspace;
  const std::size_t elements = inputs.q.bytes.size() / size_of(inputs.q.dtype);
  const std::size_t rows = static_cast<std::size_t>(inputs.problem.tokens * inputs.problem.query_heads);
  for (const auto& [buffer, tensor] : {std::pair{&q, &inputs.q}, {&k, &inputs.k}, {&v, &inputs.v}})
    if (Status s = buffer->upload(tensor->bytes.data(), tensor->bytes.size()); !s.ok()) return s;
  if (Status s = cu_seqlens.upload(inputs.cu_seqlens.data(), inputs.cu_seqlens.size() * sizeof(std::int32_t)); !s.ok()) return s;
  if (Status s = o.allocate(elements * sizeof(std::uint16_t)); !s.ok()) return s;
  if (Status s = lse.allocate(rows * sizeof(float)); !s.ok()) return s;
  if (Status s = saved.allocate(plan.saved_bytes()); !s.ok()) return s;
  if (Status s = workspace.allocate(plan.workspace_bytes(Pass::forward)); !s.ok()) return s;

  ForwardTensors forward;
  forward.q = {q.data(), inputs.q.dtype};
  forward.k = {k.data(), inputs.k.dtype};
  forward.v = {v.data(), inputs.v.dtype};
  forward.cu_seqlens = cu_seqlens.as<const std::int32_t>();
  forward.o = {o.data(), DType::bf16};
  forward.lse = lse.as<float>();
  CallResult made;
  if (Status s = timed([&] { return attention_forward(plan, forward, saved.data(), workspace.data()); }, &made.seconds); !s.ok())
    return s;
  std::vector<std::uint16_t> output(elements);
  if (Status s = o.download(output.data(), o.bytes()); !s.ok()) return s;
  made.o = in_dtype(output, options.out_dtype);
  made.lse.resize(rows);
  if (Status s = lse.download(made.lse.data(), lse.bytes()); !s.ok()) return s;
  if (options.backward) {
    DeviceBuffer d_o, gradients[3];
    const std::size_t key_elements = inputs.k.bytes.size() / size_of(inputs.k.dtype);
    if (Status s = d_o.upload(inputs.d_o->bytes.data(), inputs.d_o->bytes.size()); !s.ok()) return s;
    for (int i = 0; i < 3; ++i)
      if (Status s = gradients[i].allocate((i == 0 ? elements : key_elements) * sizeof(float)); !s.ok()) return s;
    if (Status s = workspace.allocate(plan.workspace_bytes(Pass::backward)); !s.ok()) return s;
    BackwardTensors backward;
    backward.o = {o.data(), DType::bf16};
    backward.d_o = {d_o.data(), inputs.d_o->dtype};
    backward.cu_seqlens = forward.cu_seqlens;
    MutableTensorView* const views[] = {&backward.d_q, &backward.d_k, &backward.d_v};
    for (int i = 0; i < 3; ++i) *views[i] = {gradients[i].data(), DType::f32};
    if (Status s = timed([&] { return attention_backward(plan, backward, saved.data(), workspace.data()); }, &made.seconds);
        !s.ok())
      return s;
    std::vector<float>* const hosts[] = {&made.d_q, &made.d_k, &made.d_v};
    for (int i = 0; i < 3; ++i) {
      hosts[i]->resize(i == 0 ? elements : key_elements);
      if (Status s = gradients[i].download(hosts[i]->data(), gradients[i].bytes()); !s.ok()) return s;
    }
  }
  *result = std::move(made);
  return {};
}

}  // namespace flamia::cli
