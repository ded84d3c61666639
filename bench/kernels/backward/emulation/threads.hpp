// SPDX-License-Identifier: Apache-2.0
// CUDA threads as fibers on one CPU thread: enough of the language to run the backward kernels without a GPU, with their real barriers,
// shuffles and ring buffers. A protocol error ends as "deadlock" with a list of who waits for what.
//
// Fibers run in rounds. EMULATE_SHUFFLE=<seed> lets whole warps miss rounds at random and one warpgroup lag at times, so that every run meets
// another interleaving; copies land at once, so a buffer that is freed too early is overwritten while it is still being read.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#undef __device__
#undef __global__
#undef __host__
#undef __forceinline__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __shared__
#define __launch_bounds__(...)
#define __grid_constant__

using std::max;
using std::min;

struct Index {
  unsigned x = 1, y = 1, z = 1;
};
inline Index threadIdx{0, 0, 0}, blockIdx{0, 0, 0}, blockDim, gridDim;

namespace emulation {

inline constexpr std::size_t kStackBytes = 256 * 1024;
inline constexpr int kIdleRounds = 3000;  // without any progress: deadlock

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  const char* waits_for = "";
  bool done = false;
};

/// Threads that meet: two generations, because nobody can be more than one ahead.
struct Meeting {
  std::uint64_t arrivals[2] = {0, 0};
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Meeting> warps, warpgroups, names;
  std::vector<std::uint64_t> warp_round, warpgroup_round, name_round;  // per thread; names: sixteen a thread
  std::vector<std::array<std::uint64_t, 2>> warp_values;
  std::vector<std::array<std::array<std::uint32_t, 4>, 2>> warpgroup_values;
};
struct BarrierState {
  std::int64_t expected, pending, bytes, phase;
};

inline Block block;
inline std::map<const void*, BarrierState> barriers;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline int current = -1;
inline std::uint64_t progress = 0;

inline void run_fiber() {
  body();
  block.fibers[current]->done = true;
  ++progress;
  swapcontext(&block.fibers[current]->context, &scheduler);
}
inline void yield() {
  const int me = current;
  swapcontext(&block.fibers[me]->context, &scheduler);
}
template <class Condition>
void wait_until(Condition condition, const char* what) {
  if (current < 0) return;
  block.fibers[current]->waits_for = what;
  while (!condition()) yield();
  block.fibers[current]->waits_for = "runs";
  ++progress;
}

inline void report_deadlock(unsigned index) {
  std::printf("deadlock in block %u\n", index);
  const char* before = "";
  for (std::size_t t = 0; t < block.fibers.size(); ++t) {
    const Fiber& fiber = *block.fibers[t];
    if (!fiber.done && (fiber.waits_for != before || t % 128 == 0)) std::printf("  thread %zu: %s\n", t, before = fiber.waits_for);
  }
  std::exit(3);
}

inline void prepare(unsigned threads) {
  barriers.clear();
  block = Block{};
  block.warps.resize(threads / 32 + 1), block.warpgroups.resize(threads / 128 + 1), block.names.resize(16);
  block.warp_round.resize(threads), block.warpgroup_round.resize(threads), block.name_round.resize(threads * 16);
  block.warp_values.resize(threads), block.warpgroup_values.resize(threads);
  for (unsigned t = 0; t < threads; ++t) {
    block.fibers.push_back(std::make_unique<Fiber>());
    Fiber& fiber = *block.fibers.back();
    fiber.stack.resize(kStackBytes);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, run_fiber, 0);
  }
}

/// Blocks one after the other: right for kernels whose blocks do not wait for each other.
inline void launch(unsigned blocks, unsigned threads, std::function<void()> call) {
  const char* const seed = std::getenv("EMULATE_SHUFFLE");
  static unsigned random = seed != nullptr ? static_cast<unsigned>(std::atoi(seed)) : 0;
  gridDim.x = blocks, blockDim.x = threads;
  for (unsigned b = 0; b < blocks; ++b) {
    blockIdx.x = b, body = call;
    prepare(threads);
    std::uint64_t before = progress;
    int idle = 0;
    unsigned slow = 0;
    for (bool any = true; any;) {
      any = false;
      bool skip = false;
      if (seed != nullptr && rand_r(&random) % 64 == 0) slow = static_cast<unsigned>(rand_r(&random)) % 4;
      for (unsigned t = 0; t < threads; ++t) {
        if (seed != nullptr && t % 32 == 0) skip = t / 128 == slow ? rand_r(&random) % 16 != 0 : rand_r(&random) % 3 == 0;
        if (block.fibers[t]->done) continue;
        any = true;
        if (skip) continue;
        current = static_cast<int>(t), threadIdx.x = t;
        swapcontext(&scheduler, &block.fibers[t]->context);
      }
      idle = progress == before ? idle + 1 : 0;
      if (idle > kIdleRounds) report_deadlock(b);
      before = progress;
    }
    current = -1;
  }
  gridDim.x = blockDim.x = 1, blockIdx.x = threadIdx.x = 0;
}

/// Every lane's value, in lane order.
inline std::uint64_t* share_in_warp(std::uint64_t value, const char* what) {
  static std::uint64_t all[32];
  const int me = current;
  const std::uint64_t round = block.warp_round[me]++;
  block.warp_values[me][round & 1] = value;
  Meeting& meeting = block.warps[me / 32];
  ++meeting.arrivals[round & 1], ++progress;
  wait_until([&] { return meeting.arrivals[round & 1] >= 32 * (round / 2 + 1); }, what);
  for (int lane = 0; lane < 32; ++lane) all[lane] = block.warp_values[me / 32 * 32 + lane][round & 1];
  return all;
}
/// Every thread's four words, in thread order.
inline void share_in_warpgroup(const std::uint32_t* words, std::uint32_t (*all)[4]) {
  const int me = current;
  const std::uint64_t round = block.warpgroup_round[me]++;
  for (int i = 0; i < 4; ++i) block.warpgroup_values[me][round & 1][i] = words != nullptr ? words[i] : 0;
  Meeting& meeting = block.warpgroups[me / 128];
  ++meeting.arrivals[round & 1], ++progress;
  wait_until([&] { return meeting.arrivals[round & 1] >= 128 * (round / 2 + 1); }, "a product");
  for (int t = 0; t < 128; ++t)
    for (int i = 0; i < 4; ++i) all[t][i] = block.warpgroup_values[me / 128 * 128 + t][round & 1][i];
}
inline void meet(int name, unsigned threads) {
  const int me = current;
  const std::uint64_t round = block.name_round[me * 16 + name]++;
  Meeting& meeting = block.names[name];
  ++meeting.arrivals[round & 1], ++progress;
  wait_until([&] { return meeting.arrivals[round & 1] >= threads * (round / 2 + 1); }, "a named barrier");
}
/// Counts in without waiting.
inline void arrive(int name) {
  const std::uint64_t round = block.name_round[current * 16 + name]++;
  ++block.names[name].arrivals[round & 1], ++progress;
}

template <class T>
std::uint64_t to_bits(T value) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T>
T from_bits(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace emulation

#define EMULATE_LAUNCH(blocks, threads, ...) emulation::launch(blocks, threads, [&] { __VA_ARGS__; })

inline float __int_as_float(int i) { return emulation::from_bits<float>(emulation::to_bits(i)); }
inline float __uint_as_float(unsigned i) { return emulation::from_bits<float>(i); }
inline int __float_as_int(float f) { return emulation::from_bits<int>(emulation::to_bits(f)); }
inline unsigned __float_as_uint(float f) { return emulation::from_bits<unsigned>(emulation::to_bits(f)); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline unsigned __vimax3_u32(unsigned a, unsigned b, unsigned c) { return max(a, max(b, c)); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const std::uint64_t both = static_cast<std::uint64_t>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const int lane = emulation::current % 32;
  return emulation::from_bits<T>(emulation::share_in_warp(emulation::to_bits(value), "a shuffle")[lane ^ mask]);
}
template <class T>
T __shfl_sync(unsigned, T value, int source) {
  return emulation::from_bits<T>(emulation::share_in_warp(emulation::to_bits(value), "a shuffle")[source]);
}
template <class T>
T __shfl_down_sync(unsigned, T value, int distance) {
  const int lane = emulation::current % 32;
  return emulation::from_bits<T>(
      emulation::share_in_warp(emulation::to_bits(value), "a shuffle")[lane + distance < 32 ? lane + distance : lane]);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int lane = emulation::current % 32;
  return emulation::from_bits<T>(
      emulation::share_in_warp(emulation::to_bits(value), "a shuffle")[lane >= distance ? lane - distance : lane]);
}
inline int __reduce_max_sync(unsigned, int value) {
  const std::uint64_t* const all = emulation::share_in_warp(emulation::to_bits(value), "a reduction");
  int greatest = emulation::from_bits<int>(all[0]);
  for (int lane = 1; lane < 32; ++lane) greatest = max(greatest, emulation::from_bits<int>(all[lane]));
  return greatest;
}
inline bool __any_sync(unsigned, bool vote) {
  const std::uint64_t* const all = emulation::share_in_warp(vote, "a vote");
  return std::any_of(all, all + 32, [](std::uint64_t x) { return x != 0; });
}
inline void __syncwarp() {
  if (emulation::current >= 0) emulation::share_in_warp(0, "its warp");
}
inline void __syncthreads() { emulation::meet(0, blockDim.x); }
inline bool __syncthreads_and(bool vote) {
  static bool all;
  __syncthreads();
  all = true;
  __syncthreads();
  all = all && vote;
  __syncthreads();
  return all;
}
inline int atomicAdd(int* address, int value) {
  const int before = *address;
  *address += value;
  ++emulation::progress;
  return before;
}
inline void __threadfence() {}
