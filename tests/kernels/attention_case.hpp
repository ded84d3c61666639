// SPDX-License-Identifier: Apache-2.0
// Inputs, calls and measures of the kernel tests.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/backward.hpp"
#include "kernels/cpu/forward.hpp"
#include "kernels/cpu/oracle.hpp"
#include "kernels/cpu/with_isa.hpp"
#include "numerics/format.hpp"

namespace flamia::test {

/// A seed that is new in every run; printed, so that a failure can be repeated (FLAMIA_TEST_SEED of the test binary's environment).
inline std::uint32_t fresh_seed() {
  static const std::uint32_t seed = [] {
    const char* given = std::getenv("FLAMIA_TEST_SEED");
    const std::uint32_t value = given ? static_cast<std::uint32_t>(std::strtoul(given, nullptr, 10)) : std::random_device{}();
    std::cout << "[ seed     ] FLAMIA_TEST_SEED=" << value << std::endl;
    return value;
  }();
  return seed;
}

/// q, k, v and dO as FP32 values that BF16 can hold, and the lengths.
struct Input {
  Problem problem;
  std::vector<std::int32_t> cu_seqlens;
  std::vector<float> q, k, v, d_o;  // [tokens, heads, dim]

  schedule::Documents documents() const {
    schedule::Documents made;
    const Status status = schedule::Documents::create(cu_seqlens, problem.tokens, &made);
    EXPECT_TRUE(status.ok()) << status.message();
    return made;
  }
  float* q_row(std::int64_t token, int head) { return row(q, token, head, problem.query_heads); }
  float* k_row(std::int64_t token, int head) { return row(k, token, head, problem.key_heads); }
  float* v_row(std::int64_t token, int head) { return row(v, token, head, problem.key_heads); }
  float* d_o_row(std::int64_t token, int head) { return row(d_o, token, head, problem.query_heads); }
  float* row(std::vector<float>& x, std::int64_t token, int head, int heads) const {
    return x.data() + (token * heads + head) * problem.head_dim;
  }
};

inline TensorView view(const std::vector<float>& x) { return {x.data(), DType::f32, 0, 0}; }
inline MutableTensorView writable(std::vector<float>& x) { return {x.data(), DType::f32, 0, 0}; }

struct Shape {
  std::vector<std::int64_t> lengths;
  int query_heads = 1, key_heads = 1, head_dim = 128;
  Mask mask = {};
  std::int64_t tail = 0;  // tokens after the last document
};

/// N(0, 1) rounded to BF16.
inline Input normal_input(const Shape& shape, std::uint32_t seed) {
  Input in;
  in.cu_seqlens = {0};
  for (const std::int64_t length : shape.lengths) in.cu_seqlens.push_back(static_cast<std::int32_t>(in.cu_seqlens.back() + length));
  in.problem.tokens = in.cu_seqlens.back() + shape.tail;
  in.problem.documents = static_cast<std::int64_t>(shape.lengths.size());
  in.problem.query_heads = shape.query_heads;
  in.problem.key_heads = shape.key_heads;
  in.problem.head_dim = shape.head_dim;
  in.problem.mask = shape.mask;
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<float>& x, int heads) {
    x.resize(static_cast<std::size_t>(in.problem.tokens * heads * shape.head_dim));
    for (float& value : x) value = numerics::round_bf16(normal(generator));
  };
  fill(in.q, shape.query_heads);
  fill(in.k, shape.key_heads);
  fill(in.v, shape.key_heads);
  fill(in.d_o, shape.query_heads);
  return in;
}

inline Recipe recipe(const std::string& text) {
  Recipe made;
  const Status status = Recipe::parse(text, &made);
  EXPECT_TRUE(status.ok()) << text << ": " << status.message();
  return made;
}

struct Result {
  std::vector<float> o, lse, d_q, d_k, d_v;
  std::vector<std::byte> saved;
};

struct AlignedBytes {
  explicit AlignedBytes(std::size_t bytes)
      : memory(static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64)), std::free), size(bytes) {
    std::memset(memory.get(), 0xff, (bytes + 127) / 64 * 64);  // NaN: whatever is read before it is written shows
  }
  std::unique_ptr<std::byte, decltype(&std::free)> memory;
  std::size_t size;
};

struct RunOptions {
  int threads = 1;  // small problems: waiting threads cost more than they bring on a busy machine
  cpu::Isa isa = cpu::Isa::best;
  cpu::Probe* probe = nullptr;
  bool backward = true;
};

/// Forward and, if the recipe trains, backward with poisoned memory everywhere; gradients and O in FP32.
inline Result run(const Input& in, const Recipe& recipe, const RunOptions& options = {}) {
  const Problem& p = in.problem;
  const bool backward = options.backward && recipe.trains;
  const schedule::Documents documents = in.documents();
  Result r;
  r.o.assign(in.q.size(), NAN);
  r.lse.assign(static_cast<std::size_t>(p.query_heads * p.tokens), NAN);
  AlignedBytes saved(cpu::saved_bytes(p, recipe, true)), forward(cpu::workspace_bytes(p, recipe, Pass::forward, options.threads));
  ForwardTensors tensors{view(in.q), view(in.k), view(in.v), in.cu_seqlens.data(), writable(r.o), r.lse.data()};
  const Status forward_status =
      cpu::forward_with(options.isa, p, recipe, documents, tensors, backward ? saved.memory.get() : nullptr, forward.memory.get(),
                        options.threads, options.probe);
  EXPECT_TRUE(forward_status.ok()) << forward_status.message();
  if (!backward) return r;
  r.d_q.assign(in.q.size(), NAN);
  r.d_k.assign(in.k.size(), NAN);
  r.d_v.assign(in.v.size(), NAN);
  AlignedBytes memory(cpu::workspace_bytes(p, recipe, Pass::backward, options.threads));
  BackwardTensors gradients{view(r.o), view(in.d_o), in.cu_seqlens.data(), writable(r.d_q), writable(r.d_k), writable(r.d_v)};
  const Status status = cpu::backward_with(options.isa, p, recipe, documents, gradients, saved.memory.get(), memory.memory.get(),
                                           options.threads, options.probe);
  EXPECT_TRUE(status.ok()) << status.message();
  return r;
}

inline cpu::OracleResult truth(const Input& in, bool backward = true) {
  cpu::OracleResult result;
  ForwardTensors tensors{view(in.q), view(in.k), view(in.v), in.cu_seqlens.data(), {}, nullptr};
  const TensorView d_o = view(in.d_o);
  const Status status = cpu::oracle(in.problem, in.documents(), tensors, backward ? &d_o : nullptr, 1, &result);
  EXPECT_TRUE(status.ok()) << status.message();
  return result;
}

/// One head of a [tokens, heads, dim] array.
template <class T>
std::vector<double> head_of(const std::vector<T>& x, int head, int heads, int dim) {
  std::vector<double> out;
  for (std::size_t i = 0; i < x.size() / static_cast<std::size_t>(heads * dim); ++i)
    for (int c = 0; c < dim; ++c)
      out.push_back(static_cast<double>(
          x[(i * static_cast<std::size_t>(heads) + static_cast<std::size_t>(head)) * static_cast<std::size_t>(dim) +
            static_cast<std::size_t>(c)]));
  return out;
}

template <class A, class B>
double cosine(const A& a, const B& b) {
  double ab = 0, aa = 0, bb = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    ab += x * y, aa += x * x, bb += y * y;
  }
  return ab / std::max(std::sqrt(aa * bb), 1e-300);
}

template <class A, class B>
double relative_l2(const A& a, const B& b) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    difference += (x - y) * (x - y), norm += y * y;
  }
  return std::sqrt(difference / std::max(norm, 1e-300));
}

/// Greatest row error of one head, relative to the row's norm or a tenth of the rms row norm, whichever is more (numerics.md).
template <class A, class B>
double worst_row(const A& a, const B& b, int dim) {
  const std::size_t rows = b.size() / static_cast<std::size_t>(dim);
  std::vector<double> error(rows), norm(rows);
  double squares = 0;
  for (std::size_t i = 0; i < rows; ++i) {
    for (std::size_t c = i * static_cast<std::size_t>(dim); c < (i + 1) * static_cast<std::size_t>(dim); ++c) {
      const double x = static_cast<double>(a[c]), y = static_cast<double>(b[c]);
      error[i] += (x - y) * (x - y), norm[i] += y * y;
    }
    squares += norm[i];
  }
  const double floor = 0.1 * std::sqrt(squares / static_cast<double>(rows));
  double worst = 0;
  for (std::size_t i = 0; i < rows; ++i) worst = std::max(worst, std::sqrt(error[i]) / std::max(std::sqrt(norm[i]), floor));
  return worst;
}

/// Number of elements whose bits differ.
inline std::size_t different_bits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return std::max(a.size(), b.size());
  std::size_t count = 0;
  for (std::size_t i = 0; i < a.size(); ++i) count += numerics::bits_of(a[i]) != numerics::bits_of(b[i]);
  return count;
}

}  // namespace flamia::test
