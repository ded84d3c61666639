// SPDX-License-Identifier: Apache-2.0
// The host quantiser on one core: bytes of BF16 input a second.
#include <benchmark/benchmark.h>

#include <random>

#include "numerics/format.hpp"
#include "quantize/encode.hpp"

namespace flamia::bench {
namespace {

void quantise(benchmark::State& state, const char* text, bool first_operand) {
  constexpr std::int64_t kTokens = 4096;
  constexpr int kHeads = 8, kDim = 128;
  Recipe recipe;
  if (!Recipe::parse(text, &recipe).ok()) return state.SkipWithError("no such recipe");
  std::mt19937 generator(2);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> x(kTokens * kHeads * kDim);
  for (std::uint16_t& value : x) value = numerics::encode_bf16(normal(generator));
  const schedule::Documents documents = schedule::Documents::single(kTokens);
  const Quantisation form = first_operand ? recipe.q.first : recipe.v.first;
  const quantize::QuantiseInput input{{x.data(), DType::bf16, 0, 0}, kHeads, kDim, first_operand && recipe.rotate, nullptr};
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(quantize::codes_bytes(form, kTokens, kHeads, kDim)));
  std::vector<std::uint8_t> scales(static_cast<std::size_t>(quantize::scale_bytes(form, documents, kHeads, kDim)));
  for (auto _ : state)
    if (!quantize::quantise_into(input, documents, form, 1, codes, scales).ok()) state.SkipWithError("quantise failed");
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * static_cast<std::int64_t>(x.size()) * 2);
}
BENCHMARK_CAPTURE(quantise, mxfp8_q_rotated, "mxfp8", true);
BENCHMARK_CAPTURE(quantise, mxfp8_v, "mxfp8", false);
BENCHMARK_CAPTURE(quantise, mxfp8_exact_q_rotated, "mxfp8-exact", true);
BENCHMARK_CAPTURE(quantise, mxfp8_exact_v_sticky, "mxfp8-exact", false);

}  // namespace
}  // namespace flamia::bench
