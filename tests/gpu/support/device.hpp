// SPDX-License-Identifier: Apache-2.0
// Device memory, poisoned before use, and the visible skip on machines without a GPU.
#pragma once
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace flamia::test {

/// Why no GPU test can run here; empty if one can.
inline std::string why_no_gpu() {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) return cudaGetErrorString(error);
  if (count == 0) return "no device";
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) return "cannot read the device's properties";
  if (properties.major != 9) return std::string(properties.name) + " is no sm_90 device";
  return {};
}

class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << "needs a Hopper GPU: " << why;
  }
};

inline void cuda_ok(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

inline constexpr int kPoison = 0xa5;

/// `count` elements on the device, all bytes kPoison. Allocates one element at least, so that a pointer to nothing is still valid.
template <class T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::int64_t count) : count_(count) {
    cuda_ok(cudaMalloc(reinterpret_cast<void**>(&data_), bytes() + sizeof(T)));
    poison();
  }
  explicit DeviceBuffer(std::span<const T> host) : DeviceBuffer(static_cast<std::int64_t>(host.size())) { upload(host); }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  /// Nothing with FLAMIA_TEST_FRESH: what has been poisoned counts as initialised for compute-sanitizer.
  void poison() {
    static const bool fresh = std::getenv("FLAMIA_TEST_FRESH") != nullptr;
    if (!fresh) cuda_ok(cudaMemset(data_, kPoison, bytes()));
  }
  void upload(std::span<const T> host) {
    if (!host.empty()) cuda_ok(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> download() const {
    std::vector<T> host(static_cast<std::size_t>(count_));
    if (count_ > 0) cuda_ok(cudaMemcpy(host.data(), data_, bytes(), cudaMemcpyDeviceToHost));
    return host;
  }
  T* get() const { return data_; }
  std::int64_t size() const { return count_; }

 private:
  std::size_t bytes() const { return static_cast<std::size_t>(count_) * sizeof(T); }
  std::int64_t count_;
  T* data_ = nullptr;
};

/// First `count` elements from a device pointer.
template <class T>
std::vector<T> download(const T* device, std::int64_t count) {
  std::vector<T> host(static_cast<std::size_t>(count));
  if (count > 0) cuda_ok(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

/// A captured stream as a graph that can be replayed.
class Graph {
 public:
  template <class Enqueue>
  explicit Graph(Enqueue enqueue) {
    cuda_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    cuda_ok(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    enqueue(stream_);
    cudaGraph_t graph;
    cuda_ok(cudaStreamEndCapture(stream_, &graph));
    cuda_ok(cudaGraphInstantiate(&executable_, graph, 0));
    cuda_ok(cudaGraphDestroy(graph));
  }
  ~Graph() {
    cudaGraphExecDestroy(executable_);
    cudaStreamDestroy(stream_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  /// Its stream does not wait for the default stream: what was poisoned or uploaded there must have arrived.
  void replay() {
    cuda_ok(cudaDeviceSynchronize());
    cuda_ok(cudaGraphLaunch(executable_, stream_));
    cuda_ok(cudaStreamSynchronize(stream_));
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace flamia::test
