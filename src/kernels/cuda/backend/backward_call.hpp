// SPDX-License-Identifier: Apache-2.0
// One backward call as the stages it enqueues, so that the benchmark can time each of them and the API can enqueue them all.
#pragma once
#include <cuda_runtime_api.h>

#include "flamia/attention.hpp"
#include "kernels/cuda/backend/memory.hpp"
#include "kernels/cuda/sm90/int8/int8.hpp"

namespace flamia::cuda {

/// Null pointers of `tensors`, dtypes and strides have been checked. Every stage only enqueues work on `stream`; `saved` is only read.
class BackwardCall {
 public:
  BackwardCall(const Plan& plan, const BackwardTensors& tensors, const void* saved, void* workspace, cudaStream_t stream);

  Status check() const;          // what the kernels cannot do with these tensors
  Status schedule() const;       // the forward pass's serves: its counters
  Status quantise() const;       // dO: codes, D', the pre-scale of dQ; clears the partial sums of dQ
  Status differentiate() const;  // dQ, dK, dV; rows outside every document are filled too

  /// What differentiate() hands to the kernels, and their launches, beside which Q and K become BF16 values; tests add what they record.
  sm90::BackwardParams params() const;
  sm90::BackwardConfig config() const;
  Status run(const sm90::BackwardParams& params, const sm90::BackwardConfig& config) const;

 private:
  Status quantise_int8() const;
  sm90::int8::BackwardParams int8_params() const;
  Status dequantise() const;
  Status expand_nvfp4() const;

  const Problem& problem_;
  const PlanOptions& options_;
  const BackwardTensors& tensors_;
  cudaStream_t stream_;
  HopperForm form_;
  ForwardMemory saved_;  // what the forward pass left; its workspace is gone
  BackwardMemory memory_;
  std::int64_t slots_;
  schedule::gpu::Shape shape_;
  schedule::gpu::View schedule_;
};

}  // namespace flamia::cuda
