// SPDX-License-Identifier: Apache-2.0
#include "kernel.cuh"

namespace flamia::sm90::sage3 {

cudaError_t launch(const Params& p, cudaStream_t stream) {
  const bool heads = p.key_heads > 0 && p.query_heads > 0 && p.query_heads % p.key_heads == 0;
  if (!heads || p.softmax_scale <= 0.f || p.slots % kTile != 0 || (p.head_dim != 64 && p.head_dim != 128))
    return cudaErrorInvalidValue;
  return p.head_dim == 128 ? launch_instance<128>(p, stream) : launch_instance<64>(p, stream);
}

}  // namespace flamia::sm90::sage3
