// SPDX-License-Identifier: Apache-2.0
// 4-bit codes of P from its logarithm, without exp2 (inference; docs/numerics.md, section 13). With y = log2(P / scale), a block's scale from
// its greatest score alone (the maximum of 2^x is 2 to the maximum of x), and the code k of a value in the order of E2M1
// (0, .5, 1, 1.5, 2, 3, 4, 6), which above 1 has two codes a binade:
//
//   direct       k = floor(2 y) + 2 from 1 on, below it 1 from 0.5 on: the bits of the score read as a number, cut off
//   mitchell     k = floor(2 y + 0.371) + 2 from 0.75 on, by comparison below: the bits of the score, rounded where 1.25 and 1.75 lie (that
//                is at 0.322 and 0.807 of a binade; one constant can only mean both)
//   schraudolph  the code nearest to Schraudolph's line
#pragma once
#include "kernels/cpu/tile/rounding.hpp"

namespace flamia::cpu::FLAMIA_ISA {

namespace detail {

FLAMIA_FN float code_of_log(LogCodes kind, float y) {
  if (kind == LogCodes::schraudolph)
    return numerics::decode<numerics::kE2M1>(numerics::encode<numerics::kE2M1>(numerics::exp2_schraudolph(y)));
  const float low = y < -8.f ? -8.f : (y > 8.f ? 8.f : y);
  const bool direct = kind == LogCodes::direct;
  const float bits = numerics::fma(2.f, low, direct ? 2.f : 2.371f);
  auto k = static_cast<std::int32_t>(bits);  // from 1 (mitchell: 0.75) on
  k = k < 2 ? 2 : (k > 7 ? 7 : k);
  if (direct && y < 0.f) k = y >= -1.f ? 1 : 0;
  if (!direct && y < -0.415037512f) k = y > -2.f ? 1 : 0;  // below 0.75 and 0.25
  return numerics::decode<numerics::kE2M1>(static_cast<std::uint32_t>(k));
}

/// log2 of a value of E4M3, 0 for 0.
FLAMIA_FN float log2_of_e4m3(float x) {
  constexpr float kMantissa[8] = {0.f,          0.169925004f, 0.321928084f, 0.459431618f,
                                  0.584962487f, 0.70043969f,  0.807354927f, 0.906890571f};
  const std::uint32_t bits = numerics::bits_of(x);
  return x > 0.f ? static_cast<float>(static_cast<int>(bits >> 23) - 127) + kMantissa[bits >> 20 & 7u] : 0.f;
}

/// Greatest x of each block of keys, -inf where there is none, into `greatest`; of each line of the tile into `lines`.
static void greatest_logs(const Payload& form, const float* x, const TileShape& t, float* greatest, float* lines) {
  for (int j = 0; j < t.keys; ++j) {
    float* line = lines + j / form.line * kTile;
    if (j % form.line == 0)
      for (int i = 0; i < t.width; ++i) line[i] = -numerics::infinity();
    float* block = greatest + j / form.columns * kTile;
    if (j % form.columns == 0)
      for (int i = 0; i < t.width; ++i) block[i] = -numerics::infinity();
    for (int i = 0; i < t.width; ++i) {
      const float now = x[j * kTile + i];
      block[i] = now > block[i] ? now : block[i];
      line[i] = now > line[i] ? now : line[i];
    }
  }
}

}  // namespace detail

/// value[key][query] from x = log2 P, -inf for masked pairs, in blocks of 1 x n; NaN stays. `equal`: counts codes equal to those of exp2.
static OuterFactors round_log_blocks(const Settings& s, const float* x, float* value, const TileShape& t, const Buffers& b,
                                     ProbeCounts* counts) {
  const Payload& form = s.p_first;
  TileRows& rows = *b.rows;
  alignas(64) float lines[kTile / Payload::kLeastLine * kTile], scale[kTile], log_scale[kTile];
  float* const greatest = reinterpret_cast<float*>(b.magnitudes);
  detail::greatest_logs(form, x, t, greatest, lines);
  const bool exponents = form.scale == ScaleType::ue8m0;
  const bool outer = !exponents && (form.two_level || form.first_level != 1.f);
  for (int first = 0; first < t.keys; first += form.line) {
    float *line = lines + first / form.line * kTile, *factor = b.factors + first / form.line * kTile;
    for (int i = 0; i < t.width; ++i) {
      const float top = numerics::exp2_reference(line[i]);
      factor[i] = !form.two_level ? form.first_level : top > 0.f ? top / 2688.f : 1.f;
      line[i] = !form.two_level ? form.first_level_log2 : top > 0.f ? numerics::add(line[i], -11.3923174f) : 0.f;  // log2 of it
    }
  }
  for (int j = 0; j < t.keys; ++j) {
    if (j % form.columns == 0)
      for (int i = 0; i < t.width; ++i) {
        const float amax = numerics::exp2_reference(greatest[j / form.columns * kTile + i]);
        if (exponents) {
          const int e = payload_exponent(form, numerics::bits_of(amax));
          scale[i] = numerics::pow2(e), log_scale[i] = static_cast<float>(e);
        } else {
          scale[i] = numerics::round_e4m3(amax / numerics::mul(6.f, b.factors[j / form.line * kTile + i]));
          log_scale[i] = numerics::add(detail::log2_of_e4m3(scale[i]), lines[j / form.line * kTile + i]);
        }
      }
    const float* in = x + j * kTile;
    float* out = value + j * kTile;
    for (int i = 0; i < t.width; ++i) {
      const float y = numerics::add(in[i], -log_scale[i]);
      const float code = scale[i] == 0.f ? 0.f : detail::code_of_log(s.log_codes, y);
      out[i] = numerics::is_nan(in[i]) ? in[i] : numerics::mul(code, scale[i]);
    }
    for (int i = rows.first[j]; counts && i < rows.last[j]; ++i) {
      const float y = numerics::exp2_reference(numerics::add(in[i], -log_scale[i]));
      const float exact = scale[i] == 0.f ? 0.f : numerics::decode<numerics::kE2M1>(numerics::encode<numerics::kE2M1>(y));
      ++counts->p_compared;
      counts->p_equal += out[i] == numerics::mul(exact, scale[i]);
      ++counts->pairs;
      counts->p_zero += out[i] == 0.f && in[i] > -126.f;
    }
  }
  return outer ? OuterFactors{b.factors, form.line} : OuterFactors{};
}

}  // namespace flamia::cpu::FLAMIA_ISA
