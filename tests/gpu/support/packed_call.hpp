// SPDX-License-Identifier: Apache-2.0
// A forward call through the API on N(0, 1) operands that are made on the GPU, and its comparison with the oracle there.
#pragma once
#include <numeric>
#include <string>

#include "device/fill.hpp"
#include "flamia/attention.hpp"
#include "kernels/attention_case.hpp"
#include "support/oracle.hpp"

namespace flamia::test {

/// BF16 N(0, 1) on the device; a call takes a window of it.
class NormalPool {
 public:
  NormalPool(std::int64_t elements, std::uint64_t seed) : data_(elements) {
    cuda_ok(cli::fill_normal_bf16(data_.get(), elements, seed, nullptr));
    cuda_ok(cudaDeviceSynchronize());
  }
  /// Somewhere in the given third, aligned to 16 bytes. Operands come from different thirds: where windows of Q and K overlap, rows meet
  /// themselves as keys, and a score |q|^2 carries 2.5 times the rounding error of independent ones.
  const std::uint16_t* at(int third, std::uint64_t random, std::int64_t elements) const {
    const std::int64_t third_elements = data_.size() / 3 / 8 * 8, room = (third_elements - elements) / 8;
    if (room < 0) throw std::runtime_error("the pool is too small");
    return data_.get() + third * third_elements + static_cast<std::int64_t>(random % static_cast<std::uint64_t>(room + 1)) * 8;
  }
  std::uint16_t* all() const { return data_.get(); }

 private:
  DeviceBuffer<std::uint16_t> data_;
};

class PackedCall {
 public:
  PackedCall(const Shape& shape, const Recipe& recipe, const std::uint16_t* q, const std::uint16_t* k, const std::uint16_t* v)
      : q_(q), k_(k), v_(v), offsets_{0} {
    for (const std::int64_t length : shape.lengths) offsets_.push_back(static_cast<std::int32_t>(offsets_.back() + length));
    problem_.tokens = offsets_.back() + shape.tail;
    problem_.documents = static_cast<std::int64_t>(shape.lengths.size());
    problem_.query_heads = shape.query_heads;
    problem_.key_heads = shape.key_heads;
    problem_.head_dim = shape.head_dim;
    problem_.mask = shape.mask;
    PlanOptions options;
    options.device = Device::cuda;
    options.training = false;
    if (const Status s = Plan::create(problem_, recipe, options, &plan_); !s.ok()) throw std::runtime_error(s.message());
    cu_seqlens_ = std::make_unique<DeviceBuffer<std::int32_t>>(std::span<const std::int32_t>(offsets_));
    workspace_ = std::make_unique<DeviceBuffer<std::uint8_t>>(static_cast<std::int64_t>(plan_.workspace_bytes(Pass::forward)));
    o_ = std::make_unique<DeviceBuffer<std::uint16_t>>(problem_.tokens * problem_.query_heads * problem_.head_dim);
    lse_ = std::make_unique<DeviceBuffer<float>>(problem_.tokens * problem_.query_heads);
  }

  Status run() {
    ForwardTensors tensors;
    tensors.q = {q_, DType::bf16};
    tensors.k = {k_, DType::bf16};
    tensors.v = {v_, DType::bf16};
    tensors.cu_seqlens = cu_seqlens_->get();
    tensors.o = {o_->get(), DType::bf16};
    tensors.lse = lse_->get();
    if (Status s = attention_forward(plan_, tensors, nullptr, workspace_->get(), nullptr); !s.ok()) return s;
    cuda_ok(cudaDeviceSynchronize());
    return {};
  }

  /// With the call's own lengths and mask, or others: the control.
  std::vector<RowReport> compare() const { return compare(problem_, offsets_); }
  std::vector<RowReport> compare(const Problem& problem, const std::vector<std::int32_t>& offsets) const {
    const DeviceBuffer<std::int32_t> lengths{std::span<const std::int32_t>(offsets)};
    return compare_with_oracle(problem, {q_, k_, v_, o_->get(), lse_->get(), lengths.get()});
  }

  const Problem& problem() const { return problem_; }
  const std::vector<std::int32_t>& offsets() const { return offsets_; }
  const DeviceBuffer<std::uint16_t>& o() const { return *o_; }

 private:
  const std::uint16_t *q_, *k_, *v_;
  std::vector<std::int32_t> offsets_;
  Problem problem_;
  Plan plan_;
  std::unique_ptr<DeviceBuffer<std::int32_t>> cu_seqlens_;
  std::unique_ptr<DeviceBuffer<std::uint8_t>> workspace_;
  std::unique_ptr<DeviceBuffer<std::uint16_t>> o_;
  std::unique_ptr<DeviceBuffer<float>> lse_;
};

}  // namespace flamia::test
