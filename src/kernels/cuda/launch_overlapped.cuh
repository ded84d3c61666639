// SPDX-License-Identifier: Apache-2.0
// Launching a kernel beside the one before it in the stream (ptx/grid.cuh).
#pragma once
#include <cuda_runtime_api.h>

namespace flamia::quantize::gpu {

/// A kernel that may start while the one before it still runs; it waits for it by itself.
template <class Kernel, class... Arguments>
cudaError_t launch_overlapped(Kernel kernel, dim3 grid, int threads, cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = grid;
  launch.blockDim = dim3(static_cast<unsigned>(threads));
  launch.stream = stream;
  launch.attrs = &overlap;
  launch.numAttrs = 1;
  return cudaLaunchKernelEx(&launch, kernel, arguments...);
}

}  // namespace flamia::quantize::gpu
