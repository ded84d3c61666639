// SPDX-License-Identifier: Apache-2.0
// The host quantiser: every form of Q, K, V and dO, into memory that the caller owns (layout: form.hpp). What each rule computes:
//
//   magnitude   amax of the group over its elements as they are encoded, that is after the division by l and the rotation
//   flagged     a block of rows (all its channels; the tensor or head for those groups) that holds NaN or infinity: codes 0, scale
//   byte
//               255 (UE8M0), 0x7f (E4M3) or NaN (F32), and it counts in no maximum (numerics.md §10). BF16 has no scale and keeps
//               them.
//   sticky      the scale is the maximum over the document's blocks up to this one, flagged ones left out; headroom is added to the exponent
//               of the first one, unless it is flagged or all zero
//   ceil, floor e by numerics/exponent.hpp; code = encode(x * 2^-e), exact up to the final rounding
//   amax, F32   scale = fl(amax / largest), largest = 448, 57344, 6 or 127; code = encode(fl(x / scale)); scale 0 -> codes 0
//   amax, E4M3  byte = E4M3(fl(amax / fl(largest * tensor_scale))), s = fl(value(byte) * tensor_scale); code = encode(fl(x / s)); s
//   = 0 -> codes 0
//   amax_or_smaller  as amax with 6 or 4 for E2M1's largest; q = FP16(fl(x * fl(1 / s))), code = E2M1(q). 4 if the scale by 6 is 0 or
//               s^2 * E smaller with 4, where E = sum of (|q| - |code|)^2 over the group: in FP16 over the even and over the odd channels
//               of each eight, by fma in order, then in FP32
//   two_level   first = FP32(amax / (448 * largest)) of the tile of 128 tokens, at least 2^-100 (1 if amax is 0; tokens with NaN or infinity left out),
//   then as
//               amax with it as the tensor scale
#pragma once
#include <cstdint>
#include <span>

#include "flamia/recipe.hpp"
#include "flamia/status.hpp"
#include "quantize/form.hpp"
#include "quantize/quantize.hpp"
#include "quantize/rows.hpp"
#include "schedule/documents.hpp"

namespace flamia::quantize {

/// Codes and scales of input.tensor, [documents.tokens(), heads, dim]. `codes` holds codes_bytes() or more, `scales` scale_bytes()
/// or more; exactly that much is written. Tokens after the last document have code 0 (and scale 0). Every document by itself,
/// except for `tensor` and `head` groups. The result does not depend on `threads` (0 = all cores) or the machine. Allocates a few
/// rows a thread.
Status quantise_into(const QuantiseInput& input, const schedule::Documents& documents, const Quantisation& form, int threads,
                     std::span<std::uint8_t> codes, std::span<std::uint8_t> scales);

/// The same with given inner loops (for tests).
Status quantise_into(const QuantiseInput& input, const schedule::Documents& documents, const Quantisation& form, int threads,
                     std::span<std::uint8_t> codes, std::span<std::uint8_t> scales, const RowKernels& kernels);

}  // namespace flamia::quantize
