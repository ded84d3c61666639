// SPDX-License-Identifier: Apache-2.0
// What lies where in the two buffers that the caller owns. Every part starts at a multiple of 64 bytes.
//
//   saved      codes and scales of every form of Q, K and V that the recipe has (equal forms once, q, k, v themselves not),
//              then m and l, [query_heads, tokens] FP32 each, and the means of Q, [blocks, query_heads, head_dim] FP32, if it is smoothed.
//              BF16 operands are saved as BF16.
//   workspace  the table of work (work.hpp); forward: means for smoothing, [blocks, heads, head_dim] FP32; forward without `saved`: the forms of the scores and of O; backward: the forms of dO,
//              D' [query_heads, tokens] FP32, and for FP16 dQ the exponent bound [key_heads, tokens] and pre-scale [query_heads, tokens]
//              int16 each; then one scratch per thread.
#pragma once
#include <cstddef>
#include <vector>

#include "flamia/attention.hpp"
#include "kernels/cpu/call.hpp"
#include "schedule/documents.hpp"

namespace flamia::cpu {

/// Where one form lies in a buffer. Scales have room for any lengths of the documents.
struct FormPlace {
  Quantisation form;
  bool present = false;
  std::size_t codes = 0, codes_bytes = 0;
  std::size_t scales = 0, scales_bytes = 0;
};

/// The forms that the kernels read; equal ones share their place.
enum FormIndex { kQ, kQSecond, kK, kKSecond, kKDiagonal, kV, kVSecond, kVDiagonal, kVSecondDiagonal, kForms };

struct SavedLayout {
  FormPlace forms[kForms];
  std::size_t m = 0, l = 0;  // unused without training
  std::size_t q_means = 0;   // training with a smoothed Q
  std::size_t bytes = 0;
};

/// Blocks of queries that share a mean, at most.
std::int64_t q_mean_blocks(const Problem& problem, const Recipe& recipe);

/// training: all forms, m and l. Otherwise the forms that the forward pass reads.
SavedLayout saved_layout(const Problem& problem, const Recipe& recipe, bool training);

struct WorkspaceLayout {
  std::size_t table = 0;
  SavedLayout forward_forms;             // forward: used when there is no saved buffer
  std::size_t forms = 0;                 // where they start
  std::size_t q_means = 0, k_means = 0;  // forward, for smoothing (Q's: without a saved buffer)
  FormPlace d_o, d_o_second;             // backward
  std::size_t d = 0, exponent_bound = 0, pre_scale = 0;
  std::size_t scratch = 0, scratch_bytes = 0;  // per thread
  std::size_t bytes = 0;
};

WorkspaceLayout workspace_layout(const Problem& problem, const Recipe& recipe, Pass pass, int threads);

/// The distinct block sizes (tokens, more than 1) of all forms of the recipe and of its means, for the table of work.
struct BlockSizes {
  static constexpr int kMost = 10;  // two forms each of Q, K, V and dO, two means
  int count = 0;
  std::int64_t rows[kMost] = {};
  int index(const Quantisation& form) const;  // -1 for forms without blocks of more than one token
  int index(std::int64_t tokens) const;       // -1 if there is none
  void add(std::int64_t tokens);              // once
};

/// Tokens of a block of which smoothing subtracts the mean: all keys of a document. (Of queries: the recipe's tile.)
inline constexpr std::int64_t kKeyMeanRows = std::int64_t{1} << 40;
BlockSizes block_sizes(const Recipe& recipe);

/// The form at `place` inside `base` as the tile code reads it; not present if `place` is not.
Operand operand_at(const FormPlace& place, const void* base, const BlockSizes& sizes, const schedule::Documents& documents,
                   int heads, int dim);

/// V (or K) with an exponent per token, for tiles that the mask's right edge cuts. Scales along tokens (NVFP4, MXFP4) give way to a power
/// of two, which folds into P.
Quantisation per_token(const Quantisation& form);

}  // namespace flamia::cpu
