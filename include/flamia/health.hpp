// SPDX-License-Identifier: Apache-2.0
// What quantisation did to the operands of one attention call: figures to log while a model trains.
#pragma once
#include <cstdint>

#include "flamia/attention.hpp"

namespace flamia {

/// One operand, rounded as its first product takes it, over the elements of all documents.
struct OperandHealth {
  std::int64_t elements = 0;   // in scale groups without NaN and infinity
  std::int64_t flagged = 0;    // in groups with NaN or infinity
  std::int64_t zeros = 0;      // of `elements`: not 0, but rounded to 0
  std::int64_t saturated = 0;  // of `elements`: beyond the largest code by more than rounding covers
  int least_exponent = 0;      // of the power-of-two scales, groups of zeros left out; 0 if the operand has no such scales
  int greatest_exponent = 0;
};

/// P and dS: pairs (query, key) that the mask lets through. q = the payload of dQ, k = that of dK.
struct PairHealth {
  std::int64_t pairs = 0;
  std::int64_t p_zero = 0;  // P is not 0 but its code is
  std::int64_t p_saturated = 0;
  std::int64_t ds_pairs = 0;                  // dS is not 0
  std::int64_t ds_zero_q = 0, ds_zero_k = 0;  // of those, payload 0
  std::int64_t ds_saturated_q = 0, ds_saturated_k = 0;
  double ds_mass = 0;                   // sum of |dS|
  double ds_lost_q = 0, ds_lost_k = 0;  // the part of it whose payload is 0 (docs/numerics.md, section 1)
};

struct Health {
  OperandHealth q, k, v;  // q and k as rotated and smoothed
  OperandHealth d_out;    // divided by l; empty without d_out
  PairHealth pairs;       // dS: 0 without d_out
};

/// Attends on the CPU with memory of its own, so hand it a sample (a head, some documents) of a large call. Tensors are on the host;
/// `tensors.o` and `tensors.lse` are not used. d_out null: the forward pass alone, of any recipe. `threads`: 0 = all cores; figures do not depend on it.
Status attention_health(const Problem& problem, const Recipe& recipe, const ForwardTensors& tensors, const TensorView* d_out,
                        int threads, Health* health);

}  // namespace flamia
