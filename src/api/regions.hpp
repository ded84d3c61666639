// SPDX-License-Identifier: Apache-2.0
// Which bytes an argument covers, and whether two arguments share one. Strided tensors may interleave without sharing anything
// (dq, dk and dv as views of one packed gradient), so extents alone would refuse valid calls.
#pragma once
#include <algorithm>
#include <cstdint>

namespace flamia::api {

/// `outer` runs of `inner` pieces of `piece` bytes. A plain buffer is one piece.
struct Region {
  const char* name = "";
  std::uintptr_t address = 0;
  bool write = false;
  std::int64_t bytes = 0;  // from the first byte to the last
  std::int64_t piece = 0, inner_stride = 0, inner = 1, outer_stride = 0, outer = 1;

  /// From a [tokens, heads, dim] tensor, strides in elements, 0 = dense. False where the extent leaves 2^62 bytes.
  bool shape(std::int64_t tokens, std::int64_t heads, std::int64_t dim, std::int64_t element, std::int64_t token_stride,
             std::int64_t head_stride) {
    if (head_stride == 0) head_stride = dim;
    if (token_stride == 0) token_stride = heads * dim;
    std::int64_t reach = 0, head_reach = 0;
    if (__builtin_mul_overflow(token_stride, tokens, &reach) || __builtin_mul_overflow(head_stride, heads, &head_reach))
      return false;
    if (reach > (std::int64_t{1} << 58) || head_reach > (std::int64_t{1} << 58)) return false;
    piece = dim * element;
    outer_stride = token_stride * element, outer = tokens;
    inner_stride = head_stride * element, inner = heads;
    if (inner_stride > outer_stride) std::swap(inner_stride, outer_stride), std::swap(inner, outer);
    bytes = (outer - 1) * outer_stride + run();
    return true;
  }

  std::int64_t run() const { return (inner - 1) * inner_stride + piece; }  // bytes of one outer step

  bool overlaps_itself() const { return (inner > 1 && inner_stride < piece) || (outer > 1 && outer_stride < run()); }

  bool overlaps(const Region& other) const {
    if (address + static_cast<std::uintptr_t>(bytes) <= other.address ||
        other.address + static_cast<std::uintptr_t>(other.bytes) <= address)
      return false;
    if (outer_stride == 0 || outer_stride != other.outer_stride) return true;
    if (apart(*this, other, outer_stride, run(), other.run())) return false;
    const bool one_grid = inner_stride > 0 && inner_stride == other.inner_stride && outer_stride % inner_stride == 0;
    return !(one_grid && apart(*this, other, inner_stride, piece, other.piece));
  }

 private:
  /// Both repeat every `period` bytes: are [0, a) and the other's [0, b) disjoint on that circle?
  static bool apart(const Region& x, const Region& y, std::int64_t period, std::int64_t a, std::int64_t b) {
    if (a > period || b > period) return false;
    const std::int64_t p = period;
    const auto difference = static_cast<std::int64_t>(y.address - x.address);  // modulo 2^64, then signed
    const std::int64_t offset = (difference % p + p) % p;
    return offset >= a && offset + b <= p;
  }
};

}  // namespace flamia::api
