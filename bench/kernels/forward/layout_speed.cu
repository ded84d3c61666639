// SPDX-License-Identifier: Apache-2.0
// Does the tensor core read operands without swizzle (core matrices of 8 rows x 16 bytes, contiguous) as fast as with 128-byte swizzle?
// Cycles per 64 x 128 x 128 product and multiprocessor, A from shared memory (scores) or registers (output with a column of ones).
// And does a product in two halves along N (64 + 64, 72 + 64 with the ones) cost more than in one piece?
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

#include "../../../src/kernels/cuda/ptx/barrier.cuh"
#include "../../../src/kernels/cuda/ptx/wgmma_forward.cuh"

namespace {

namespace ptx = flamia::ptx;
constexpr int kRounds = 256;

enum Mode { scores_plain, scores_swizzled, output_plain, output_swizzled, scores_halves, output_halves };

__device__ std::uint64_t swizzled(std::uint32_t address) {
  return static_cast<std::uint64_t>((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

template <int kMode>
__global__ void __launch_bounds__(384, 1) product(float* out, long long* cycles) {
  extern __shared__ std::uint8_t raw[];
  std::uint8_t* const memory = raw + ((0u - static_cast<std::uint32_t>(__cvta_generic_to_shared(raw))) & 1023u);
  for (int i = threadIdx.x; i < 96 * 1024 / 4; i += blockDim.x) {
    reinterpret_cast<std::uint32_t*>(memory)[i] = i * 2654435761u & 0x77777777u;
  }
  ptx::fence_before_async_use();
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  std::uint8_t* const a = memory + 48 * 1024 + warpgroup * 8192;
  constexpr ptx::OperandLayout rows{128, 1024}, values{2176, 128};
  const std::uint32_t a_low = ptx::descriptor_low(a, rows), b_low = ptx::descriptor_low(memory, rows);
  const std::uint32_t v_low = ptx::descriptor_low(memory, values);
  const std::uint64_t a_swizzled = swizzled(__cvta_generic_to_shared(a)), b_swizzled = swizzled(__cvta_generic_to_shared(memory));
  std::uint32_t codes[4];
  for (int i = 0; i < 4; ++i) codes[i] = (threadIdx.x * 77777u + i) & 0x77777777u;
  float d64[64], d68[68];
  for (float& x : d64) x = 0;
  for (float& x : d68) x = 0;
  __syncthreads();
  const long long start = clock64();
  for (int n = 0; n < kRounds; ++n) {
    if constexpr (kMode <= scores_swizzled)
      ptx::fence_registers(d64);
    else
      ptx::fence_registers(d68);
    ptx::begin_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (kMode == scores_plain)
        ptx::product_64x128<true>(d64, ptx::descriptor(a_low + 16 * k, rows), ptx::descriptor(b_low + 16 * k, rows));
      if constexpr (kMode == scores_swizzled) ptx::product_64x128<true>(d64, a_swizzled + 2 * k, b_swizzled + 2 * k);
      if constexpr (kMode == output_plain) ptx::product_64x136<true>(d68, codes, ptx::descriptor(v_low + 272 * k, values));
      if constexpr (kMode == output_swizzled) ptx::product_64x136<true>(d68, codes, b_swizzled + 2 * k);
    }
    ptx::commit_products();
    ptx::wait_products<0>();
    if constexpr (kMode <= scores_swizzled)
      ptx::fence_registers(d64);
    else
      ptx::fence_registers(d68);
  }
  __syncthreads();
  const long long stop = clock64();
  float sum = 0;
  for (float x : d64) sum += x;
  for (float x : d68) sum += x;
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
  if (threadIdx.x == 0) cycles[blockIdx.x] = stop - start;
}

/// The same products in two halves along N, each its own group.
template <int kMode>
__global__ void __launch_bounds__(384, 1) product_halves(float* out, long long* cycles) {
  extern __shared__ std::uint8_t raw[];
  std::uint8_t* const memory = raw + ((0u - static_cast<std::uint32_t>(__cvta_generic_to_shared(raw))) & 1023u);
  for (int i = threadIdx.x; i < 96 * 1024 / 4; i += blockDim.x) {
    reinterpret_cast<std::uint32_t*>(memory)[i] = i * 2654435761u & 0x77777777u;
  }
  ptx::fence_before_async_use();
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  std::uint8_t* const a = memory + 48 * 1024 + warpgroup * 8192;
  constexpr ptx::OperandLayout rows{128, 1024}, values{2176, 128};
  const std::uint32_t a_low = ptx::descriptor_low(a, rows), b_low = ptx::descriptor_low(memory, rows);
  const std::uint32_t v_low = ptx::descriptor_low(memory, values);
  std::uint32_t codes[4];
  for (int i = 0; i < 4; ++i) codes[i] = (threadIdx.x * 77777u + i) & 0x77777777u;
  float low[36], first[32], high[32];
  for (float& x : low) x = 0;
  for (float& x : first) x = 0;
  for (float& x : high) x = 0;
  __syncthreads();
  const long long start = clock64();
  for (int n = 0; n < kRounds; ++n) {
    ptx::fence_registers(low);
    ptx::fence_registers(first);
    ptx::fence_registers(high);
    ptx::begin_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (kMode == scores_halves)
        ptx::product_n64<true>(first, ptx::descriptor(a_low + 16 * k, rows), ptx::descriptor(b_low + 16 * k, rows));
      else
        ptx::product_64x72<true>(low, codes, ptx::descriptor(v_low + 64 + 272 * k, values));
    }
    ptx::commit_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (kMode == scores_halves)
        ptx::product_n64<true>(high, ptx::descriptor(a_low + 16 * k, rows), ptx::descriptor(b_low + 512 + 16 * k, rows));
      else
        ptx::product_n64<true>(high, codes, ptx::descriptor(v_low + 272 * k, values));
    }
    ptx::commit_products();
    ptx::wait_products<0>();
    ptx::fence_registers(low);
    ptx::fence_registers(first);
    ptx::fence_registers(high);
  }
  __syncthreads();
  const long long stop = clock64();
  float sum = 0;
  for (float x : low) sum += x;
  for (float x : first) sum += x;
  for (float x : high) sum += x;
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
  if (threadIdx.x == 0) cycles[blockIdx.x] = stop - start;
}

template <int kMode>
void measure(const char* name, float* out, long long* cycles) {
  const auto kernel = kMode >= scores_halves ? product_halves<kMode> : product<kMode>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 * 1024);
  std::printf("%-44s", name);
  for (int threads : {128, 256, 384}) {
    long long host = 0;
    for (int i = 0; i < 3; ++i) kernel<<<132, threads, 100 * 1024>>>(out, cycles);
    cudaMemcpy(&host, cycles, sizeof host, cudaMemcpyDeviceToHost);
    std::printf("  %d warpgroups %6.1f", threads / 128, static_cast<double>(host) / kRounds / (threads / 128));
  }
  std::printf("  (%s)\n", cudaGetErrorString(cudaGetLastError()));
}

}  // namespace

int main() {
  float* out;
  long long* cycles;
  cudaMalloc(&out, 132 * 384 * sizeof(float));
  cudaMalloc(&cycles, 132 * sizeof(long long));
  measure<scores_swizzled>("scores, 128-byte swizzle", out, cycles);
  measure<scores_plain>("scores, no swizzle", out, cycles);
  measure<output_swizzled>("output with ones (n = 136), 128-byte swizzle", out, cycles);
  measure<output_plain>("output with ones (n = 136), no swizzle", out, cycles);
  measure<scores_halves>("scores, 64 + 64, no swizzle", out, cycles);
  measure<output_halves>("output with ones, 72 + 64, no swizzle", out, cycles);
}
