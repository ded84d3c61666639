// SPDX-License-Identifier: Apache-2.0
// A recipe and a problem, lowered to the plain numbers that the tile code works with.
#pragma once
#include <cstdint>

#include "flamia/attention.hpp"
#include "flamia/recipe.hpp"
#include "numerics/accumulate.hpp"
#include "numerics/exp2.hpp"
#include "numerics/softmax.hpp"
#include "schedule/mask.hpp"

namespace flamia::cpu {

/// How P or dS is rounded for one of its products.
struct Payload {
  static constexpr int kLeastLine = 32;
  enum class Kind : std::uint8_t {
    plain,     // BF16, no scale
    constant,  // P: times 2^B (in the argument of exp2); dS: times 2^8
    tensor,    // dS: one scale for the call, from a pass of its own
    blocks,    // one scale per block of the 128 x 128 tile
  };
  Kind kind = Kind::plain;
  Element element = Element::bf16;
  ScaleType scale = ScaleType::ue8m0;  // of blocks
  bool floor = false;                  // exponent rule of blocks and tensor
  bool amax = false;                   // tensor: scale = amax / 448 in FP32, not a power of two
  bool two_level = false;              // blocks with E4M3 scales: a maximum of a line of the tile along the contraction comes first
  int line = schedule::kTile;          // keys of such a line of a query
  float first_level = 1.f;             // else this constant does
  float first_level_log2 = 0.f;
  int rows = schedule::kTile;     // of a block: queries
  int columns = schedule::kTile;  // of a block: keys
};

/// 4-bit codes of P from the logarithm of P (tile/log_codes.hpp).
enum class LogCodes : std::uint8_t { none, direct, mitchell, schraudolph };

struct Settings {
  // problem
  std::int64_t tokens = 0;
  int query_heads = 0, key_heads = 0, head_dim = 0;
  schedule::MaskReach reach;
  float scale = 0.f;       // c
  float scale_log2 = 0.f;  // FP32(c * log2 e)
  // softmax
  numerics::RowReference reference = numerics::RowReference::phase32;
  int code_exponent = 0;  // B: codes of P carry 2^B
  numerics::Exp2Kind exp2 = numerics::Exp2Kind::hardware;
  LogCodes log_codes = LogCodes::none;
  int polynomial_degree = 3, polynomial_sixteenths = 0;
  bool sum_unrounded = false;      // l adds P before rounding (a control)
  bool gradient_of_codes = false;  // dS uses the codes of P
  bool d_of_scores = false;        // D' is the mean of dP' under the P of dS, not the row sum of dO' and O
  // dO itself and P = exp2(t - lse) in the backward pass, as FlashAttention; else dO / l and P = exp2(t - m). For dO in BF16, and in
  // INT8, which has no range to spare for the spread of 1 / l inside a block.
  bool classical = false;
  // payloads
  Payload p_first, p_second, ds_first, ds_second;
  bool one_ds_payload = false;
  // dS in BF16 beside codes: K for dQ and Q for dK are codes times scale in BF16, as BF16 products take them
  bool widen_k = false, widen_q = false;
  bool widen_v = false;  // dP takes what the codes of V stand for, in BF16
  // accumulation
  numerics::Accumulator accumulator = numerics::Accumulator::fp32;
  numerics::Accumulator d_q_accumulator = numerics::Accumulator::fp32, d_k_accumulator = numerics::Accumulator::fp32;
  int promote_keys = 128, promote_queries = 64;  // 0: never
  // FP32 scales are constant over so many keys (O, dQ) or queries (dV, dK) of a product, which is summed in such pieces
  int o_piece = schedule::kTile, d_v_piece = schedule::kTile, d_q_piece = schedule::kTile, d_k_piece = schedule::kTile;
  bool dq_f16 = false, prescale_sequence = false;
  // on tiles that the right edge of the mask cuts: V (and K for dQ) with an exponent per key
  bool fold_v = false, fold_k = false;
  bool rotate = false;
  bool smooth_q = false, smooth_k = false;
  int q_mean_rows = schedule::kTile;  // queries that share a mean
  bool q_mean_times_codes = false;    // the mean of Q meets what K's codes stand for, as the backward pass has it, not K itself
};

/// Errors say which field this backend does not compute, and what it does.
Status lower(const Problem& problem, const Recipe& recipe, Settings* settings);

/// threads, or all cores for 0.
/// `threads`, or for 0 the cores that the calling thread may use now.
int thread_count(int threads);

}  // namespace flamia::cpu
