// SPDX-License-Identifier: Apache-2.0
// Q, K and V on the GPU: BF16 or FP16 in, E4M3 codes and power-of-two exponents out, in the layouts of sm90/layout.hpp. One launch an
// operand reads the input once, whatever is asked for: rotation, codes as rows, codes transposed, sticky exponents.
//
// Codes and exponents equal those of the host quantiser (quantize/quantize.hpp) bit for bit. A group that holds NaN or infinity is
// flagged: codes 0, byte 255. Slots without a token hold code 0.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "flamia/status.hpp"
#include "flamia/types.hpp"
#include "kernels/cuda/sm90/layout.hpp"
#include "schedule/cuda/schedule.hpp"

namespace flamia::quantize::gpu {

/// Which elements of a head share an exponent. `tensor`: all heads, tokens and documents (it takes one more pass over the input).
enum class Group { token, block, tensor };

/// The prefix maximum of exponents over a document: not needed; written out (for the scale of dQ); or in use (sticky exponents).
enum class Prefix { none, record, sticky };

/// Offset, in elements, of (head, slot, channel) in the `rows_f16` layout, [head][slot / 8][d / 8][slot % 8][8 FP16]: core matrices as in
/// sm90/layout.hpp, of 8 channels instead of 16.
FLAMIA_LAYOUT_FN std::int64_t rows_f16_offset(std::int64_t slots, int d, std::int64_t head, std::int64_t slot, int channel) {
  return (head * slots + slot / 8 * 8) * d + std::int64_t{channel / 8} * 64 + slot % 8 * 8 + channel % 8;
}

/// Q or K of the scores in NVFP4 (rule amax_or_smaller, tensor scale 1), made in the same launch from the same values. Tokens by themselves:
/// whatever Group and Prefix say concerns the E4M3 codes only.
struct Nvfp4Outputs {
  std::uint16_t* halves = nullptr;    // code * scale in FP16 (exact), `rows_f16` layout; null: no NVFP4 wanted
  std::uint8_t* exponents = nullptr;  // [heads][slots]: 127; 255 of a flagged token
  std::uint8_t* codes = nullptr;      // [heads][slots][head_dim / 2], low nibble = even channel; null: not wanted
  std::uint8_t* scales = nullptr;     // E4M3 [heads][slots][head_dim / 16]; 0x7F of a flagged token. With `codes` only
};

struct QuantiseParams {
  TensorView input;  // [tokens, heads, head_dim], BF16 or FP16; data and strides multiples of 16 bytes
  int heads = 0;
  int head_dim = 0;  // 64 or 128
  bool rotate = false;
  Group group = Group::block;
  Prefix prefix = Prefix::none;  // not with Group::tensor
  int headroom = 0;              // Prefix::sticky: binades added to a document's first exponent, 0 to 4

  std::uint8_t* rows = nullptr;  // `rows` layout; null: not wanted
  std::uint16_t* rows16 =
      nullptr;  // the codes' values in BF16 (as dequantise.hpp makes them), `rows16` layout; beside NVFP4, not with Prefix::sticky; null: not wanted
  std::uint8_t* transposed = nullptr;  // `transposed` layout; null: not wanted
  sm90::TokenOrder order = sm90::TokenOrder::pi;
  std::uint8_t* exponents = nullptr;  // UE8M0 bytes [heads][slots]; slots without a token: 0 or the block's byte
  std::uint8_t* prefix_exponents =
      nullptr;  // [heads][slots]: greatest byte up to this token, flagged ones left out; null: not wanted

  Nvfp4Outputs nvfp4;  // of rotated values only, and not beside `transposed`

  std::int64_t slots = 0;  // sm90::slot_capacity
  const schedule::gpu::TokenBlock* blocks = nullptr;
  std::int64_t block_capacity = 0;
  std::uint32_t* scratch = nullptr;  // scratch_bytes, any contents
};

inline constexpr std::size_t kMostOperands = 3;

/// Device memory that one call needs beside its results; 0 for most. May be shared by calls that follow each other.
std::size_t scratch_bytes(std::span<const QuantiseParams> operands);
inline std::size_t scratch_bytes(const QuantiseParams& params) { return scratch_bytes({&params, 1}); }

/// Up to three operands of one call, which agree in dtype, head_dim, schedule and scratch. Errors name the argument. Enqueues kernels (and the
/// clearing of `scratch`) only: can be captured. All at once costs fewer launches than one after another.
Status launch_quantise(std::span<const QuantiseParams> operands, cudaStream_t stream);
inline Status launch_quantise(const QuantiseParams& params, cudaStream_t stream) { return launch_quantise({&params, 1}, stream); }

}  // namespace flamia::quantize::gpu
