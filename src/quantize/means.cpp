// SPDX-License-Identifier: Apache-2.0
#include "quantize/means.hpp"

#include <omp.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "numerics/hadamard.hpp"
#include "quantize/rows.hpp"

namespace flamia::quantize {
namespace {

void load_row(const QuantiseInput& in, std::int64_t token, int head, float* out) {
  const std::int64_t head_stride = in.tensor.head_stride ? in.tensor.head_stride : in.dim;
  const std::int64_t token_stride = in.tensor.token_stride ? in.tensor.token_stride : std::int64_t{in.heads} * in.dim;
  const auto bytes = static_cast<std::int64_t>(flamia::size_of(in.tensor.dtype));
  const char* data = static_cast<const char*>(in.tensor.data) + (token * token_stride + head * head_stride) * bytes;
  row_kernels().load(data, in.tensor.dtype, in.dim, false, 1.f, in.rotate, out);
}

/// Adds up the block's tokens of one head.
void mean_of_block(const QuantiseInput& in, std::int64_t first, std::int64_t rows, int head, float* row, double* sum, float* out) {
  std::fill_n(sum, in.dim, 0.0);
  std::int64_t count = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    load_row(in, first + r, head, row);
    if (!std::all_of(row, row + in.dim, [](float x) { return numerics::is_finite(x); })) continue;
    for (int c = 0; c < in.dim; ++c) sum[c] += static_cast<double>(row[c]);
    ++count;
  }
  for (int c = 0; c < in.dim; ++c) out[c] = count == 0 ? 0.f : static_cast<float>(sum[c] / static_cast<double>(count));
}

}  // namespace

Status means(const QuantiseInput& input, const schedule::Documents& documents, std::int64_t rows, int threads,
             std::span<float> out) {
  if (input.heads <= 0 || input.dim <= 0 || rows <= 0) return Status::invalid("means: heads, dim and rows must be positive");
  if (std::cmp_less(out.size(), documents.blocks(rows) * input.heads * input.dim))
    return Status::invalid("means: out holds " + std::to_string(out.size()) + " numbers but there are more");
#pragma omp parallel num_threads(threads > 0 ? threads : omp_get_max_threads())
  {
    std::vector<float> row(static_cast<std::size_t>(input.dim));
    std::vector<double> sum(static_cast<std::size_t>(input.dim));
    std::int64_t block = 0;
    for (const schedule::DocumentRange& range : documents.ranges())
      for (std::int64_t begin = 0; begin < range.length; begin += rows, ++block) {
        const std::int64_t count = std::min(rows, range.length - begin);
#pragma omp for schedule(static) nowait
        for (int head = 0; head < input.heads; ++head)
          mean_of_block(input, range.start + begin, count, head, row.data(), sum.data(),
                        out.data() + (block * input.heads + head) * input.dim);
      }
  }
  return {};
}

Status less_means(const QuantiseInput& input, const schedule::Documents& documents, std::int64_t rows, int threads,
                  std::vector<float>* out) {
  std::vector<float> mean(static_cast<std::size_t>(documents.blocks(rows) * input.heads * input.dim));
  if (Status status = means(input, documents, rows, threads, mean); !status.ok()) return status;
  out->assign(static_cast<std::size_t>(documents.tokens() * input.heads * input.dim), 0.f);
  std::int64_t before = 0;
  for (const schedule::DocumentRange& range : documents.ranges()) {
    for (std::int64_t position = 0; position < range.length; ++position)
      for (int head = 0; head < input.heads; ++head) {
        float* row = out->data() + ((range.start + position) * input.heads + head) * input.dim;
        const float* less = mean.data() + ((before + position / rows) * input.heads + head) * input.dim;
        load_row(input, range.start + position, head, row);
        for (int c = 0; c < input.dim; ++c) row[c] = numerics::add(row[c], -less[c]);
      }
    before += (range.length + rows - 1) / rows;
  }
  return {};
}

}  // namespace flamia::quantize
