// SPDX-License-Identifier: Apache-2.0
// One forward call through the public API on the GPU, with host data in and out and every buffer poisoned.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "flamia/attention.hpp"
#include "kernels/attention_case.hpp"
#include "numerics/format.hpp"
#include "support/device.hpp"

namespace flamia::test {

/// Operands in BF16 on the device.
struct DeviceOperands {
  explicit DeviceOperands(const Input& in)
      : q(bf16(in.q)), k(bf16(in.k)), v(bf16(in.v)), d_o(bf16(in.d_o)), cu_seqlens(std::span<const std::int32_t>(in.cu_seqlens)) {}

  static std::vector<std::uint16_t> bf16(const std::vector<float>& x) {
    std::vector<std::uint16_t> codes(x.size());
    std::transform(x.begin(), x.end(), codes.begin(), [](float value) { return numerics::encode_bf16(value); });
    return codes;
  }
  DeviceBuffer<std::uint16_t> q, k, v, d_o;
  DeviceBuffer<std::int32_t> cu_seqlens;
};

struct GpuForward {
  std::vector<float> o;    // [tokens, heads, dim], from BF16
  std::vector<float> lse;  // [heads, tokens]
};

class GpuCall {
 public:
  GpuCall(const Problem& problem, const Recipe& recipe) {
    PlanOptions options;
    options.device = Device::cuda;
    options.training = false;
    const Status status = Plan::create(problem, recipe, options, &plan_);
    if (!status.ok()) throw std::runtime_error(status.message());
    workspace_ = std::make_unique<DeviceBuffer<std::uint8_t>>(static_cast<std::int64_t>(plan_.workspace_bytes(Pass::forward)));
    o_ = std::make_unique<DeviceBuffer<std::uint16_t>>(problem.tokens * problem.query_heads * problem.head_dim);
    lse_ = std::make_unique<DeviceBuffer<float>>(problem.tokens * problem.query_heads);
  }

  Status enqueue(const DeviceOperands& in, cudaStream_t stream = nullptr) {
    ForwardTensors tensors;
    tensors.q = {in.q.get(), DType::bf16};
    tensors.k = {in.k.get(), DType::bf16};
    tensors.v = {in.v.get(), DType::bf16};
    tensors.cu_seqlens = in.cu_seqlens.get();
    tensors.o = {o_->get(), DType::bf16};
    tensors.lse = lse_->get();
    return attention_forward(plan_, tensors, nullptr, workspace_->get(), stream);
  }

  void poison() {
    o_->poison();
    lse_->poison();
    workspace_->poison();
  }

  GpuForward result() const {
    GpuForward made;
    for (const std::uint16_t code : o_->download()) made.o.push_back(numerics::decode_bf16(code));
    made.lse = lse_->download();
    return made;
  }

 private:
  Plan plan_;
  std::unique_ptr<DeviceBuffer<std::uint8_t>> workspace_;
  std::unique_ptr<DeviceBuffer<std::uint16_t>> o_;
  std::unique_ptr<DeviceBuffer<float>> lse_;
};

inline GpuForward gpu_forward(const Input& in, const Recipe& recipe) {
  GpuCall call(in.problem, recipe);
  const DeviceOperands operands(in);
  call.poison();
  const Status status = call.enqueue(operands);
  EXPECT_TRUE(status.ok()) << status.message();
  cuda_ok(cudaDeviceSynchronize());
  return call.result();
}

/// Elements of O and LSE of the tokens [begin, end) whose bits differ.
inline std::size_t elements_that_differ(const GpuForward& a, const GpuForward& b, const Problem& problem, std::int64_t begin,
                                        std::int64_t end) {
  std::size_t count = 0;
  const std::int64_t row = std::int64_t{problem.query_heads} * problem.head_dim;
  for (std::int64_t x = begin * row; x < end * row; ++x)
    count += a.o[static_cast<std::size_t>(x)] != b.o[static_cast<std::size_t>(x)];
  for (std::int64_t head = 0; head < problem.query_heads; ++head)
    for (std::int64_t t = begin; t < end; ++t) {
      const auto at = static_cast<std::size_t>(head * problem.tokens + t);
      count += numerics::bits_of(a.lse[at]) != numerics::bits_of(b.lse[at]);
    }
  return count;
}

}  // namespace flamia::test
