// SPDX-License-Identifier: Apache-2.0
#include "made_inputs.hpp"

#include <cmath>
#include <numbers>
#include <random>

#include "numerics/format.hpp"

namespace flamia::cli {
namespace {

/// q, k, v, dout as FP32, before they are rounded.
struct Values {
  std::vector<float> q, k, v, d_o;
};

/// Box and Muller on the bits of a Mersenne twister: std::normal_distribution differs between libraries.
std::vector<float> normal(std::int64_t count, std::mt19937* bits) {
  std::vector<float> x(static_cast<std::size_t>(count));
  const auto uniform = [&] { return ((*bits)() + 0.5) / 4294967296.0; };
  for (float& value : x) {
    const double radius = std::sqrt(-2 * std::log(uniform())), angle = 2 * std::numbers::pi * uniform();
    value = static_cast<float>(radius * std::cos(angle));
  }
  return x;
}

class Maker {
 public:
  explicit Maker(const MadeShape& shape) : shape_(shape), cut_(shape.tokens * 3 / 4) {}

  Inputs finish(const Values& values) const {
    Inputs in;
    in.problem.tokens = shape_.tokens;
    in.problem.documents = 2;
    in.problem.query_heads = in.problem.key_heads = shape_.heads;
    in.problem.head_dim = shape_.head_dim;
    in.cu_seqlens = {0, static_cast<std::int32_t>(cut_), static_cast<std::int32_t>(shape_.tokens)};
    const Status status = schedule::Documents::create(in.cu_seqlens, shape_.tokens, &in.documents);
    static_cast<void>(status);  // these offsets are in order
    in.q = tensor(values.q), in.k = tensor(values.k), in.v = tensor(values.v), in.d_o = tensor(values.d_o);
    return in;
  }

  std::int64_t elements() const { return shape_.tokens * shape_.heads * shape_.head_dim; }

  /// visit(element of the token's row, channel) for tokens [begin, end).
  template <class Visit>
  void rows(std::vector<float>* x, std::int64_t begin, std::int64_t end, Visit visit) const {
    const std::int64_t row = std::int64_t{shape_.heads} * shape_.head_dim;
    for (std::int64_t i = begin * row; i < end * row; ++i)
      visit((*x)[static_cast<std::size_t>(i)], static_cast<int>(i % shape_.head_dim));
  }

  /// Queries share a component on 16 channels; the sink's key points along it.
  void add_sink(bool first, Values* values) const {
    const std::int64_t sinks[] = {first ? 0 : cut_ - 1, first ? cut_ : shape_.tokens - 1};
    const auto keys = static_cast<double>(shape_.tokens) / 2;
    const double score =
        std::log(keys) * std::sqrt(static_cast<double>(shape_.head_dim));  // e^(score / sqrt d) = as many as the others
    rows(&values->q, 0, shape_.tokens, [](float& x, int c) { x += c < 16 ? 2.f : 0.f; });
    for (const std::int64_t sink : sinks) {
      rows(&values->k, sink, sink + 1, [&](float& x, int c) { x = c < 16 ? static_cast<float>(score / 32) : 0.f; });
      rows(&values->v, sink, sink + 1, [](float& x, int) { x *= 1.f / 64; });
    }
  }

 private:
  HostTensor tensor(const std::vector<float>& values) const {
    HostTensor made{DType::bf16, shape_.heads, {}};
    for (const float value : values) {
      const std::uint16_t code = numerics::encode_bf16(value);
      made.bytes.push_back(static_cast<std::uint8_t>(code)), made.bytes.push_back(static_cast<std::uint8_t>(code >> 8));
    }
    return made;
  }

  const MadeShape& shape_;
  std::int64_t cut_;
};

}  // namespace

std::vector<MadeInput> make_inputs(const MadeShape& shape) {
  const Maker maker(shape);
  std::mt19937 bits(shape.seed);
  Values plain;
  for (std::vector<float>* x : {&plain.q, &plain.k, &plain.v, &plain.d_o}) *x = normal(maker.elements(), &bits);
  std::vector<MadeInput> made;
  const auto add = [&](const char* name, auto change) {
    Values values = plain;
    change(values);
    made.push_back({name, maker.finish(values)});
  };
  add("normal", [](Values&) {});
  add("sink-first", [&](Values& x) { maker.add_sink(true, &x); });
  add("sink-last", [&](Values& x) { maker.add_sink(false, &x); });
  add("outlier-channel", [&](Values& x) {
    for (std::vector<float>* operand : {&x.q, &x.k})
      maker.rows(operand, 0, shape.tokens, [](float& value, int c) { value *= c == 5 ? 16.f : 1.f; });
  });
  add("key-bias",
      [&](Values& x) { maker.rows(&x.k, 0, shape.tokens, [](float& value, int c) { value += c % 5 == 0 ? 4.f : 0.f; }); });
  add("small-v", [&](Values& x) { maker.rows(&x.v, 0, shape.tokens, [](float& value, int) { value *= 0x1p-12f; }); });
  return made;
}

}  // namespace flamia::cli
