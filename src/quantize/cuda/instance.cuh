// SPDX-License-Identifier: Apache-2.0
// From what a call says (channels, type) to the instances of this folder's kernels.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "flamia/types.hpp"

namespace flamia::quantize::gpu {

/// launch.operator()<D, Element>() for 64 or 128 channels of BF16 or FP16; both were checked (checks.hpp).
template <class Launch>
auto with_instance(int head_dim, DType dtype, Launch launch) {
  const bool bf16 = dtype == DType::bf16;
  if (head_dim == 128) return bf16 ? launch.template operator()<128, __nv_bfloat16>() : launch.template operator()<128, __half>();
  return bf16 ? launch.template operator()<64, __nv_bfloat16>() : launch.template operator()<64, __half>();
}

}  // namespace flamia::quantize::gpu
