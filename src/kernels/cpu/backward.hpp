// SPDX-License-Identifier: Apache-2.0
// The CPU backend's backward pass: the scores again from the codes that the forward pass saved, gradients as numerics.md §8 says.
#pragma once
#include "kernels/cpu/forward.hpp"

namespace flamia::cpu {

/// `saved` as the forward pass of the same problem, recipe and documents left it. Every element of d_q, d_k, d_v is written.
/// dK and dV are summed over the query heads of a group in ascending order, and over query tiles upwards; dQ over key tiles downwards.
Status backward(const Problem& problem, const Recipe& recipe, const schedule::Documents& documents, const BackwardTensors& tensors,
                const void* saved, void* workspace, int threads, Probe* probe = nullptr);

}  // namespace flamia::cpu
