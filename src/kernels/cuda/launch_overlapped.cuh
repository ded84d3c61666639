// SPDX-License-Identifier: Apache-2.0
// Launching a kernel beside the one before it in the stream (ptx/grid.cuh).
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>

namespace flamia {

/// A kernel that may start while the one before it still runs; it waits for it by itself. `shared_bytes`: dynamic ones.
template <class Kernel, class... Arguments>
cudaError_t launch_overlapped(Kernel kernel, dim3 grid, int threads, std::size_t shared_bytes, cudaStream_t stream,
                              const Arguments&... arguments) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = grid;
  launch.blockDim = dim3(static_cast<unsigned>(threads));
  launch.dynamicSmemBytes = shared_bytes;
  launch.stream = stream;
  launch.attrs = &overlap;
  launch.numAttrs = 1;
  return cudaLaunchKernelEx(&launch, kernel, arguments...);
}

}  // namespace flamia
