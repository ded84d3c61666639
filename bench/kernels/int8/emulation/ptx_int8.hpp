// SPDX-License-Identifier: Apache-2.0
// What the INT8 kernels need beside ../../backward/emulation/ptx.hpp: INT8 products, BF16 products of rows, a few intrinsics.
#pragma once
#include <type_traits>

#include "ptx.hpp"

inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += static_cast<std::int8_t>(a >> 8 * i) * static_cast<std::int8_t>(b >> 8 * i);
  return c;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const std::uint64_t* const all = emulation::share_in_warp(value, "a reduction");
  unsigned g = 0;
  for (int l = 0; l < 32; ++l) g = max(g, static_cast<unsigned>(all[l]));
  return g;
}
inline bool __all_sync(unsigned, bool vote) {
  const std::uint64_t* const all = emulation::share_in_warp(vote, "a vote");
  return std::all_of(all, all + 32, [](std::uint64_t x) { return x != 0; });
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  const std::uint64_t* const all = emulation::share_in_warp(vote, "a ballot");
  unsigned word = 0;
  for (int l = 0; l < 32; ++l) word |= all[l] != 0 ? 1u << l : 0u;
  return word;
}
inline int __vimax3_s32(int a, int b, int c) { return std::max({a, b, c}); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
template <class T>
T __ldg(const T* p) {
  return *p;
}
namespace flamia::ptx {
inline void barrier_wait_asleep(Barrier* b, std::uint32_t parity, std::uint32_t) { barrier_wait(b, parity); }
inline float max_or_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b); }
template <int n>
void fence_registers(int (&)[n]) {}
inline int s8_element(std::uint64_t descriptor, int row, int k) {
  const auto field = [&](int bit) { return static_cast<std::uint32_t>(descriptor >> bit & 0x3FFF) << 4; };
  return static_cast<std::int8_t>(*at_shared(field(0) + row / 8 * field(32) + k / 16 * field(16) + row % 8 * 16 + k % 16));
}
template <bool kAccumulate, int kCount>
void multiply_s8(int (&d)[kCount], const std::uint64_t* shared_a, const std::uint32_t* register_a, std::uint64_t b) {
  std::uint32_t words[128][4];
  emulation::share_in_warpgroup(register_a, words);
  const int thread = emulation::current % 128, warp = thread / 32, lane = thread % 32;
  int a[2][32];
  for (int half = 0; half < 2; ++half)
    for (int k = 0; k < 32; ++k)
      a[half][k] = shared_a != nullptr
                       ? s8_element(*shared_a, 16 * warp + lane / 4 + 8 * half, k)
                       : static_cast<std::int8_t>(words[32 * warp + lane / 4 * 4 + k % 16 / 4][half + 2 * (k / 16)] >> 8 * (k % 4));
  for (int i = 0; i < kCount; ++i) {
    int sum = kAccumulate ? d[i] : 0;
    for (int k = 0; k < 32; ++k) sum += a[i / 2 % 2][k] * s8_element(b, 8 * (i / 4) + 2 * (lane % 4) + i % 2, k);
    d[i] = sum;
  }
  emulation::share_in_warpgroup(nullptr, words);
}
template <bool k>
void product_s8_64x64(int (&d)[32], std::uint64_t a, std::uint64_t b) {
  multiply_s8<k>(d, &a, nullptr, b);
}
template <bool k>
void product_s8_64x128(int (&d)[64], std::uint64_t a, std::uint64_t b) {
  multiply_s8<k>(d, &a, nullptr, b);
}
template <bool k>
void product_s8_64x32(int (&d)[16], const std::uint32_t* a, std::uint64_t b) {
  multiply_s8<k>(d, nullptr, a, b);
}
template <bool k>
void product_s8_64x64(int (&d)[32], const std::uint32_t* a, std::uint64_t b) {
  multiply_s8<k>(d, nullptr, a, b);
}
template <bool k>
void product_s8_64x128(int (&d)[64], const std::uint32_t* a, std::uint64_t b) {
  multiply_s8<k>(d, nullptr, a, b);
}
template <bool kAccumulate, int kCount>
void multiply_rows(float (&d)[kCount], std::uint64_t a, std::uint64_t b) {
  const auto element = [](std::uint64_t descriptor, int row, int k) {
    const auto field = [&](int bit) { return static_cast<std::uint32_t>(descriptor >> bit & 0x3FFF) << 4; };
    return bf16_to_float(load_shared<std::uint16_t>(field(0) + row / 8 * field(32) + k / 8 * field(16) + row % 8 * 16 + k % 8 * 2));
  };
  std::uint32_t words[128][4];
  emulation::share_in_warpgroup(nullptr, words);
  const int thread = emulation::current % 128, warp = thread / 32, lane = thread % 32;
  for (int i = 0; i < kCount; ++i) {
    double sum = kAccumulate ? d[i] : 0.0;
    for (int k = 0; k < 16; ++k)
      sum += static_cast<double>(element(a, 16 * warp + lane / 4 + 8 * (i / 2 % 2), k)) *
             element(b, 8 * (i / 4) + 2 * (lane % 4) + i % 2, k);
    d[i] = static_cast<float>(sum);
  }
  emulation::share_in_warpgroup(nullptr, words);
}
template <bool k>
void product_bf16_rows_64x64(float (&d)[32], std::uint64_t a, std::uint64_t b) {
  multiply_rows<k>(d, a, b);
}
template <bool k>
void product_bf16_rows_64x128(float (&d)[64], std::uint64_t a, std::uint64_t b) {
  multiply_rows<k>(d, a, b);
}
}  // namespace flamia::ptx
