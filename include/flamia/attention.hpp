// SPDX-License-Identifier: Apache-2.0
// The training call: plan once per shape, then forward and backward. The caller owns all memory and the stream; a call allocates
// nothing, synchronises nothing on a GPU and can be captured in a CUDA graph.
#pragma once
#include <memory>
#include <string>

#include "flamia/recipe.hpp"
#include "flamia/status.hpp"
#include "flamia/types.hpp"

namespace flamia {

enum class Pass { forward, backward };

struct ForwardTensors {
  TensorView q;     // [tokens, query_heads, head_dim]
  TensorView k, v;  // [tokens, key_heads, head_dim]; q, k, v have one dtype
  const std::int32_t* cu_seqlens =
      nullptr;           // [documents + 1], starts at 0, never decreases, ends at <= tokens; on the plan's device
  MutableTensorView o;   // [tokens, query_heads, head_dim], F32 or BF16 (dtype of its own)
  float* lse = nullptr;  // [query_heads, tokens], natural logarithm; +inf for a row that sees no key
};

struct BackwardTensors {
  TensorView o;                              // the forward pass's output
  TensorView d_o;                            // its gradient
  const std::int32_t* cu_seqlens = nullptr;  // as in the forward pass
  MutableTensorView d_q, d_k, d_v;           // shapes of q, k, v; F32 or BF16
};

struct PlanOptions {
  Device device = Device::cpu;
  int threads = 0;             // CPU: 0 = all cores; results do not depend on it
  bool deterministic = false;  // GPU: dQ bit-repeatable
  bool training = true;        // false: the forward pass saves nothing and makes no copies for the backward pass
};

/// What one shape and recipe need: checked arguments, memory sizes, the kernels chosen. Immutable, shared by threads.
class Plan {
 public:
  static Status create(const Problem& problem, const Recipe& recipe, const PlanOptions& options, Plan* plan);

  const Problem& problem() const;
  const Recipe& recipe() const;
  const PlanOptions& options() const;
  std::size_t saved_bytes() const;  // what forward leaves for backward: codes, scales, row statistics (q, k, v may be freed)
  std::size_t workspace_bytes(Pass pass) const;
  /// Human-readable: operands, copies, layouts, tiles, guarantee.
  std::string explain() const;

  struct Impl;
  std::shared_ptr<const Impl> impl;
};

/// `saved` (saved_bytes, may be null if it is 0) and `workspace` are on the plan's device, aligned to 256 bytes; `stream` is a
/// cudaStream_t (ignored on the CPU). On error nothing is written; on the CPU the values of cu_seqlens are checked, on a GPU they are
/// made safe on the device (see docs/documents.md).
Status attention_forward(const Plan& plan, const ForwardTensors& tensors, void* saved, void* workspace, void* stream = nullptr);
Status attention_backward(const Plan& plan, const BackwardTensors& tensors, const void* saved, void* workspace,
                          void* stream = nullptr);

/// "0.1.0"
const char* version();

}  // namespace flamia
