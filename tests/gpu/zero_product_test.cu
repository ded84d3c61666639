// SPDX-License-Identifier: Apache-2.0
// Does a product with zero raise the exponent to which the tensor core aligns its sum? If it did, a masked P of zero would let the value
// it is multiplied with, a later token's, change the low bits of an earlier row: `mxfp8-exact` would leak. It does not.
//
// The kernel's own instruction (64 x 72 x 32, A from registers): columns n < 32 of B hold zero where columns n + 32 hold up to +-448, at
// every k where A is zero; all else is equal, the accumulator too.
#include <random>

#include "kernels/cuda/ptx/barrier.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "numerics/format.hpp"
#include "support/device.hpp"

namespace flamia::test {
namespace {

constexpr int kM = 64, kN = 72, kPairs = 32, kK = 32;

/// a [kM][kK], b [kN][kK], c and d [kM][kN], for each thread block.
__global__ void multiply(const std::uint8_t* a, const std::uint8_t* b, const float* c, float* d) {
  __shared__ alignas(128) std::uint8_t shared[kN * kK];
  a += blockIdx.x * kM * kK, b += blockIdx.x * kN * kK, c += blockIdx.x * kM * kN, d += blockIdx.x * kM * kN;
  constexpr ptx::OperandLayout kLayout{128, 256};
  for (int i = threadIdx.x; i < kN * kK; i += 128) {
    const int n = i / kK, k = i % kK;
    shared[n / 8 * 256 + k / 16 * 128 + n % 8 * 16 + k % 16] = b[i];
  }
  ptx::fence_before_async_use();
  __syncthreads();
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4;
  std::uint32_t words[4];
  for (int r = 0; r < 4; ++r) {
    words[r] = 0;
    for (int y = 0; y < 4; ++y) words[r] |= std::uint32_t{a[(row + 8 * (r & 1)) * kK + 4 * column + y + 16 * (r >> 1)]} << (8 * y);
  }
  float sums[kN / 2];
#pragma unroll
  for (int v = 0; v < kN / 2; ++v) sums[v] = c[(row + 8 * (v >> 1 & 1)) * kN + 8 * (v >> 2) + 2 * column + (v & 1)];
  ptx::fence_registers(sums);
  ptx::begin_products();
  ptx::product_64x72<true>(sums, words, ptx::descriptor(ptx::descriptor_low(shared, kLayout), kLayout));
  ptx::commit_products();
  ptx::wait_products<0>();
  ptx::fence_registers(sums);
#pragma unroll
  for (int v = 0; v < kN / 2; ++v) d[(row + 8 * (v >> 1 & 1)) * kN + 8 * (v >> 2) + 2 * column + (v & 1)] = sums[v];
}

class ZeroProduct : public GpuTest {};

TEST_F(ZeroProduct, LeavesEveryBitOfTheSum) {
  constexpr int kTrials = 600;
  std::random_device device;
  const unsigned seed = device();
  std::cout << "[ seed     ] " << seed << "\n";
  std::mt19937 random(seed);
  const auto sign = [&] { return static_cast<std::uint8_t>(random() % 2 << 7); };
  std::vector<std::uint8_t> a(std::size_t{kTrials} * kM * kK), b(std::size_t{kTrials} * kN * kK);
  std::vector<float> c(std::size_t{kTrials} * kM * kN);
  for (std::size_t trial = 0; trial < kTrials; ++trial) {
    const int zeros = 1 + static_cast<int>(random() % 31), small = static_cast<int>(random() % 8);
    const auto code = [&] { return static_cast<std::uint8_t>(random() % (8u * (static_cast<unsigned>(small) + 1)) | sign()); };
    for (std::size_t i = 0; i < kM * kK; ++i) a[trial * kM * kK + i] = static_cast<int>(i % kK) >= kK - zeros ? sign() : code();
    for (std::size_t n = 0; n < kPairs; ++n)
      for (std::size_t k = 0; k < kK; ++k) {
        const bool meets_zero = static_cast<int>(k) >= kK - zeros;
        const std::uint8_t x = code();
        b[trial * kN * kK + n * kK + k] = meets_zero ? 0 : x;
        b[trial * kN * kK + (n + kPairs) * kK + k] = meets_zero ? static_cast<std::uint8_t>((0x7e - random() % 4) | sign()) : x;
      }
    for (std::size_t i = 0; i < kM; ++i)
      for (std::size_t n = 0; n < kPairs; ++n) {
        const float start = trial % 2 == 0 ? 0.f
                                           : (static_cast<float>(random() % 65536) / 65536.f - .5f) *
                                                 std::ldexp(1.f, -static_cast<int>(random() % 20));
        c[(trial * kM + i) * kN + n] = c[(trial * kM + i) * kN + n + kPairs] = start;
      }
  }
  const DeviceBuffer<std::uint8_t> device_b{std::span<const std::uint8_t>(b)};
  const DeviceBuffer<float> device_c{std::span<const float>(c)};
  const auto sums_of = [&](const std::vector<std::uint8_t>& left) {
    const DeviceBuffer<std::uint8_t> device_a{std::span<const std::uint8_t>(left)};
    const DeviceBuffer<float> device_d(static_cast<std::int64_t>(c.size()));
    multiply<<<kTrials, 128>>>(device_a.get(), device_b.get(), device_c.get(), device_d.get());
    cuda_ok(cudaGetLastError());
    cuda_ok(cudaDeviceSynchronize());
    return device_d.download();
  };
  const auto pairs_that_differ = [&](const std::vector<float>& d) {
    std::int64_t count = 0;
    for (std::size_t i = 0; i < std::size_t{kTrials} * kM; ++i)
      for (std::size_t n = 0; n < kPairs; ++n)
        count += numerics::bits_of(d[i * kN + n]) != numerics::bits_of(d[i * kN + n + kPairs]);
    return count;
  };
  const std::vector<float> sums = sums_of(a);
  EXPECT_EQ(pairs_that_differ(sums), 0);

  // The comparison can see something: the accumulator does round, and the least factor that is not zero shows in the pairs.
  std::int64_t rounded = 0;
  for (std::size_t i = 0; i < std::size_t{kTrials} * kM; ++i)
    for (std::size_t n = 0; n < kPairs; ++n) {
      double exact = c[i * kN + n];
      for (std::size_t k = 0; k < kK; ++k)
        exact += double{numerics::decode<numerics::kE4M3>(a[i * kK + k])} *
                 numerics::decode<numerics::kE4M3>(b[(i / kM * kN + n) * kK + k]);
      rounded += sums[i * kN + n] != static_cast<float>(exact);
    }
  EXPECT_GT(rounded, 1000);
  for (std::size_t i = 0; i < std::size_t{kTrials} * kM; ++i) a[i * kK + kK - 1] = 1;
  EXPECT_GT(pairs_that_differ(sums_of(a)), 1000);
}

}  // namespace
}  // namespace flamia::test
