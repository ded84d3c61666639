// SPDX-License-Identifier: Apache-2.0
// The Hopper backend behind the public API: schedule, quantise, attend. Enqueues kernels on the caller's stream and nothing else.
#include <cuda_runtime_api.h>

#include <string>

#include "api/dispatch.hpp"
#include "api/plan_impl.hpp"
#include "kernels/cuda/backend/backward_call.hpp"
#include "kernels/cuda/backend/forward_call.hpp"
#include "kernels/cuda/device_status.hpp"
#include "recipe/lower.hpp"

namespace flamia::cuda {
namespace {

Status check_device() {
  int device = 0;
  const cudaError_t found = cudaGetDevice(&device);
  if (found == cudaErrorInsufficientDriver || found == cudaErrorNoDevice)
    return Status::unsupported(std::string("device cuda: there is no GPU that this process can use (") + cudaGetErrorString(found) +
                               "); install a driver for CUDA 13 or use the CPU backend");
  if (Status s = device_status(found, "cudaGetDevice"); !s.ok()) return s;
  int major = 0, minor = 0;
  if (Status s = device_status(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "compute capability");
      !s.ok())
    return s;
  if (Status s = device_status(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "compute capability");
      !s.ok())
    return s;
  if (major == 9 && minor == 0) return {};
  return Status::unsupported("device cuda: the GPU has compute capability " + std::to_string(major) + "." + std::to_string(minor) +
                             ", the kernels are for 9.0 (H100, H200); use the CPU backend");
}

Status check(const Problem& problem, const Recipe& recipe, const PlanOptions& options) {
  if (Status s = recipe::can_run(recipe, plan::Architecture::sm_90, problem.head_dim, options.training); !s.ok()) return s;
  if (Status s = recipe::can_mask(recipe, problem.mask); !s.ok()) return s;
  const HopperForm form = hopper_form(recipe, options.training);
  if (Status s = schedule::gpu::check(schedule_shape(problem, form, options.training)); !s.ok()) return s;
  return check_device();
}

std::size_t saved_bytes(const Problem& problem, const Recipe& recipe, const PlanOptions& options) {
  return forward_memory(problem, hopper_form(recipe, options.training), options, nullptr, nullptr).saved_bytes;
}

std::size_t workspace_bytes(const Problem& problem, const Recipe& recipe, const PlanOptions& options, Pass pass) {
  const HopperForm form = hopper_form(recipe, options.training);
  return pass == Pass::forward ? forward_memory(problem, form, options, nullptr, nullptr).workspace_bytes
                               : backward_memory(problem, form, options, nullptr).workspace_bytes;
}

std::string explain(const Problem& problem, const Recipe& recipe, const PlanOptions& options) {
  const HopperForm form = hopper_form(recipe, options.training);
  const ForwardMemory memory = forward_memory(problem, form, options, nullptr, nullptr);
  std::string text = "sm_90, query tile " + std::to_string(forward_tile(problem, form)) + ", key tile " +
                     std::to_string(sm90::kKeyTile) + ", saved " + std::to_string(memory.saved_bytes) + " bytes, workspace " +
                     std::to_string(memory.workspace_bytes) + " bytes";
  if (options.training)
    text += "; backward: workspace " + std::to_string(backward_memory(problem, form, options, nullptr).workspace_bytes) +
            " bytes, dQ summed " + (options.deterministic || form.int8 ? "in registers" : "in memory, in any order");
  return text + "\n";
}

Status forward(const Plan& plan, const ForwardTensors& tensors, void* saved, void* workspace, void* stream) {
  if (plan.problem().tokens == 0) return {};
  const ForwardCall call(plan, tensors, saved, workspace, static_cast<cudaStream_t>(stream));
  if (Status s = call.check(); !s.ok()) return s;
  if (Status s = call.schedule(); !s.ok()) return s;
  if (Status s = call.quantise(); !s.ok()) return s;
  return call.attend();
}

Status backward(const Plan& plan, const BackwardTensors& tensors, const void* saved, void* workspace, void* stream) {
  if (plan.problem().tokens == 0) return {};
  const BackwardCall call(plan, tensors, saved, workspace, static_cast<cudaStream_t>(stream));
  if (Status s = call.check(); !s.ok()) return s;
  if (Status s = call.schedule(); !s.ok()) return s;
  if (Status s = call.quantise(); !s.ok()) return s;
  return call.differentiate();
}

}  // namespace

const api::Backend& backend() {
  static const api::Backend table{"sm_90", check, saved_bytes, workspace_bytes, explain, forward, backward};
  return table;
}

}  // namespace flamia::cuda
