// SPDX-License-Identifier: Apache-2.0
// What a driver (compiled once) hands to the tile code (compiled per instruction set): plain data only.
#pragma once
#include <cstdint>

#include "flamia/types.hpp"
#include "kernels/cpu/probe.hpp"
#include "kernels/cpu/settings.hpp"

namespace flamia::cpu {

inline constexpr int kTile = schedule::kTile;

/// A document of the packed row and, per block size in use, the blocks of the documents before it.
struct Document {
  std::int64_t start;
  std::int64_t length;
  const std::int64_t* blocks_before;  // [block sizes]
};

/// One quantised form of Q, K, V or dO in memory (layout: quantize/form.hpp).
///
/// To the products a form is *code values* [.., head_dim] in FP32 with a power-of-two exponent per token outside, as the row or column
/// factor of numerics.md §8. Where the scale varies along the channels, or per channel along tokens, it is multiplied into the values
/// (exact for power-of-two scales and for NVFP4) and the exponent is 0. One FP32 scale for a tensor or head and the tensor scale of NVFP4
/// are a factor of their own; FP32 scales of blocks of tokens are a factor per token.
struct Operand {
  const std::uint8_t* codes = nullptr;
  const std::uint8_t* scales = nullptr;
  Element element = Element::bf16;
  ScaleType scale = ScaleType::none;
  Group::Kind group = Group::Kind::none;
  int block_size = -1;    // index into Document::blocks_before; -1: blocks of one token
  std::int64_t rows = 1;  // tokens of a block
  int columns = 0;        // channels of a group; 0 = all
  int column_groups = 1;
  float tensor_scale = 1.f;
  const std::uint8_t* first_levels = nullptr;  // two-level scales: FP32 per tile of 128 tokens and head
  int tile_size = -1;                          // index of those tiles into Document::blocks_before
  int heads = 0;
  int dim = 0;
  bool in_bf16 = false;  // codes times scale, rounded to BF16, are the values

  bool present() const { return codes != nullptr; }
};

/// Means over blocks of tokens, [blocks, heads, head_dim] (quantize/means.hpp).
struct Means {
  const float* values = nullptr;
  int block_size = -1;  // index into Document::blocks_before
  std::int64_t rows = 1;
};

struct ForwardCall {
  const Settings* settings = nullptr;
  Operand q, k, v;
  Operand v_diagonal;  // present if safety.fold_v_diagonal changes anything
  MutableTensorView o;
  float* lse = nullptr;
  float* m = nullptr;  // [query_heads, tokens]; null without training
  float* l = nullptr;
  float* probe_codes = nullptr;  // [query_heads, tokens, tokens] or null
  TensorView q_rows, k_rows;     // the caller's tensors, for smoothing
  Means q_means, k_means;
};

struct BackwardCall {
  const Settings* settings = nullptr;
  Operand q, k, v, d_o;                    // S, dP
  Operand q_second, k_second, d_o_second;  // dK, dQ, dV
  Operand v_diagonal, k_diagonal;          // present if the safety fields change anything
  Operand v_of_o, v_of_o_diagonal;         // the forms of the product O
  Means q_means;                           // as the forward pass took them, if Q is smoothed
  TensorView o;
  MutableTensorView d_q, d_k, d_v;
  const float* m = nullptr;  // [query_heads, tokens], as saved
  const float* l = nullptr;
  float* d = nullptr;                      // [query_heads, tokens]: D' in units of dO's exponent
  std::int16_t* exponent_bound = nullptr;  // [key_heads, tokens]: prefix maxima of V's plus K's exponents (dq_f16)
  std::int16_t* pre_scale = nullptr;       // [query_heads, tokens]: z of numerics.md §6 (dq_f16)
  float ds_scale = 1.f;                    // one scale of dS for the call (Payload::Kind::tensor)
  float* probe_codes = nullptr;
};

/// One tile of 128 tokens of one head (a query head or a key head, as the pass says).
struct Item {
  Document document;
  std::int64_t tile;  // counted from the document's start
  int head;
};

/// What one thread works in; sizes in buffers.hpp.
struct Scratch {
  float* memory;
};

/// The tile code for one instruction set.
struct TileCode {
  const char* name;  // "baseline", "avx2", "avx512"
  void (*forward)(const ForwardCall&, const Item&, Scratch, ProbeCounts*);
  void (*bound_exponents)(const BackwardCall&, const Item&, Scratch);        // key head; a whole document, `tile` is not read
  void (*prepare_rows)(const BackwardCall&, const Item&, Scratch);           // query head: D', pre-scale
  float (*greatest_ds)(const BackwardCall&, const Item&, Scratch);           // query head
  void (*d_q)(const BackwardCall&, const Item&, Scratch, ProbeCounts*);      // query head
  void (*d_k_d_v)(const BackwardCall&, const Item&, Scratch, ProbeCounts*);  // key head; `tile` is a tile of keys
  void (*block_scaled)(const Operand& a, std::int64_t a0, int rows, const Operand& b, std::int64_t b0, int columns, Scratch,
                       float* c, std::int64_t ld);
};

enum class Isa : std::uint8_t { best, baseline, avx2, avx512 };

/// The tile code for an instruction set, null if this machine (or build) lacks it. best: the fastest one.
const TileCode* tile_code(Isa isa);

/// Floats that one thread needs.
std::int64_t scratch_floats(int head_dim);

}  // namespace flamia::cpu
