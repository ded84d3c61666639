// SPDX-License-Identifier: Apache-2.0
// A small training call whose every piece a test can bend, with poisoned outputs: what an error writes is seen.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "flamia/attention.hpp"

namespace flamia::test {

inline constexpr float kPoison = -77777.f;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

/// 256-byte aligned, filled with a byte.
class Memory {
 public:
  explicit Memory(std::size_t bytes, int fill = 0xa5) : bytes_(std::max<std::size_t>(bytes, 1)) {
    memory_.reset(static_cast<unsigned char*>(std::aligned_alloc(256, (bytes_ + 511) / 256 * 256)));
    std::memset(memory_.get(), fill, bytes_);
  }
  void* get() const { return memory_.get(); }
  bool all(int fill) const {
    return std::all_of(memory_.get(), memory_.get() + bytes_, [&](unsigned char byte) { return byte == fill; });
  }

 private:
  std::size_t bytes_;
  std::unique_ptr<unsigned char, Free> memory_;
};

inline std::vector<float> random_values(std::size_t count, unsigned seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(bits);
  return values;
}

inline Recipe recipe_named(const char* text) {
  Recipe recipe;
  const Status s = Recipe::parse(text, &recipe);
  EXPECT_TRUE(s.ok()) << s.message();
  return recipe;
}

inline Problem small_problem() {
  Problem problem;
  problem.tokens = 140;
  problem.documents = 3;
  problem.query_heads = 4;
  problem.key_heads = 2;
  problem.head_dim = 32;
  return problem;
}

struct Call {
  explicit Call(const char* recipe = "mxfp8-exact", Problem p = small_problem()) : problem(p) {
    const Status s = Plan::create(problem, recipe_named(recipe), {}, &plan);
    EXPECT_TRUE(s.ok()) << s.message();
    const auto q_size = static_cast<std::size_t>(p.tokens * p.query_heads * p.head_dim);
    const auto k_size = static_cast<std::size_t>(p.tokens * p.key_heads * p.head_dim);
    q = random_values(q_size, 1), k = random_values(k_size, 2), v = random_values(k_size, 3), d_o = random_values(q_size, 4);
    o.assign(q_size, kPoison), d_q = o;
    d_k.assign(k_size, kPoison), d_v = d_k;
    lse.assign(static_cast<std::size_t>(p.tokens * p.query_heads), kPoison);
    saved = std::make_unique<Memory>(plan.saved_bytes());
    workspace = std::make_unique<Memory>(std::max(plan.workspace_bytes(Pass::forward), plan.workspace_bytes(Pass::backward)));
    forward = {{q.data(), DType::f32}, {k.data(), DType::f32}, {v.data(), DType::f32},
               offsets.data(),         {o.data(), DType::f32}, lse.data()};
    backward = {{o.data(), DType::f32},   {d_o.data(), DType::f32}, offsets.data(),
                {d_q.data(), DType::f32}, {d_k.data(), DType::f32}, {d_v.data(), DType::f32}};
  }

  Status run_forward() { return attention_forward(plan, forward, saved->get(), workspace->get()); }
  Status run_backward() { return attention_backward(plan, backward, saved->get(), workspace->get()); }
  bool untouched() const {
    for (const std::vector<float>* out : {&o, &d_q, &d_k, &d_v, &lse})
      if (!std::all_of(out->begin(), out->end(), [](float x) { return x == kPoison; })) return false;
    return saved->all(0xa5) && workspace->all(0xa5);
  }

  Problem problem;
  Plan plan;
  std::vector<std::int32_t> offsets{0, 70, 71, 130};
  std::vector<float> q, k, v, d_o, o, lse, d_q, d_k, d_v;
  std::unique_ptr<Memory> saved, workspace;
  ForwardTensors forward;
  BackwardTensors backward;
};

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace flamia::test
