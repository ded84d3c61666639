// SPDX-License-Identifier: Apache-2.0
// FP32 attention with the CPU backend's tiles and matrix product, nothing quantised: the yardstick of the CPU benchmarks.
#pragma once
#include <cstdint>
#include <vector>

namespace flamia::bench {

/// One document, causal, as many key heads as query heads; arrays are [heads][tokens][dim].
struct Fp32Problem {
  std::int64_t tokens = 0;
  int heads = 0;
  int dim = 0;
};

struct Fp32Tensors {
  std::vector<float> q, k, v, d_o;                   // in
  std::vector<float> o, lse, d_q, d_k, d_v;          // out; lse [heads][tokens] in log2
  explicit Fp32Tensors(const Fp32Problem& problem);  // N(0, 1)
};

void fp32_forward(const Fp32Problem& problem, Fp32Tensors& tensors, int threads);
void fp32_backward(const Fp32Problem& problem, Fp32Tensors& tensors, int threads);

}  // namespace flamia::bench
