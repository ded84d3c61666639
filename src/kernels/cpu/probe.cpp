// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/probe.hpp"

namespace flamia::cpu {

void ProbeCounts::add(const ProbeCounts& other) {
  pairs += other.pairs;
  p_zero += other.p_zero;
  p_saturated += other.p_saturated;
  p_compared += other.p_compared;
  p_equal += other.p_equal;
  ds_pairs += other.ds_pairs;
  ds_zero_q += other.ds_zero_q;
  ds_zero_k += other.ds_zero_k;
  ds_saturated_q += other.ds_saturated_q;
  ds_saturated_k += other.ds_saturated_k;
  ds_mass += other.ds_mass;
  ds_lost_q += other.ds_lost_q;
  ds_lost_k += other.ds_lost_k;
}

}  // namespace flamia::cpu
