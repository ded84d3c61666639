// SPDX-License-Identifier: Apache-2.0
// One forward call as the stages it enqueues, so that the benchmark can time each of them and the API can enqueue them all.
#pragma once
#include <cuda_runtime_api.h>

#include "flamia/attention.hpp"
#include "kernels/cuda/backend/memory.hpp"
#include "kernels/cuda/sm90/int8/int8.hpp"
#include "kernels/cuda/sm90/sage3/sage3.hpp"

namespace flamia::cuda {

/// Null pointers of `tensors`, dtypes and strides have been checked. Every stage only enqueues work on `stream`.
class ForwardCall {
 public:
  ForwardCall(const Plan& plan, const ForwardTensors& tensors, void* saved, void* workspace, cudaStream_t stream);

  Status check() const;     // what the kernels cannot do with these tensors
  Status schedule() const;  // documents, blocks, work list
  Status quantise() const;  // Q, K and V
  Status attend() const;    // O and LSE; rows outside every document are filled too

  /// What attend() hands to the kernel; tests add what they record.
  sm90::ForwardParams params() const;
  sm90::ForwardConfig config() const;

 private:
  Status quantise_int8() const;
  sm90::int8::ForwardParams int8_params() const;
  sm90::sage3::Params sage3_params() const;
  Status quantise_sage3() const;
  quantize::gpu::QuantiseParams quantised_operand(const TensorView& input, int heads, const OperandForm& form, bool rotate,
                                                  const OperandMemory& memory) const;

  const Problem& problem_;
  bool training_;
  const ForwardTensors& tensors_;
  cudaStream_t stream_;
  HopperForm form_;
  ForwardMemory memory_;
  std::int64_t slots_;
  schedule::gpu::Shape shape_;
  schedule::gpu::View schedule_;
};

/// Whether tokens and heads follow one another without gaps (a stride of 0 says so itself).
bool is_dense(const MutableTensorView& tensor, int heads, int head_dim);

}  // namespace flamia::cuda
