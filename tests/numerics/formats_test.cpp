// SPDX-License-Identifier: Apache-2.0
// Small formats against a slow reference that searches the table of all values in double precision and shares no code with encode().
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "numerics/format.hpp"

namespace flamia::numerics {
namespace {

/// Value of a code from the definition of the format, in double precision.
double value_by_definition(const MiniFloat& f, std::uint32_t code) {
  const int exponent = static_cast<int>(code >> f.mantissa_bits) & ((1 << f.exponent_bits) - 1);
  const int mantissa = static_cast<int>(code & ((1u << f.mantissa_bits) - 1u));
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - f.bias - f.mantissa_bits)
                                         : std::ldexp((1 << f.mantissa_bits) + mantissa, exponent - f.bias - f.mantissa_bits);
  return code & f.sign_bit() ? -magnitude : magnitude;
}

/// Nearest magnitude among the codes 0 ... largest, ties to the even code; saturates.
std::uint32_t slow_encode(const MiniFloat& f, float x) {
  if (std::isnan(x)) return f.has_nan ? f.sign_bit() - 1 : f.largest;
  // beyond twice the largest value the distances of all codes would round to the same double
  const double magnitude = std::min(std::fabs(static_cast<double>(x)), 2.0 * value_by_definition(f, f.largest));
  std::uint32_t best = 0;
  for (std::uint32_t code = 1; code <= f.largest; ++code) {
    const double best_distance = std::fabs(value_by_definition(f, best) - magnitude),
                 distance = std::fabs(value_by_definition(f, code) - magnitude);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(x) ? f.sign_bit() : 0u);
}

template <MiniFloat F>
struct Format {
  static constexpr MiniFloat kFormat = F;
};

template <class F>
class Formats : public testing::Test {};
using AllFormats = testing::Types<Format<kE4M3>, Format<kE5M2>, Format<kE3M2>, Format<kE2M3>, Format<kE2M1>>;
TYPED_TEST_SUITE(Formats, AllFormats);

TYPED_TEST(Formats, CodesHaveTheirValues) {
  static constexpr MiniFloat f = TypeParam::kFormat;
  for (std::uint32_t code = 0; code < 2u * f.sign_bit(); ++code) {
    if ((code & (f.sign_bit() - 1)) > f.largest) {
      EXPECT_FALSE(is_finite(decode<f>(code))) << code;
      continue;
    }
    EXPECT_EQ(decode<f>(code), value_by_definition(f, code)) << code;
    EXPECT_EQ(std::signbit(decode<f>(code)), (code & f.sign_bit()) != 0) << code;
  }
}

TYPED_TEST(Formats, EncodingADecodedCodeGivesTheCode) {
  static constexpr MiniFloat f = TypeParam::kFormat;
  for (std::uint32_t code = 0; code < 2u * f.sign_bit(); ++code)
    if ((code & (f.sign_bit() - 1)) <= f.largest) {
      EXPECT_EQ(encode<f>(decode<f>(code)), code);
    }
}

TYPED_TEST(Formats, NeighboursOfCodesAndMidpointsRoundAsTheReference) {
  static constexpr MiniFloat f = TypeParam::kFormat;
  for (std::uint32_t code = 0; code < f.largest; ++code) {
    const float low = decode<f>(code), high = decode<f>(code + 1);
    for (const float centre : {low, (low + high) / 2, high})  // midpoints are exact in FP32
      for (const float x : {std::nextafter(centre, -1e30f), centre, std::nextafter(centre, 1e30f)})
        for (const float signed_x : {x, -x}) EXPECT_EQ(encode<f>(signed_x), slow_encode(f, signed_x)) << signed_x;
  }
}

TYPED_TEST(Formats, RandomFloatsRoundAsTheReference) {
  static constexpr MiniFloat f = TypeParam::kFormat;
  std::mt19937 bits(7);
  std::uniform_real_distribution<float> near(-2.f * decode<f>(f.largest), 2.f * decode<f>(f.largest));
  for (int i = 0; i < 20000; ++i)
    for (const float x : {float_of(static_cast<std::uint32_t>(bits())), near(bits)})
      EXPECT_EQ(encode<f>(x), slow_encode(f, x)) << x;
}

TYPED_TEST(Formats, InfinityNanAndTheEdgeOfSaturation) {
  static constexpr MiniFloat f = TypeParam::kFormat;
  const float largest = decode<f>(f.largest), inf = std::numeric_limits<float>::infinity(),
              nan = std::numeric_limits<float>::quiet_NaN();
  for (const float x : {inf, largest, std::nextafter(largest, inf), largest * 1.5f, std::numeric_limits<float>::max()}) {
    EXPECT_EQ(encode<f>(x), f.largest) << x;
    EXPECT_EQ(encode<f>(-x), f.largest | f.sign_bit()) << x;
  }
  for (const float x : {nan, -nan, float_of(0x7f800001u), float_of(0xff800001u)})
    EXPECT_EQ(encode<f>(x), f.has_nan ? f.sign_bit() - 1 : f.largest);
  EXPECT_EQ(encode<f>(0.f), 0u);
  EXPECT_EQ(encode<f>(-0.f), f.sign_bit());
}

// Control: truncation instead of rounding must disagree with the reference.
TYPED_TEST(Formats, ControlTruncationIsCaught) {
  static constexpr MiniFloat f = TypeParam::kFormat;
  int caught = 0;
  for (std::uint32_t code = 0; code < f.largest; ++code) {
    const float x = decode<f>(code) * 0.25f + decode<f>(code + 1) * 0.75f;
    caught += slow_encode(f, x) != code;
  }
  EXPECT_EQ(caught, static_cast<int>(f.largest));
}

TEST(Int8, RoundsToNearestEvenAndSaturatesSymmetrically) {
  for (int q = -2600; q <= 2600; ++q) {  // twentieths, halves among them
    const float x = static_cast<float>(q) / 20.f;
    const double nearest = std::nearbyint(static_cast<double>(x));
    EXPECT_EQ(encode_int8(x), static_cast<int>(std::max(-127.0, std::min(127.0, nearest)))) << x;
  }
  for (int code = -127; code <= 127; ++code) EXPECT_EQ(encode_int8(decode_int8(static_cast<std::int8_t>(code))), code);
  EXPECT_EQ(encode_int8(std::numeric_limits<float>::infinity()), 127);
  EXPECT_EQ(encode_int8(-std::numeric_limits<float>::infinity()), -127);
  EXPECT_EQ(encode_int8(std::numeric_limits<float>::quiet_NaN()), 0);
}

// ---- 16 bits ----

TEST(Bf16, EveryCodeComesBack) {
  for (std::uint32_t code = 0; code < 65536; ++code) {
    const float x = decode_bf16(static_cast<std::uint16_t>(code));
    EXPECT_EQ(bits_of(x), code << 16);
    EXPECT_EQ(encode_bf16(x), std::isnan(x) ? (code | 0x40u) : code);
  }
}

TEST(Bf16, MidpointsAndTheirNeighbours) {
  for (std::uint32_t code = 0; code < 0x7f80u; ++code) {
    const std::uint32_t middle = code << 16 | 0x8000u;
    EXPECT_EQ(encode_bf16(float_of(middle - 1)), code);
    EXPECT_EQ(encode_bf16(float_of(middle)), code + code % 2);
    EXPECT_EQ(encode_bf16(float_of(middle + 1)), code + 1);  // beyond the last: infinity
    EXPECT_EQ(encode_bf16(float_of(middle | 0x80000000u)), (code + code % 2) | 0x8000u);
  }
}

TEST(F16, EveryCodeComesBackAndHasItsValue) {
  for (std::uint32_t code = 0; code < 65536; ++code) {
    const float x = decode_f16(static_cast<std::uint16_t>(code));
    const std::uint32_t exponent = code >> 10 & 31u, mantissa = code & 1023u;
    if (exponent < 31) {
      const double magnitude =
          exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, static_cast<int>(exponent) - 25);
      EXPECT_EQ(x, code & 0x8000u ? -magnitude : magnitude);
      EXPECT_EQ(encode_f16(x), code);
    } else if (mantissa == 0) {
      EXPECT_TRUE(std::isinf(x));
      EXPECT_EQ(encode_f16(x), code);
    } else {
      EXPECT_TRUE(std::isnan(x) && std::isnan(decode_f16(encode_f16(x))));
    }
  }
}

#if defined(__FLT16_MAX__) && defined(__SSE2__)
template <class Next>
void compare_with_compiler(Next next, int count) {
  for (int i = 0; i < count; ++i) {
    const float x = next();
    const auto theirs = __builtin_bit_cast(std::uint16_t, static_cast<_Float16>(x));
    if (std::isnan(x))
      EXPECT_TRUE(std::isnan(decode_f16(encode_f16(x))));
    else
      EXPECT_EQ(encode_f16(x), theirs) << x;
  }
}

TEST(F16, AgreesWithTheCompiler) {
  std::mt19937 bits(11);
  std::uniform_real_distribution<float> small(-1e-4f, 1e-4f), large(-70000.f, 70000.f);
  compare_with_compiler([&] { return float_of(static_cast<std::uint32_t>(bits())); }, 200000);
  compare_with_compiler([&] { return small(bits); }, 200000);
  compare_with_compiler([&] { return large(bits); }, 200000);
  std::uint32_t code = 0;  // every midpoint between two codes, and its neighbours
  int step = 0;
  compare_with_compiler(
      [&] {
        const float low = decode_f16(static_cast<std::uint16_t>(code)),
                    high = code == 0x7bffu ? 65536.f : decode_f16(static_cast<std::uint16_t>(code + 1));
        const float x = float_of(bits_of((low + high) / 2) + static_cast<std::uint32_t>(step - 1));
        if (++step == 3) step = 0, ++code;
        return x;
      },
      3 * 0x7c00);
}
#endif

}  // namespace
}  // namespace flamia::numerics
