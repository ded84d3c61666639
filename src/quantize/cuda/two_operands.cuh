// SPDX-License-Identifier: Apache-2.0
// The launches that make values of what was saved of Q and K: a thread makes eight channels of a slot at a time, and one grid serves both operands.
// Params: operands[2] with heads (0: there is no such operand), head_dim, slots, used_slots.
#pragma once
#include <string>

#include "flamia/status.hpp"
#include "quantize/cuda/checks.hpp"

namespace flamia::quantize::gpu {

inline constexpr int kThreads = 256;
inline constexpr int kOctetsPerThread = 4;  // loads in flight

template <int D>
inline constexpr int kSlotsPerThreadBlock = kOctetsPerThread* kThreads / (D / 8);

/// Slots in x, heads of all operands in y.
template <int D, class Params>
dim3 grid_of(const Params& p) {
  return {static_cast<unsigned>((p.slots + kSlotsPerThreadBlock<D> - 1) / kSlotsPerThreadBlock<D>),
          static_cast<unsigned>(p.operands[0].heads + p.operands[1].heads)};
}

/// `complete`: whether an operand's memory is there and aligned; `needs`: the sentence that says so.
template <class Params, class Complete>
Status check_two_operands(const Params& p, Complete complete, const char* needs) {
  if (p.head_dim != 64 && p.head_dim != 128)
    return Status::unsupported("head_dim = " + std::to_string(p.head_dim) + ": the GPU makes values of 64 and 128 channels");
  const int heads = p.operands[0].heads + p.operands[1].heads;
  if (heads <= 0 || heads > kMostHeads)
    return Status::invalid("heads of both operands = " + std::to_string(heads) + " must be 1 to " + std::to_string(kMostHeads));
  for (const auto& operand : p.operands)
    if (operand.heads != 0 && !complete(operand)) return Status::invalid(needs);
  if (p.used_slots == nullptr || p.slots <= 0) return Status::invalid("the schedule is missing: used_slots is null, or no slots");
  return {};
}

}  // namespace flamia::quantize::gpu
