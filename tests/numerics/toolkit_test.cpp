// SPDX-License-Identifier: Apache-2.0
// Bit for bit against the CUDA toolkit's own host conversions, on every one of the 2^32 floats (six bits: every thirteenth; a sanitizer build:
// every kStride-th). Where the toolkit's headers are absent these tests are skipped, visibly; formats_test.cpp always runs.
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "numerics/exponent.hpp"
#include "numerics/format.hpp"

#if defined(FLAMIA_TOOLKIT_HEADERS)
#include <cuda_fp4.h>
#include <cuda_fp6.h>
#include <cuda_fp8.h>

namespace flamia::numerics {
namespace {

constexpr std::uint64_t kAllFloats = std::uint64_t{1} << 32;
constexpr std::uint64_t kStride = FLAMIA_TEST_STRIDE;  // 1, or an odd number
constexpr std::uint64_t kStrideOfSix = 13 * kStride;   // the formats of six bits, which no recipe computes with

struct Disagreement {
  std::uint64_t count = 0;
  std::uint32_t first = 0;  // bits of the least float they disagree on
};

/// Floats with bits below `end` on which ours(x) != theirs(x).
template <class Ours, class Theirs>
Disagreement compare(Ours ours, Theirs theirs, std::uint64_t stride = kStride, std::uint64_t end = kAllFloats) {
  constexpr std::uint64_t kPiece = std::uint64_t{1} << 22;
  std::atomic<std::uint64_t> next{0}, count{0}, first{kAllFloats};
  const auto work = [&] {
    for (std::uint64_t begin; (begin = next.fetch_add(kPiece)) < end;) {
      std::uint64_t differing = 0, least = kAllFloats;
      for (std::uint64_t u = (begin + stride - 1) / stride * stride; u < std::min(begin + kPiece, end); u += stride) {
        const float x = float_of(static_cast<std::uint32_t>(u));
        if (static_cast<std::uint8_t>(ours(x)) == static_cast<std::uint8_t>(theirs(x))) continue;
        ++differing;
        least = std::min(least, u);
      }
      count += differing;
      for (std::uint64_t seen = first; least < seen && !first.compare_exchange_weak(seen, least);) {
      }
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  return {count, static_cast<std::uint32_t>(first)};
}

void expect_agreement(const Disagreement& found) {
  EXPECT_EQ(found.count, 0u) << "first at bits 0x" << std::hex << found.first << ", value " << float_of(found.first);
}

TEST(Toolkit, E4M3) {
  expect_agreement(compare([](float x) { return encode<kE4M3>(x); },
                           [](float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }));
}
TEST(Toolkit, E5M2) {
  expect_agreement(compare([](float x) { return encode<kE5M2>(x); },
                           [](float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2); }));
}
TEST(Toolkit, E2M1) {
  expect_agreement(compare([](float x) { return encode<kE2M1>(x); },
                           [](float x) { return __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest); }));
}
TEST(Toolkit, E3M2) {
  expect_agreement(compare([](float x) { return encode<kE3M2>(x); },
                           [](float x) { return __nv_cvt_float_to_fp6(x, __NV_E3M2, cudaRoundNearest); }, kStrideOfSix));
}
TEST(Toolkit, E2M3) {
  expect_agreement(compare([](float x) { return encode<kE2M3>(x); },
                           [](float x) { return __nv_cvt_float_to_fp6(x, __NV_E2M3, cudaRoundNearest); }, kStrideOfSix));
}

/// UE8M0 of a magnitude, rounded down, is the floor rule with a largest value of 2^0 in place of 2^8: exponents 8 apart.
TEST(Toolkit, Ue8m0RoundedDownIsTheFloorRule) {
  expect_agreement(compare([](float x) { return encode_ue8m0(floor_exponent<kE4M3>(x)); },
                           [](float x) { return max_of(__nv_cvt_float_to_e8m0(x, __NV_SATFINITE, cudaRoundZero) - 8, 0); }, kStride,
                           0x7f800000u));
}

/// Rounded up it is the ceil rule for a largest value of 2^0; E4M3's is 1.75 * 2^8. Multiples of 8 units have an exact 1.75-fold.
TEST(Toolkit, Ue8m0RoundedUpIsTheCeilRule) {
  const auto eighth = [](float x) { return float_of(bits_of(x) << 3); };  // all of 0 ... 2^127
  expect_agreement(
      compare([&](float x) { return encode_ue8m0(ceil_exponent<kE4M3>(mul(1.75f, eighth(x)))); },
              [&](float x) { return max_of(__nv_cvt_float_to_e8m0(eighth(x), __NV_SATFINITE, cudaRoundPosInf) - 8, 0); }, kStride,
              0x7f000000u >> 3));
}

TEST(Toolkit, DecodesEveryCodeAlike) {
  for (unsigned code = 0; code < 256; ++code) {
    const auto byte = static_cast<__nv_fp8_storage_t>(code);
    const auto same = [&](float ours, const __half_raw& theirs) {
      const float value = decode_f16(theirs.x);
      EXPECT_TRUE(is_nan(ours) ? is_nan(value) : bits_of(ours) == bits_of(value))
          << "code " << code << ": " << ours << " and " << value;
    };
    same(decode<kE4M3>(code), __nv_cvt_fp8_to_halfraw(byte, __NV_E4M3));
    same(decode<kE5M2>(code), __nv_cvt_fp8_to_halfraw(byte, __NV_E5M2));
    if (code < 64) same(decode<kE3M2>(code), __nv_cvt_fp6_to_halfraw(byte, __NV_E3M2));
    if (code < 64) same(decode<kE2M3>(code), __nv_cvt_fp6_to_halfraw(byte, __NV_E2M3));
    if (code < 16) same(decode<kE2M1>(code), __nv_cvt_fp4_to_halfraw(byte, __NV_E2M1));
    if (code < 255) {
      EXPECT_EQ(pow2(decode_ue8m0(byte)), decode_bf16(__nv_cvt_e8m0_to_bf16raw(byte).x)) << code;
    }
  }
}

// Control: an encoder that rounds ties up instead of to even must be caught.
TEST(Toolkit, ControlTiesUpwardsAreCaught) {
  const auto ties_up = [](float x) {
    return encode<kE4M3>(float_of(bits_of(x) + ((bits_of(x) & 0xfffffu) == 0x80000u ? 1u : 0u)));
  };
  const Disagreement found = compare(
      ties_up, [](float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }, std::uint64_t{1} << 17);
  EXPECT_GT(found.count, 100u);
}

}  // namespace
}  // namespace flamia::numerics

#else

TEST(Toolkit, AllFloats) {
  GTEST_SKIP() << "the CUDA toolkit's headers (cuda_fp8.h) were not found; formats_test compares with a slow reference instead";
}

#endif
