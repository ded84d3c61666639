// SPDX-License-Identifier: Apache-2.0
// What every launch of this folder checks.
#pragma once
#include <cstdint>

namespace flamia::quantize::gpu {

inline constexpr int kMostHeads = 65535;  // a grid's y

inline bool aligned(const void* pointer, std::uintptr_t bytes = 16) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

}  // namespace flamia::quantize::gpu
