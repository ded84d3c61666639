// SPDX-License-Identifier: Apache-2.0
// The training call (quantise + forward + backward) on one causal document: FP32, then the recipes, each with its time over FP32's.
#include <benchmark/benchmark.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "fp32_attention.hpp"
#include "kernels/cpu/backward.hpp"
#include "kernels/cpu/forward.hpp"
#include "numerics/format.hpp"

namespace flamia::bench {
namespace {

constexpr Fp32Problem kProblem{2048, 4, 128};

double seconds_of(const auto& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

Fp32Tensors& tensors() {
  static Fp32Tensors made(kProblem);
  return made;
}

void fp32_training(int threads) {
  fp32_forward(kProblem, tensors(), threads);
  fp32_backward(kProblem, tensors(), threads);
}

void fp32(benchmark::State& state) {
  for (auto _ : state) fp32_training(static_cast<int>(state.range(0)));
}
BENCHMARK(fp32)->ArgName("threads")->Arg(1)->Arg(2)->UseRealTime()->Unit(benchmark::kMillisecond);

struct Free {
  void operator()(void* p) const { std::free(p); }
};
std::unique_ptr<void, Free> bytes(std::size_t count) {
  return std::unique_ptr<void, Free>(std::aligned_alloc(256, (count + 255) / 256 * 256 + 256));
}

/// Relative L2 distance.
double distance(const std::vector<std::uint16_t>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double x = static_cast<double>(numerics::decode_bf16(a[i])), y = static_cast<double>(b[i]);
    difference += (x - y) * (x - y), norm += y * y;
  }
  return std::sqrt(difference / norm);
}

void recipe_training(benchmark::State& state, const char* text) {
  const int threads = static_cast<int>(state.range(0));
  Recipe recipe;
  if (!Recipe::parse(text, &recipe).ok()) return state.SkipWithError("no such recipe");
  Problem problem;
  problem.tokens = kProblem.tokens;
  problem.query_heads = problem.key_heads = kProblem.heads;
  problem.head_dim = kProblem.dim;
  const schedule::Documents documents = schedule::Documents::single(kProblem.tokens);
  const std::int32_t cu_seqlens[] = {0, static_cast<std::int32_t>(kProblem.tokens)};
  Fp32Tensors& t = tensors();
  const std::size_t size = t.q.size();
  const auto bf16 = [&](const std::vector<float>& x) {
    std::vector<std::uint16_t> out(size);
    for (std::size_t i = 0; i < size; ++i) out[i] = numerics::encode_bf16(x[i]);
    return out;
  };
  const std::vector<std::uint16_t> q = bf16(t.q), k = bf16(t.k), v = bf16(t.v), d_o = bf16(t.d_o);
  std::vector<std::uint16_t> o(size), d_q(size), d_k(size), d_v(size);
  std::vector<float> lse(t.lse.size());
  const std::int64_t head_stride = kProblem.tokens * kProblem.dim;  // [heads][tokens][dim] as the FP32 kernel has it
  const auto view = [&](const std::vector<std::uint16_t>& x) {
    return TensorView{x.data(), DType::bf16, kProblem.dim, head_stride};
  };
  const auto writable = [&](std::vector<std::uint16_t>& x) {
    return MutableTensorView{x.data(), DType::bf16, kProblem.dim, head_stride};
  };
  const auto saved = bytes(cpu::saved_bytes(problem, recipe, true)),
             forward_memory = bytes(cpu::workspace_bytes(problem, recipe, Pass::forward, threads)),
             backward_memory = bytes(cpu::workspace_bytes(problem, recipe, Pass::backward, threads));
  const ForwardTensors forward{view(q), view(k), view(v), cu_seqlens, writable(o), lse.data()};
  const BackwardTensors backward{view(o), view(d_o), cu_seqlens, writable(d_q), writable(d_k), writable(d_v)};
  const auto call = [&] {
    const Status a = cpu::forward(problem, recipe, documents, forward, saved.get(), forward_memory.get(), threads);
    const Status b = cpu::backward(problem, recipe, documents, backward, saved.get(), backward_memory.get(), threads);
    if (!a.ok() || !b.ok()) state.SkipWithError((a.message() + b.message()).c_str());
  };
  double ours = 1e9, fp32 = 1e9;  // best of each, taken in turn, so that both see the same machine
  for (auto _ : state) {
    ours = std::min(ours, seconds_of(call));
    state.PauseTiming();
    fp32 = std::min(fp32, seconds_of([&] { fp32_training(threads); }));
    state.ResumeTiming();
  }
  state.counters["over_fp32"] = ours / fp32;
  if (distance(o, t.o) > 0.1 || distance(d_q, t.d_q) > 0.1 || distance(d_k, t.d_k) > 0.1 || distance(d_v, t.d_v) > 0.1)
    state.SkipWithError("recipe and FP32 attention do not compute the same thing");
}
BENCHMARK_CAPTURE(recipe_training, mxfp8, "mxfp8")
    ->ArgName("threads")
    ->Arg(1)
    ->Arg(2)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(recipe_training, mxfp8_exact, "mxfp8-exact")
    ->ArgName("threads")
    ->Arg(1)
    ->Arg(2)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(recipe_training, bf16, "bf16")->ArgName("threads")->Arg(1)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(recipe_training, fp8_tensor, "fp8-tensor")
    ->ArgName("threads")
    ->Arg(1)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace flamia::bench
