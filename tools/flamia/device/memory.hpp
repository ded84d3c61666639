// SPDX-License-Identifier: Apache-2.0
// Device memory and streams of the program itself (the library allocates none).
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <utility>

#include "flamia/status.hpp"

namespace flamia::cli {

inline Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  const StatusCode code = error == cudaErrorMemoryAllocation ? StatusCode::out_of_memory : StatusCode::device_error;
  return {code, std::string(what) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error)};
}

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceBuffer() { cudaFree(data_); }

  Status allocate(std::size_t bytes) {
    cudaFree(data_);
    data_ = nullptr;
    bytes_ = bytes;
    return bytes == 0 ? Status() : cuda_status(cudaMalloc(&data_, bytes), "cudaMalloc");
  }
  Status upload(const void* host, std::size_t bytes) {
    if (Status s = allocate(bytes); !s.ok() || bytes == 0) return s;
    return cuda_status(cudaMemcpy(data_, host, bytes, cudaMemcpyHostToDevice), "copy to the device");
  }
  Status download(void* host, std::size_t bytes) const {
    return bytes == 0 ? Status() : cuda_status(cudaMemcpy(host, data_, bytes, cudaMemcpyDeviceToHost), "copy from the device");
  }
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace flamia::cli
