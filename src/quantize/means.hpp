// SPDX-License-Identifier: Apache-2.0
// Means over tokens, which smoothing subtracts before it quantises (SageAttention): of Q per tile, of K per document.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "quantize/quantize.hpp"
#include "schedule/documents.hpp"

namespace flamia::quantize {

/// out[block][head][channel] = FP32(sum over the block's tokens, in order and in double, / their number): of the elements as they are
/// quantised, that is rotated if `input.rotate`. Blocks of `rows` tokens (kWholeDocument: all) count from each document's start; empty
/// documents have none. Tokens with a NaN or infinity are left out; a block of such tokens alone has mean 0. The result does not depend
/// on `threads`. `out` holds documents.blocks(rows) * heads * dim numbers. `input.subtract` and `input.divide_by` are not read.
Status means(const QuantiseInput& input, const schedule::Documents& documents, std::int64_t rows, int threads,
             std::span<float> out);

/// The elements as they are quantised, rotated if `input.rotate`, less the means over blocks of `rows` tokens: [tokens, heads, dim].
Status less_means(const QuantiseInput& input, const schedule::Documents& documents, std::int64_t rows, int threads,
                  std::vector<float>* out);

}  // namespace flamia::quantize
