// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>

namespace flamia {

/// Element types of tensors that callers own.
enum class DType : std::uint8_t { f32, f16, bf16 };
constexpr std::size_t size_of(DType type) { return type == DType::f32 ? 4 : 2; }

enum class Device : std::uint8_t { cpu, cuda };

/// A [tokens, heads, head_dim] tensor; channels are contiguous. Strides in elements; 0 = dense ([tokens][heads][head_dim]).
template <class Void>
struct BasicTensor {
  Void* data = nullptr;
  DType dtype = DType::bf16;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};
using TensorView = BasicTensor<const void>;
using MutableTensorView = BasicTensor<void>;

/// Which keys a query at position i of its document sees: those at positions i - left ... i + right of the same document,
/// -1 = unlimited (FlashAttention's counting); `causal` additionally limits them to <= i.
struct Mask {
  bool causal = true;
  std::int64_t left = -1;
  std::int64_t right = -1;
  friend bool operator==(const Mask&, const Mask&) = default;
};

/// What is attended. Documents are packed along the token axis without padding; cu_seqlens is not part of it (it may live on the
/// device and change between calls), only how many documents there are at most.
struct Problem {
  std::int64_t tokens = 0;     // rows of q, k, v (tokens after the last document are allowed)
  std::int64_t documents = 1;  // cu_seqlens has documents + 1 entries
  int query_heads = 0;
  int key_heads = 0;  // divides query_heads
  int head_dim = 0;   // CPU: multiple of 16, at most 256; Hopper: 64 or 128
  Mask mask;
  float scale = 0.f;  // softmax scale; 0 = 1 / sqrt(head_dim)
};

}  // namespace flamia
