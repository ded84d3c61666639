// SPDX-License-Identifier: Apache-2.0
// One training step's attention on three packed documents, with 8-bit operands, compared with BF16.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "flamia/attention.hpp"

namespace {

constexpr int kTokens = 320, kQueryHeads = 4, kKeyHeads = 2, kDim = 64;
constexpr std::int32_t kOffsets[] = {0, 75, 76, 300};  // documents of 75, 1 and 224 tokens; the last 20 tokens belong to none

struct Tensors {
  std::vector<float> q, k, v, d_o;
};
struct Gradients {
  std::vector<float> o, d_q, d_k, d_v;
};

void check(const flamia::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
std::unique_ptr<void, Free> allocate(std::size_t bytes) {
  return std::unique_ptr<void, Free>(std::aligned_alloc(256, (bytes + 511) / 256 * 256));
}

std::vector<float> random(std::size_t count, unsigned seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(bits);
  return values;
}

Gradients training_step(const Tensors& in, const char* recipe_text) {
  flamia::Recipe recipe;
  check(flamia::Recipe::parse(recipe_text, &recipe));
  flamia::Problem problem;
  problem.tokens = kTokens;
  problem.documents = 3;
  problem.query_heads = kQueryHeads;
  problem.key_heads = kKeyHeads;
  problem.head_dim = kDim;
  flamia::Plan plan;
  check(flamia::Plan::create(problem, recipe, {}, &plan));

  // All memory is ours: `saved` lives from forward to backward (q, k and v need not), the workspace only during a call.
  const auto saved = allocate(plan.saved_bytes());
  const auto workspace =
      allocate(std::max(plan.workspace_bytes(flamia::Pass::forward), plan.workspace_bytes(flamia::Pass::backward)));
  Gradients out{std::vector<float>(in.q.size()), std::vector<float>(in.q.size()), std::vector<float>(in.k.size()),
                std::vector<float>(in.k.size())};
  std::vector<float> lse(std::size_t{kTokens} * kQueryHeads);

  flamia::ForwardTensors forward;
  forward.q = {in.q.data(), flamia::DType::f32};
  forward.k = {in.k.data(), flamia::DType::f32};
  forward.v = {in.v.data(), flamia::DType::f32};
  forward.cu_seqlens = kOffsets;
  forward.o = {out.o.data(), flamia::DType::f32};
  forward.lse = lse.data();
  check(flamia::attention_forward(plan, forward, saved.get(), workspace.get()));

  flamia::BackwardTensors backward;
  backward.o = {out.o.data(), flamia::DType::f32};
  backward.d_o = {in.d_o.data(), flamia::DType::f32};
  backward.cu_seqlens = kOffsets;
  backward.d_q = {out.d_q.data(), flamia::DType::f32};
  backward.d_k = {out.d_k.data(), flamia::DType::f32};
  backward.d_v = {out.d_v.data(), flamia::DType::f32};
  check(flamia::attention_backward(plan, backward, saved.get(), workspace.get()));
  return out;
}

double cosine(const std::vector<float>& a, const std::vector<float>& b) {
  double dot = 0, aa = 0, bb = 0;
  for (std::size_t i = 0; i < a.size(); ++i) dot += double(a[i]) * b[i], aa += double(a[i]) * a[i], bb += double(b[i]) * b[i];
  return dot / std::sqrt(aa * bb);
}

}  // namespace

int main() {
  const std::size_t q_size = std::size_t{kTokens} * kQueryHeads * kDim, k_size = std::size_t{kTokens} * kKeyHeads * kDim;
  const Tensors in{random(q_size, 1), random(k_size, 2), random(k_size, 3), random(q_size, 4)};
  const Gradients exact = training_step(in, "mxfp8-exact"), bf16 = training_step(in, "bf16");

  const double cosines[] = {cosine(exact.o, bf16.o), cosine(exact.d_q, bf16.d_q), cosine(exact.d_k, bf16.d_k),
                            cosine(exact.d_v, bf16.d_v)};
  std::printf("flamia %s: mxfp8-exact against bf16, cosine of O %.5f, dQ %.5f, dK %.5f, dV %.5f\n", flamia::version(), cosines[0],
              cosines[1], cosines[2], cosines[3]);
  bool good = true;
  for (const double c : cosines) good = good && c > 0.99 && c < 0.99999;  // close, but not the same numbers
  for (std::size_t i = std::size_t{300} * kQueryHeads * kDim; i < q_size; ++i)
    good = good && exact.o[i] == 0.f && exact.d_q[i] == 0.f;
  if (!good) std::fprintf(stderr, "not what attention should give\n");
  return good ? 0 : 1;
}
