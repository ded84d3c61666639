// SPDX-License-Identifier: Apache-2.0
// Dealing out one buffer.
#pragma once
#include <cstddef>
#include <cstdint>

namespace flamia::cuda {

/// Deals out aligned pieces of one buffer; counts only when the buffer is null.
class Pieces {
 public:
  static constexpr std::size_t kAlignment = 256;
  explicit Pieces(void* base) : base_(static_cast<std::byte*>(base)) {}

  template <class T>
  T* take(std::int64_t count) {
    const std::size_t at = bytes_;
    bytes_ += (static_cast<std::size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::size_t bytes_ = 0;
};

}  // namespace flamia::cuda
