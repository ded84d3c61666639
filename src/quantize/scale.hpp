// SPDX-License-Identifier: Apache-2.0
// One group's scale as it is stored: from its greatest magnitude, and back to the factor that elements are encoded with.
#pragma once
#include <cstdint>
#include <cstring>

#include "flamia/recipe.hpp"
#include "numerics/exponent.hpp"
#include "numerics/format.hpp"

namespace flamia::quantize {

inline constexpr std::uint32_t kNonFinite = 0x7f800000u;  // magnitudes from here on are infinity and NaN
inline constexpr std::uint32_t kFlaggedF32 = 0x7fc00000u;
inline constexpr std::uint8_t kFlaggedE4M3 = 0x7f;

/// Largest magnitude of an element type.
constexpr float largest_of(Element element) {
  switch (element) {
    case Element::e4m3:
      return 448.f;
    case Element::e5m2:
      return 57344.f;
    case Element::e2m1:
      return 6.f;
    case Element::int8:
      return 127.f;
    case Element::bf16:
      break;
  }
  return 0.f;
}

template <numerics::MiniFloat F>
int exponent_by_rule(ScaleRule rule, float amax) {
  return rule == ScaleRule::floor ? numerics::floor_exponent<F>(amax) : numerics::ceil_exponent<F>(amax);
}

/// Exponent of a group by the rules ceil and floor. amax finite.
inline int group_exponent(const Quantisation& form, float amax) {
  switch (form.element) {
    case Element::e5m2:
      return exponent_by_rule<numerics::kE5M2>(form.rule, amax);
    case Element::e2m1:
      return exponent_by_rule<numerics::kE2M1>(form.rule, amax);
    default:
      return exponent_by_rule<numerics::kE4M3>(form.rule, amax);
  }
}

/// Stored scale (bits; one byte or an FP32 number) of a group whose greatest magnitude has the bits `magnitude`.
inline std::uint32_t stored_scale(const Quantisation& form, std::uint32_t magnitude) {
  const bool flagged = magnitude >= kNonFinite;
  const float amax = numerics::float_of(magnitude);
  switch (form.scale) {
    case ScaleType::ue8m0:
      return flagged ? numerics::kFlagged : numerics::encode_ue8m0(group_exponent(form, amax));
    case ScaleType::e4m3:
      return flagged ? kFlaggedE4M3 : numerics::nvfp4_scale(amax, largest_of(form.element), form.tensor_scale);
    case ScaleType::f32:
      return flagged ? kFlaggedF32 : numerics::bits_of(amax / largest_of(form.element));
    case ScaleType::none:
      break;
  }
  return 0;
}

/// The first of two levels: puts the greatest scale of the second at 448. It stops at 2^-100, so that no product with a scale, which is a
/// divisor, is subnormal or 0; what is so much smaller gets code 0.
FLAMIA_FN float first_level(float amax, float largest) {
  const float first = amax / numerics::mul(448.f, largest);
  return amax == 0.f ? 1.f : first < 0x1p-100f ? 0x1p-100f : first;
}

constexpr std::uint32_t flagged_scale(ScaleType type) {
  return type == ScaleType::ue8m0 ? numerics::kFlagged : type == ScaleType::e4m3 ? kFlaggedE4M3 : kFlaggedF32;
}

/// Value of a stored scale: 1 code stands for this much. NaN if flagged.
inline float scale_value(const Quantisation& form, std::uint32_t stored) {
  if (form.scale == ScaleType::none) return 1.f;
  if (stored == flagged_scale(form.scale)) return numerics::quiet_nan();
  switch (form.scale) {
    case ScaleType::ue8m0:
      return numerics::pow2(numerics::decode_ue8m0(static_cast<std::uint8_t>(stored)));
    case ScaleType::e4m3:
      return numerics::mul(numerics::decode<numerics::kE4M3>(stored), form.tensor_scale);
    default:
      return numerics::float_of(stored);
  }
}

/// The i-th stored scale of a buffer (F32 little endian, else one byte).
inline std::uint32_t read_scale(ScaleType type, const std::uint8_t* scales, std::int64_t i) {
  if (type != ScaleType::f32) return scales[i];
  std::uint32_t bits;
  std::memcpy(&bits, scales + 4 * i, 4);
  return bits;
}

inline void write_scale(ScaleType type, std::uint8_t* scales, std::int64_t i, std::uint32_t stored) {
  if (type == ScaleType::f32)
    std::memcpy(scales + 4 * i, &stored, 4);
  else
    scales[i] = static_cast<std::uint8_t>(stored);
}

}  // namespace flamia::quantize
