// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cuda_runtime_api.h>

#include <string>

#include "flamia/status.hpp"

namespace flamia {  // not flamia::cuda, which would hide ::cuda from the kernels

/// StatusCode::device_error with what was tried and CUDA's name and text of the error; ok for cudaSuccess.
inline Status device_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return {StatusCode::device_error, std::string(what) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error)};
}

}  // namespace flamia
