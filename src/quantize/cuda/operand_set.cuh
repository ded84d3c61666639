// SPDX-License-Identifier: Apache-2.0
// What a launch of the quantiser works on: up to three operands of one call, their heads one after another.
#pragma once
#include "kernels/cuda/launch_overlapped.cuh"
#include "kernels/cuda/ptx/grid.cuh"
#include "quantize/cuda/quantise.hpp"

namespace flamia::quantize::gpu {

struct OperandSet {
  QuantiseParams operand[kMostOperands];  // `scratch`: the operand's own part
  int count = 0;
  int heads = 0;                     // of all
  std::uint32_t* claimed = nullptr;  // units of this launch, zero before it
  bool followed =
      false;            // by another kernel of the call, which waits for this one; whoever comes after the call may not start early
  bool beside = false;  // the kernel before this one lets it start when the scratch is clear, and is waited for at the end
  bool find_maximum = false;  // Group::tensor, first pass: *scratch = bits of the greatest magnitude, before the norm

  void add(const QuantiseParams& p) {
    operand[count++] = p;
    heads += p.heads;
  }
  /// The operand that head number `head` of all belongs to; `head` becomes its own head.
  __device__ int find(int& head) const {
    int index = 0;
    while (head >= operand[index].heads) head -= operand[index++].heads;
    return index;
  }
};

/// The kernels of one call, in order on a stream. Each may be placed while the one before it still runs, and waits for it by itself (all do: the
/// end of the last one is the end of all); what came before the first has ended.
class Chain {
 public:
  explicit Chain(cudaStream_t stream) : stream_(stream) {}
  template <class Kernel, class... Arguments>
  void launch(Kernel kernel, dim3 grid, int threads, const Arguments&... arguments) {
    if (error_ != cudaSuccess) return;
    if (first_) {
      kernel<<<grid, static_cast<unsigned>(threads), 0, stream_>>>(arguments...);
      error_ = cudaGetLastError();
    } else {
      error_ = launch_overlapped(kernel, grid, threads, 0, stream_, arguments...);
    }
    first_ = false;
  }
  void fail(cudaError_t error) { error_ = error; }
  cudaError_t error() const { return error_; }

 private:
  cudaStream_t stream_;
  bool first_ = true;
  cudaError_t error_ = cudaSuccess;
};

/// The kernels, a translation unit each.
void enqueue_rotated(const OperandSet& set, Chain& chain);  // Q, K
void enqueue_nvfp4(const OperandSet& set, Chain& chain);    // Q, K with NVFP4 beside E4M3
void enqueue_plain(const OperandSet& set, Chain& chain);    // V
void enqueue_prefix(const OperandSet& set, Chain& chain);   // the scan, of operands with Prefix::record or Prefix::sticky

}  // namespace flamia::quantize::gpu
