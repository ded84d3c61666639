// SPDX-License-Identifier: Apache-2.0
// The calls with a given instruction set, for tests and benchmarks: all give the same bits.
#pragma once
#include "flamia/attention.hpp"
#include "kernels/cpu/call.hpp"
#include "schedule/documents.hpp"

namespace flamia::cpu {

/// The call with a given instruction set; Isa::best is what the public entry takes. Tests compare the others with it.
Status forward_with(Isa isa, const Problem& problem, const Recipe& recipe, const schedule::Documents& documents,
                    const ForwardTensors& tensors, void* saved, void* workspace, int threads, Probe* probe);
Status backward_with(Isa isa, const Problem& problem, const Recipe& recipe, const schedule::Documents& documents,
                     const BackwardTensors& tensors, const void* saved, void* workspace, int threads, Probe* probe);

}  // namespace flamia::cpu
