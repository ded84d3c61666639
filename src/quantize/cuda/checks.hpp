// SPDX-License-Identifier: Apache-2.0
// What every launch of this folder checks.
#pragma once
#include <cstdint>
#include <string>

#include "flamia/attention.hpp"

namespace flamia::quantize::gpu {

inline constexpr int kMostHeads = 65535;  // a grid's y

inline bool aligned(const void* pointer, std::uintptr_t bytes = 16) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

inline Status check_head_dim(int head_dim) {
  if (head_dim == 64 || head_dim == 128) return {};
  return Status::unsupported("head_dim = " + std::to_string(head_dim) + ": the GPU quantiser does 64 and 128; use the CPU");
}

/// One operand of the quantisers: head dim, heads, type.
inline Status check_operand(DType dtype, int heads, int head_dim) {
  if (Status s = check_head_dim(head_dim); !s.ok()) return s;
  if (heads <= 0) return Status::invalid("heads = " + std::to_string(heads) + " must be positive");
  if (dtype == DType::f32)
    return Status::unsupported("dtype f32: the GPU quantiser reads bf16 and f16; convert first, or use the CPU");
  return {};
}

}  // namespace flamia::quantize::gpu
