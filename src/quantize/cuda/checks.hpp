// SPDX-License-Identifier: Apache-2.0
// What every launch of this folder checks.
#pragma once
#include <cstdint>
#include <limits>
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

/// Rows that are read 16 bytes at a time.
inline Status check_rows(const std::string& what, const TensorView& rows) {
  if (rows.data != nullptr && aligned(rows.data) && rows.token_stride % 8 == 0 && rows.head_stride % 8 == 0) return {};
  return Status::invalid(what + " must be device memory aligned to 16 bytes, its strides " + std::to_string(rows.token_stride) +
                         ", " + std::to_string(rows.head_stride) + " multiples of 8 elements (16 bytes)");
}

/// A thread block for each of `units`.
inline Status check_grid(std::int64_t units) {
  if (units <= std::numeric_limits<std::int32_t>::max()) return {};
  return Status::unsupported(std::to_string(units) + " thread blocks exceed the largest grid, 2^31 - 1; split the heads");
}

}  // namespace flamia::quantize::gpu
