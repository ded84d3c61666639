// SPDX-License-Identifier: Apache-2.0
// The checks of the public API. Each message names the argument, what it is, what is allowed and what to do.
#pragma once
#include <cstddef>

#include "flamia/attention.hpp"

namespace flamia::api {

inline constexpr std::size_t kBufferAlignment = 256;  // of `saved` and `workspace`

/// Dimensions, mask, scale and options on their own, and that no size of this problem leaves 64 bits.
Status check_problem(const Problem& problem, const PlanOptions& options);

/// Pointers, dtypes, strides, alignment, and that nothing written overlaps anything else. Reads no tensor element.
Status check_forward(const Plan& plan, const ForwardTensors& tensors, const void* saved, const void* workspace);
Status check_backward(const Plan& plan, const BackwardTensors& tensors, const void* saved, const void* workspace);
/// The same of what is only read: q, k, v, cu_seqlens and, unless it is null, d_out.
Status check_inputs(const Problem& problem, const ForwardTensors& tensors, const TensorView* d_out);

}  // namespace flamia::api
