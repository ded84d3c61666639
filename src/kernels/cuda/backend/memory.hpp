// SPDX-License-Identifier: Apache-2.0
// How the caller's `saved` and `workspace` are divided. Sizes follow from the problem's bounds alone; lengths are not known here.
#pragma once
#include <cstddef>
#include <cstdint>

#include "flamia/attention.hpp"
#include "kernels/cuda/backend/form.hpp"
#include "schedule/cuda/schedule.hpp"

namespace flamia::cuda {

/// Codes and exponents of one operand; layouts of sm90/layout.hpp. Null: this call does not need it.
struct OperandMemory {
  std::uint8_t* rows = nullptr;
  std::uint8_t* transposed = nullptr;
  std::uint16_t* rows16 = nullptr;           // values in BF16, for dS in BF16
  std::uint8_t* exponents = nullptr;         // [heads][slots]
  std::uint8_t* prefix_exponents = nullptr;  // [heads][slots]
};

/// Everything the forward pass computes with. When training, what the backward pass reads again lies in `saved`, the rest in
/// `workspace`; without training all of it is workspace.
struct ForwardMemory {
  OperandMemory q, k, v;
  float* row_reference = nullptr;  // m, [query_heads][slots]
  float* row_sum = nullptr;        // l
  void* schedule = nullptr;
  std::uint32_t* scratch = nullptr;
  std::size_t saved_bytes = 0;
  std::size_t workspace_bytes = 0;
};

/// With null bases only the sizes are meaningful.
ForwardMemory forward_memory(const Problem& problem, const HopperForm& form, const PlanOptions& options, void* saved,
                             void* workspace);

/// What the backward pass works in, all of it workspace. It plans its schedule anew: `saved` is only read, and the kernels count in it.
struct BackwardMemory {
  OperandMemory d_out;
  float* d_prime = nullptr;             // D', [query_heads][slots]
  std::int16_t* dq_exponent = nullptr;  // z; null where dQ is summed in FP32 or not in memory
  void* dq_partials = nullptr;          // null in deterministic mode: dQ is summed in registers
  void* row_records = nullptr;
  void* key_records = nullptr;
  void* schedule = nullptr;
  std::uint32_t* scratch = nullptr;
  std::size_t workspace_bytes = 0;
};
BackwardMemory backward_memory(const Problem& problem, const HopperForm& form, const PlanOptions& options, void* workspace);

/// What the quantiser does about prefix maxima; `wanted`: the backward pass reads them.
quantize::gpu::Prefix prefix_of(const OperandForm& form, bool wanted);

std::int64_t slots_of(const Problem& problem);
schedule::gpu::Shape forward_shape(const Problem& problem, const HopperForm& form);
schedule::gpu::Shape backward_shape(const Problem& problem);
sm90::ForwardConfig forward_config(const Problem& problem, const HopperForm& form);
/// Gradients in BF16; a call that wants F32 says so.
sm90::BackwardConfig backward_config(const Problem& problem, const HopperForm& form, const PlanOptions& options);

}  // namespace flamia::cuda
