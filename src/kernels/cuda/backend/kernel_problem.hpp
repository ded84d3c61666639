// SPDX-License-Identifier: Apache-2.0
// What every kernel of a call is told of the problem, under the same names.
#pragma once
#include <cstdint>

#include "kernels/cuda/backend/memory.hpp"

namespace flamia::cuda {

/// One side of the mask as the kernels take it: -1 where nothing limits it.
inline int kernel_window(std::int64_t reach) { return reach < 0 || reach > INT32_MAX ? -1 : static_cast<int>(reach); }

template <class Params>
void fill_problem(Params& made, const Problem& problem) {
  made.slots = slots_of(problem);
  made.tokens = problem.tokens;
  made.query_heads = problem.query_heads;
  made.key_heads = problem.key_heads;
  made.softmax_scale = problem.scale;
  if constexpr (requires { made.head_dim; }) made.head_dim = problem.head_dim;  // else the configuration has it
  if constexpr (requires { made.window_left; }) {                               // sage3 knows no window
    made.window_left = kernel_window(problem.mask.left);
    made.window_right = problem.mask.causal ? 0 : kernel_window(problem.mask.right);
  }
}

}  // namespace flamia::cuda
