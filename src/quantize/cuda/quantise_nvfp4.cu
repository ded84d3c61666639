// SPDX-License-Identifier: Apache-2.0
// The kernels that write NVFP4 beside E4M3: a translation unit of their own, for they take long to compile.
#include "quantize/cuda/quantise_kernel.cuh"

namespace flamia::quantize::gpu {
namespace {

template <int D>
cudaError_t enqueue(const QuantiseParams& p, unsigned units, cudaStream_t stream) {
  return p.input.dtype == DType::bf16 ? enqueue_codes<D, __nv_bfloat16, true, true>(p, units, stream)
                                      : enqueue_codes<D, __half, true, true>(p, units, stream);
}

}  // namespace

cudaError_t enqueue_nvfp4(const QuantiseParams& p, unsigned units, cudaStream_t stream) {
  return p.head_dim == 128 ? enqueue<128>(p, units, stream) : enqueue<64>(p, units, stream);
}

}  // namespace flamia::quantize::gpu
