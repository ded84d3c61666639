// SPDX-License-Identifier: Apache-2.0
// Launching one kernel; included by the translation units that instantiate it.
#pragma once
#include "../launch_persistent.cuh"
#include "frame.cuh"

namespace flamia::sm90::int8 {

template <class Kernel, class Params>
cudaError_t launch(const Params& params, cudaStream_t stream) {
  int multiprocessors = 0;
  if (const cudaError_t error = count_multiprocessors(&multiprocessors); error != cudaSuccess) return error;
  return launch_persistent<attention_kernel<Kernel, Params>, static_cast<int>(sizeof(Storage<Kernel>)) + kSharedAlign>(
      multiprocessors, Kernel::kThreads, stream, params);
}

}  // namespace flamia::sm90::int8
