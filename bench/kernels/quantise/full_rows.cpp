// SPDX-License-Identifier: Apache-2.0
#include "full_rows.hpp"

#include <cstring>
#include <stdexcept>
#include <vector>

#include "full.hpp"
#include "quantize/quantize.hpp"

namespace flamia::bench {
namespace {

constexpr int kDim = 128;

void ok(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

template <class T>
struct OnDevice {
  explicit OnDevice(std::int64_t n) : count(static_cast<std::size_t>(n)) {
    void* memory = nullptr;
    ok(cudaMalloc(&memory, count * sizeof(T)));
    data = static_cast<T*>(memory);
  }
  ~OnDevice() { cudaFree(data); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  std::vector<T> host() const {
    std::vector<T> values(count);
    ok(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }
  T* data = nullptr;
  std::size_t count;
};

struct Copies {
  Copies(std::int64_t tokens, int heads)
      : rows(tokens * heads * kDim / 2),
        row_scales(tokens * heads * kDim / 16),
        columns(rows.count),
        column_scales(row_scales.count),
        levels(tokens / 128 * heads) {}
  FullParams params(const std::uint16_t* input, const float* divisor, std::int64_t tokens, int heads, bool rotate) const {
    return {input, heads, tokens, rotate, divisor, rows.data, row_scales.data, columns.data, column_scales.data, levels.data};
  }
  OnDevice<std::uint8_t> rows, row_scales, columns, column_scales;
  OnDevice<float> levels;
};

std::uint32_t nibble(const std::vector<std::uint8_t>& codes, std::int64_t i) {
  return codes[static_cast<std::size_t>(i / 2)] >> 4 * (i % 2) & 15u;
}

/// The host's copies of the first documents, compared in every code and scale.
void check(const std::uint16_t* input, const float* divisor, int heads, bool rotate) {
  constexpr std::int64_t kTokens = 384;
  std::vector<std::uint16_t> x(static_cast<std::size_t>(kTokens * heads * kDim));
  std::vector<float> l(static_cast<std::size_t>(heads * kTokens));
  ok(cudaMemcpy(x.data(), input, x.size() * 2, cudaMemcpyDeviceToHost));
  if (divisor != nullptr) ok(cudaMemcpy(l.data(), divisor, l.size() * 4, cudaMemcpyDeviceToHost));
  const Copies copies(kTokens, heads);
  ok(launch_full(copies.params(input, divisor, kTokens, heads, rotate), nullptr));
  ok(cudaDeviceSynchronize());
  schedule::Documents documents;
  const std::vector<std::int32_t> lengths{0, 256, 384};
  if (!schedule::Documents::create(lengths, kTokens, &documents).ok()) throw std::runtime_error("documents of the check");
  quantize::QuantiseInput in;
  in.tensor = {x.data(), DType::bf16, 0, 0};
  in.heads = heads;
  in.dim = kDim;
  in.rotate = rotate;
  in.divide_by = divisor != nullptr ? l.data() : nullptr;
  Quantisation form;
  form.element = Element::e2m1;
  form.scale = ScaleType::e4m3;
  form.rule = divisor != nullptr ? ScaleRule::two_level : ScaleRule::amax;
  std::int64_t wrong = 0;
  for (const bool by_rows : {true, false}) {
    form.group = {Group::Kind::blocks, by_rows ? 1 : 16, by_rows ? 16 : 1};
    quantize::QuantisedTensor host;
    if (const Status status = quantize::quantise(in, documents, form, 0, &host); !status.ok())
      throw std::runtime_error(status.message());
    const auto codes = (by_rows ? copies.rows : copies.columns).host(),
               scales = (by_rows ? copies.row_scales : copies.column_scales).host();
    for (std::int64_t t = 0; t < kTokens; ++t)
      for (int h = 0; h < heads; ++h)
        for (int c = 0; c < kDim; ++c) {
          const std::int64_t group = (h * kTokens + t) / 16;
          const std::int64_t code = by_rows ? (h * kTokens + t) * kDim + c : (group * kDim + c) * 16 + t % 16;
          const std::int64_t scale = by_rows ? ((h * kTokens + t) * kDim + c) / 16 : group * kDim + c;
          const std::int64_t host_scale = by_rows ? ((t * heads + h) * kDim + c) / 16 : (t / 16 * heads + h) * kDim + c;
          wrong += nibble(codes, code) != nibble(host.codes, (t * heads + h) * kDim + c);
          wrong += scales[static_cast<std::size_t>(scale)] != host.scales[static_cast<std::size_t>(host_scale)];
        }
    if (divisor == nullptr) continue;
    const auto levels = copies.levels.host();
    for (std::size_t i = 0; i < levels.size(); ++i) wrong += levels[i] != host.first_levels[i];
  }
  if (wrong != 0) throw std::runtime_error(std::to_string(wrong) + " codes or scales of nvfp4-full differ from the host's");
}

}  // namespace

double time_full(const std::uint16_t* input, const float* divisor, std::int64_t tokens, int heads, const TimeMs& time,
                 const AddRow& row) {
  const Copies copies(tokens, heads);
  const double moved = static_cast<double>(tokens) * heads * kDim * (2 + 2 * (0.5 + 1. / 16));
  double total = 0;
  const struct {
    const char* part;
    bool rotate, gradient;
    int operands;
  } parts[] = {{"Q or K nvfp4-full", true, false, 2}, {"V nvfp4-full", false, false, 1}, {"dO nvfp4-full", false, true, 1}};
  for (const auto& part : parts) {
    const float* const l = part.gradient ? divisor : nullptr;
    check(input, l, heads, part.rotate);
    const FullParams params = copies.params(input, l, tokens, heads, part.rotate);
    const double ms = time([&] { ok(launch_full(params, nullptr)); });
    row(part.part, ms, moved);
    total += part.operands * ms;
  }
  row("eight copies nvfp4-full", total, 4 * moved);
  return total;
}

}  // namespace flamia::bench
