// SPDX-License-Identifier: Apache-2.0
// Where a plan finds the code for its device. A backend is a table of functions; the public API checks arguments, then calls through it.
// A GPU backend defines `flamia::cuda::backend()` and its folder sets FLAMIA_HAS_CUDA_BACKEND for the library; nothing else changes.
#pragma once
#include <cstddef>
#include <string>

#include "flamia/attention.hpp"

namespace flamia::api {

/// Everything a backend is given has passed the checks of check.hpp: dimensions, dtypes, strides, alignment, overlap, null pointers.
/// `problem.scale` is never 0 here (the default is filled in).
struct Backend {
  const char* name;  // "cpu", "sm_90": as in `flamia explain --arch`

  /// What this backend cannot do with the shape or the recipe, all reasons in one message (invalid_argument or unsupported).
  Status (*check)(const Problem& problem, const Recipe& recipe, const PlanOptions& options);

  std::size_t (*saved_bytes)(const Problem& problem, const Recipe& recipe, const PlanOptions& options);
  std::size_t (*workspace_bytes)(const Problem& problem, const Recipe& recipe, const PlanOptions& options, Pass pass);
  std::string (*explain)(const Problem& problem, const Recipe& recipe, const PlanOptions& options);

  /// On the CPU cu_seqlens is checked here, before anything is written.
  Status (*forward)(const Plan& plan, const ForwardTensors& tensors, void* saved, void* workspace, void* stream);
  Status (*backward)(const Plan& plan, const BackwardTensors& tensors, const void* saved, void* workspace, void* stream);
};

const Backend& cpu_backend();

/// Null where this build has no such backend.
const Backend* find_backend(Device device);

}  // namespace flamia::api

#if defined(FLAMIA_HAS_CUDA_BACKEND)
namespace flamia::cuda {
const api::Backend& backend();  // src/kernels/cuda
}
#endif
