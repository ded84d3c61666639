// SPDX-License-Identifier: Apache-2.0
// How far a result is from the reference (numerics.md).
#pragma once
#include <cstdint>
#include <span>

namespace flamia::cli {

struct Deviation {
  double cosine = 0;       // 1 where both are zero everywhere
  double relative_l2 = 0;  // ||got - want|| / ||want||
  /// Greatest error of a row, relative to the row's norm or a tenth of the root mean square row norm, whichever is more.
  double worst_row = 0;
};

/// One head of [tokens, heads, dim] tensors; NaN in either gives NaN.
Deviation deviation(std::span<const float> got, std::span<const double> want, std::int64_t tokens, int heads, int dim, int head);

/// What changed between two results over some rows.
struct Change {
  double greatest = 0;        // greatest |difference|; NaN where one of them is NaN and the other is not
  std::int64_t elements = 0;  // elements whose bits differ
  void add(float before, float after);
};

}  // namespace flamia::cli
