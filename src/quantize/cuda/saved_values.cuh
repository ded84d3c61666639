// SPDX-License-Identifier: Apache-2.0
// What the launches have in common that make values of what was saved of Q and K: a thread makes eight channels of a slot at a time.
#pragma once
#include <string>

#include "flamia/status.hpp"
#include "quantize/cuda/checks.hpp"

namespace flamia::quantize::gpu {

inline constexpr int kThreads = 256;
inline constexpr int kOctetsPerThread = 4;  // loads in flight

template <int D>
inline constexpr int kSlotsPerThreadBlock = kOctetsPerThread* kThreads / (D / 8);

/// Slots in x, heads in y.
template <int D>
dim3 grid_of(std::int64_t slots, int heads) {
  return {static_cast<unsigned>((slots + kSlotsPerThreadBlock<D> - 1) / kSlotsPerThreadBlock<D>), static_cast<unsigned>(heads)};
}

/// Of Params: head_dim, slots, used_slots. `heads`: of all operands.
template <class Params>
Status check_saved(const Params& p, int heads) {
  if (p.head_dim != 64 && p.head_dim != 128)
    return Status::unsupported("head_dim = " + std::to_string(p.head_dim) + ": the GPU makes values of 64 and 128 channels");
  if (heads <= 0 || heads > kMostHeads)
    return Status::invalid("heads = " + std::to_string(heads) + " must be 1 to " + std::to_string(kMostHeads));
  if (p.used_slots == nullptr || p.slots <= 0) return Status::invalid("the schedule is missing: used_slots is null, or no slots");
  return {};
}

}  // namespace flamia::quantize::gpu
