// SPDX-License-Identifier: Apache-2.0
#include "measures.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace flamia::cli {

Deviation deviation(std::span<const float> got, std::span<const double> want, std::int64_t tokens, int heads, int dim, int head) {
  double dot = 0, got_square = 0, want_square = 0, error_square = 0;
  std::vector<std::pair<double, double>> rows;  // squares of norm and error
  rows.reserve(static_cast<std::size_t>(tokens));
  for (std::int64_t t = 0; t < tokens; ++t) {
    double norm = 0, error = 0;
    for (int c = 0; c < dim; ++c) {
      const auto at = static_cast<std::size_t>((t * heads + head) * dim + c);
      const double a = got[at], b = want[at];
      dot += a * b, got_square += a * a, norm += b * b, error += (a - b) * (a - b);
    }
    want_square += norm, error_square += error;
    rows.emplace_back(norm, error);
  }
  Deviation result;
  if (std::isnan(dot + error_square)) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    return {nan, nan, nan};
  }
  const bool both_zero = got_square == 0 && want_square == 0;
  result.cosine = both_zero ? 1 : dot / std::max(std::sqrt(got_square) * std::sqrt(want_square), 1e-300);
  result.relative_l2 = both_zero ? 0 : std::sqrt(error_square) / std::max(std::sqrt(want_square), 1e-300);
  const double least = 0.1 * std::sqrt(want_square / static_cast<double>(std::max<std::int64_t>(tokens, 1)));
  for (const auto& [norm, error] : rows)
    if (error > 0) result.worst_row = std::max(result.worst_row, std::sqrt(error) / std::max({std::sqrt(norm), least, 1e-300}));
  return result;
}

void Change::add(float before, float after) {
  if (std::bit_cast<std::uint32_t>(before) == std::bit_cast<std::uint32_t>(after)) return;
  ++elements;
  const double difference = std::abs(static_cast<double>(after) - static_cast<double>(before));
  if (std::isnan(difference) || difference > greatest) greatest = std::isnan(greatest) ? greatest : difference;
}

}  // namespace flamia::cli
