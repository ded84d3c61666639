// SPDX-License-Identifier: Apache-2.0
// The CPU backend's forward pass, with the numbers of numerics.md §8-§10. Memory belongs to the caller; a call allocates nothing that
// grows with the problem (a probe does).
#pragma once
#include <cstddef>

#include "flamia/attention.hpp"
#include "kernels/cpu/probe.hpp"
#include "schedule/documents.hpp"

namespace flamia::cpu {

/// Whether this backend computes the recipe at this shape; the message says what it does not and what to use instead.
Status check(const Problem& problem, const Recipe& recipe);

/// Bytes that the forward pass leaves for the backward pass (layout: saved.hpp); 0 without training.
std::size_t saved_bytes(const Problem& problem, const Recipe& recipe, bool training);
/// Bytes of scratch memory of one call with `threads` threads (0 = all cores).
std::size_t workspace_bytes(const Problem& problem, const Recipe& recipe, Pass pass, int threads);

/// Quantises q, k, v and attends. `saved` null: nothing is left for a backward pass. Both pointers are aligned to 64 bytes. Every
/// element of o and lse is written. The result depends neither on `threads` nor on the machine's instruction set.
Status forward(const Problem& problem, const Recipe& recipe, const schedule::Documents& documents, const ForwardTensors& tensors,
               void* saved, void* workspace, int threads, Probe* probe = nullptr);

}  // namespace flamia::cpu
