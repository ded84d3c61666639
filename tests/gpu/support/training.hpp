// SPDX-License-Identifier: Apache-2.0
// A training call through the public API on the GPU, with host data in and out, every buffer poisoned, and q, k, v gone before the
// backward pass begins; and how its gradients are compared.
#pragma once
#include <algorithm>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "support/attention.hpp"

namespace flamia::test {

struct TrainingOptions {
  bool deterministic = true;
  DType gradients = DType::f32;
};

class GpuTraining {
 public:
  GpuTraining(const Problem& problem, const Recipe& recipe, TrainingOptions options = {})
      : options_(options),
        plan_(make_plan(problem, recipe, options)),
        o_(elements(problem.query_heads)),
        lse_(problem.tokens * problem.query_heads),
        saved_(static_cast<std::int64_t>(plan_.saved_bytes())),
        forward_workspace_(static_cast<std::int64_t>(plan_.workspace_bytes(Pass::forward))),
        backward_workspace_(static_cast<std::int64_t>(plan_.workspace_bytes(Pass::backward))),
        d_q_(bytes(problem.query_heads)),
        d_k_(bytes(problem.key_heads)),
        d_v_(bytes(problem.key_heads)) {}

  Status forward(const DeviceOperands& in, cudaStream_t stream = nullptr) {
    return attention_forward(plan_, forward_tensors(in), saved_.get(), forward_workspace_.get(), stream);
  }
  Status backward(const DeviceOperands& in, cudaStream_t stream = nullptr) {
    return attention_backward(plan_, backward_tensors(in), saved_.get(), backward_workspace_.get(), stream);
  }

  void poison() {
    for (auto* buffer : {&saved_, &forward_workspace_, &backward_workspace_, &d_q_, &d_k_, &d_v_}) buffer->poison();
    o_.poison();
    lse_.poison();
  }

  /// Both passes, from poisoned memory; operands are poisoned after the forward pass, which has read them.
  void run(const Input& in) {
    poison();
    DeviceOperands operands(in);
    const Status forward_status = forward(operands);
    ASSERT_TRUE(forward_status.ok()) << forward_status.message();
    for (auto* operand : {&operands.q, &operands.k, &operands.v}) operand->poison();
    forward_workspace_.poison();
    const Status backward_status = backward(operands);
    ASSERT_TRUE(backward_status.ok()) << backward_status.message();
    cuda_ok(cudaDeviceSynchronize());
  }

  Result result() const {
    Result made;
    for (const std::uint16_t code : o_.download()) made.o.push_back(numerics::decode_bf16(code));
    made.lse = lse_.download();
    made.d_q = decoded(d_q_), made.d_k = decoded(d_k_), made.d_v = decoded(d_v_);
    return made;
  }

  ForwardTensors forward_tensors(const DeviceOperands& in) const {
    ForwardTensors tensors;
    tensors.q = {in.q.get(), DType::bf16};
    tensors.k = {in.k.get(), DType::bf16};
    tensors.v = {in.v.get(), DType::bf16};
    tensors.cu_seqlens = in.cu_seqlens.get();
    tensors.o = {o_.get(), DType::bf16};
    tensors.lse = lse_.get();
    return tensors;
  }
  BackwardTensors backward_tensors(const DeviceOperands& in) const {
    BackwardTensors tensors;
    tensors.o = {o_.get(), DType::bf16};
    tensors.d_o = {in.d_o.get(), DType::bf16};
    tensors.cu_seqlens = in.cu_seqlens.get();
    tensors.d_q = {d_q_.get(), options_.gradients};
    tensors.d_k = {d_k_.get(), options_.gradients};
    tensors.d_v = {d_v_.get(), options_.gradients};
    return tensors;
  }
  const Plan& plan() const { return plan_; }
  void* saved() const { return saved_.get(); }
  void* forward_workspace() const { return forward_workspace_.get(); }
  void* backward_workspace() const { return backward_workspace_.get(); }

 private:
  static Plan make_plan(const Problem& problem, const Recipe& recipe, const TrainingOptions& options) {
    PlanOptions plan_options;
    plan_options.device = Device::cuda;
    plan_options.deterministic = options.deterministic;
    Plan plan;
    const Status status = Plan::create(problem, recipe, plan_options, &plan);
    if (!status.ok()) throw std::runtime_error(status.message());
    return plan;
  }
  std::int64_t elements(int heads) const { return plan_.problem().tokens * heads * plan_.problem().head_dim; }
  std::int64_t bytes(int heads) const { return elements(heads) * static_cast<std::int64_t>(size_of(options_.gradients)); }
  std::vector<float> decoded(const DeviceBuffer<std::uint8_t>& buffer) const {
    const std::vector<std::uint8_t> raw = buffer.download();
    std::vector<float> values(raw.size() / size_of(options_.gradients));
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::uint16_t code;
      if (options_.gradients == DType::f32) {
        std::memcpy(&values[i], raw.data() + 4 * i, 4);
      } else {
        std::memcpy(&code, raw.data() + 2 * i, 2);
        values[i] = numerics::decode_bf16(code);
      }
    }
    return values;
  }

  TrainingOptions options_;
  Plan plan_;
  DeviceBuffer<std::uint16_t> o_;
  DeviceBuffer<float> lse_;
  DeviceBuffer<std::uint8_t> saved_, forward_workspace_, backward_workspace_, d_q_, d_k_, d_v_;
};

inline Result gpu_training(const Input& in, const Recipe& recipe, TrainingOptions options = {}) {
  GpuTraining call(in.problem, recipe, options);
  call.run(in);
  return call.result();
}

inline Result cpu_training(const Input& in, const std::string& name) {
  RunOptions options;
  options.threads = 8;
  return run(in, recipe(name), options);
}

/// Relative L2 of the three gradients. `floor`: the least root mean square that an error is held against; where a row sees one key, dQ and dK
/// are what rounding leaves of 0.
struct GradientErrors {
  double d_q, d_k, d_v;
};
inline GradientErrors gradient_errors(const Result& got, const Result& want, double floor = 0) {
  const auto error = [&](const std::vector<float>& a, const std::vector<float>& b) {
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < b.size(); ++i) {
      const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
      difference += d * d, norm += static_cast<double>(b[i]) * static_cast<double>(b[i]);
    }
    return std::sqrt(difference / std::max({norm, floor * floor * static_cast<double>(b.size()), 1e-300}));
  };
  return {error(got.d_q, want.d_q), error(got.d_k, want.d_k), error(got.d_v, want.d_v)};
}
inline std::ostream& operator<<(std::ostream& out, const GradientErrors& e) {
  return out << "relative L2 of dQ " << e.d_q << ", dK " << e.d_k << ", dV " << e.d_v;
}

/// A [tokens, heads, dim] array between two tokens: how many elements differ in any bit.
inline std::size_t different_between(const std::vector<float>& a, const std::vector<float>& b, std::int64_t row, std::int64_t begin,
                                     std::int64_t end) {
  std::size_t count = 0;
  for (std::int64_t i = begin * row; i < end * row; ++i)
    count += numerics::bits_of(a[static_cast<std::size_t>(i)]) != numerics::bits_of(b[static_cast<std::size_t>(i)]);
  return count;
}

/// Which of the four results to count in.
struct Which {
  bool o = false, d_q = false, d_k = false, d_v = false;
};
inline constexpr Which kEarlierSide{true, true, false, false}, kLaterSide{false, false, true, true}, kAll{true, true, true, true};

inline std::size_t different_rows(const Result& a, const Result& b, const Problem& p, std::int64_t begin, std::int64_t end,
                                  Which which) {
  const std::int64_t q = std::int64_t{p.query_heads} * p.head_dim, k = std::int64_t{p.key_heads} * p.head_dim;
  std::size_t count = 0;
  if (which.o) count += different_between(a.o, b.o, q, begin, end);
  if (which.d_q) count += different_between(a.d_q, b.d_q, q, begin, end);
  if (which.d_k) count += different_between(a.d_k, b.d_k, k, begin, end);
  if (which.d_v) count += different_between(a.d_v, b.d_v, k, begin, end);
  return count;
}

/// Both passes captured once; the lengths change between two replays.
inline void expect_graph_replays_with_other_lengths(const Recipe& recipe, std::uint64_t seed) {
  const Input in = normal_input({{300, 200, 100}, 2, 2, 128, {true, -1, -1}, 0}, seed);
  Input other = in;
  other.cu_seqlens = {0, 40, 40, 555};
  GpuTraining call(in.problem, recipe);
  DeviceOperands operands(in);
  ASSERT_TRUE(call.forward(operands).ok());
  ASSERT_TRUE(call.backward(operands).ok());
  cuda_ok(cudaDeviceSynchronize());
  Graph graph([&](cudaStream_t stream) {
    EXPECT_TRUE(call.forward(operands, stream).ok());
    EXPECT_TRUE(call.backward(operands, stream).ok());
  });
  const Result expected[] = {gpu_training(in, recipe), gpu_training(other, recipe)};
  for (const int lengths : {0, 1, 0}) {
    operands.cu_seqlens.upload((lengths == 0 ? in : other).cu_seqlens);
    call.poison();
    graph.replay();
    EXPECT_EQ(different_rows(call.result(), expected[lengths], in.problem, 0, in.problem.tokens, kAll), 0u);
  }
  EXPECT_GT(different_rows(expected[0], expected[1], in.problem, 0, in.problem.tokens, kAll), 0u);  // control
}

}  // namespace flamia::test
