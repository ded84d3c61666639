// SPDX-License-Identifier: Apache-2.0
// What both passes over the gradient share: a tile's rows, its P and its dS (numerics.md §8), and dS's two payloads.
#pragma once
#include "kernels/cpu/dense.hpp"
#include "kernels/cpu/tile/accumulate.hpp"
#include "kernels/cpu/tile/rounding.hpp"
#include "kernels/cpu/tile/smoothing.hpp"
#include "numerics/softmax.hpp"

namespace flamia::cpu::FLAMIA_ISA {

/// Codes to codes times scale in BF16; their exponents become 0.
static void widen(int rows, int dim, float* values, int* exponents) {
  for (int r = 0; r < rows; ++r) {
    float* row = values + r * dim;
    for (int c = 0; c < dim; ++c) row[c] = numerics::round_bf16_finite(times_pow2(row[c], exponents[r]));
    exponents[r] = 0;
  }
}

/// Q and dO' of a query tile: transposed for S and dP; b.q and b.g hold the forms of dK and dV if `second`.
static void load_queries(const BackwardCall& call, const Document& document, int head, const TileShape& t, bool second,
                         const Buffers& b) {
  const Settings& s = *call.settings;
  TileRows& rows = *b.rows;
  rows.q_factor = load_values(call.q, document, head, t.q0, t.queries, b.q, rows.q_exponent, rows.q_scale, rows.q_flagged);
  transpose(b.q, t.queries, t.width, s.head_dim, b.q_t);
  rows.g_factor = load_values(call.d_o, document, head, t.q0, t.queries, b.g, rows.g_exponent, rows.g_scale, rows.g_flagged);
  transpose(b.g, t.queries, t.width, s.head_dim, b.g_t);
  for (int i = 0; i < t.queries; ++i) {
    rows.q_flagged[i] |= rows.g_flagged[i];
    rows.q2_exponent[i] = rows.q_exponent[i];
    rows.g2_exponent[i] = rows.g_exponent[i];
  }
  rows.q2_factor = rows.q_factor;
  rows.g2_factor = rows.g_factor;
  for (int i = 0; i < t.width; ++i) {
    rows.q2_scale[i] = rows.q_scale[i];
    rows.g2_scale[i] = rows.g_scale[i];
  }
  if (second && call.q_second.codes != call.q.codes) {
    rows.q2_factor =
        load_values(call.q_second, document, head, t.q0, t.queries, b.q, rows.q2_exponent, rows.q2_scale, rows.other_flagged);
    for (int i = 0; i < t.queries; ++i) rows.q_flagged[i] |= rows.other_flagged[i];
  }
  if (second && s.widen_q) widen(t.queries, s.head_dim, b.q, rows.q2_exponent);
  if (second && call.d_o_second.codes != call.d_o.codes) {
    rows.g2_factor =
        load_values(call.d_o_second, document, head, t.q0, t.queries, b.g, rows.g2_exponent, rows.g2_scale, rows.g_flagged);
    for (int i = 0; i < t.queries; ++i) rows.q_flagged[i] |= rows.g_flagged[i];
  }
  for (int i = t.queries; i < t.width; ++i) rows.q_exponent[i] = rows.q2_exponent[i] = rows.g_exponent[i] = rows.g2_exponent[i] = 0;
  for (int i = 0; i < t.width; ++i) {
    const std::int64_t at = head * s.tokens + document.start + t.q0 + i;
    const bool inside = i < t.queries && call.l[at] != 0.f;  // l = 0: the row sees no key
    rows.m[i] = inside ? call.m[at] : 0.f;
    rows.d[i] = inside ? call.d[at] : 0.f;
    if (inside && s.classical)
      rows.m[i] = numerics::add(rows.m[i], static_cast<float>(__builtin_log2(static_cast<double>(call.l[at]))));
  }
}

/// K and V of a key tile. The form of K in dQ goes to b.k2 if `second`; returns where its values lie (b.k if it is the same form).
static const float* load_keys(const BackwardCall& call, const Document& document, int key_head, const TileShape& t, bool second,
                              const Buffers& b) {
  const Settings& s = *call.settings;
  TileRows& rows = *b.rows;
  rows.k_factor = load_values(call.k, document, key_head, t.k0, t.keys, b.k, rows.k_exponent, rows.k_scale, rows.k_flagged);
  const Operand& v = t.right_cut && call.v_diagonal.present() ? call.v_diagonal : call.v;
  rows.v_factor = load_values(v, document, key_head, t.k0, t.keys, b.v, rows.v_exponent, rows.v_scale, rows.v_flagged);
  const Operand& k2 = t.right_cut && call.k_diagonal.present() ? call.k_diagonal : call.k_second;
  if (!second || (k2.codes == call.k.codes && !s.widen_k)) {
    rows.k2_factor = rows.k_factor;
    for (int j = 0; j < t.keys; ++j) {
      rows.k2_exponent[j] = rows.k_exponent[j];
      rows.k2_scale[j] = rows.k_scale[j];
    }
    return b.k;
  }
  rows.k2_factor = load_values(k2, document, key_head, t.k0, t.keys, b.k2, rows.k2_exponent, rows.k2_scale, rows.other_flagged);
  for (int j = 0; j < t.keys; ++j) rows.k_flagged[j] |= rows.other_flagged[j];
  if (s.widen_k) widen(t.keys, s.head_dim, b.k2, rows.k2_exponent);
  return b.k2;
}

namespace detail {

/// b.scores = y and b.ds = the product of the codes of dO' and V.
static void scores_and_d_p(const BackwardCall& call, const Document& document, int head, const TileShape& t, const Buffers& b) {
  const Settings& s = *call.settings;
  TileRows& rows = *b.rows;
  row_factors(s, t.queries, t.width, rows);
  scores(s, t, rows, b.k, b.q_t, b.scores);
  if (s.smooth_q) add_mean_scores_of_codes(s, call.q_means, document, head, t, b);
  product(s.accumulator, {b.v, s.head_dim, 1}, {b.g_t, kTile}, b.ds, kTile, t.keys, t.width, s.head_dim);
}

/// rows.lane = the P of dS for key j.
static void p_of_ds(const Settings& s, int j, const TileShape& t, const Buffers& b) {
  TileRows& rows = *b.rows;
  const float exponent = s.gradient_of_codes ? static_cast<float>(s.code_exponent) : 0.f;
  const float unit = numerics::pow2(-s.code_exponent);
  probabilities(s, j, b.scores + j * kTile, rows.rho, rows.m, exponent, t.width, rows.lane);
  if (!s.gradient_of_codes) return;
  round_lanes(s.p_first.element, rows.lane, rows.lane, t.width);
  for (int i = 0; i < t.width; ++i) rows.lane[i] = numerics::mul(rows.lane[i], unit);
}

/// dP' of key j is fl(product * first) * second.
struct KeyFactors {
  float first, second;
};
static KeyFactors v_factors(const TileRows& rows, int j) {
  const int e = rows.v_exponent[j];
  return {numerics::mul(numerics::mul(numerics::pow2(e >> 1), rows.v_factor), rows.v_scale[j]), numerics::pow2(e - (e >> 1))};
}

}  // namespace detail

/// b.scores = y and b.ds = P (dP' - D') in units of dO's exponent and factor of the token; 0 for masked pairs, NaN for flagged ones.
static void gradient_of_scores(const BackwardCall& call, const Document& document, int head, const TileShape& t, const Buffers& b) {
  const Settings& s = *call.settings;
  TileRows& rows = *b.rows;
  detail::scores_and_d_p(call, document, head, t, b);
  for (int j = 0; j < t.keys; ++j) {
    detail::p_of_ds(s, j, t, b);
    const auto [f0, f1] = detail::v_factors(rows, j);
    float* ds = b.ds + j * kTile;
    for (int i = 0; i < t.width; ++i) ds[i] = numerics::mul(rows.lane[i], numerics::fma(numerics::mul(ds[i], f0), f1, -rows.d[i]));
    mask_lanes(ds, rows.first[j], rows.last[j], t.width);
  }
}

/// d[i] += the sum of P dP' and mass[i] += that of P over the tile's keys that row i sees, with the numbers that dS takes.
static void add_row_sums(const BackwardCall& call, const Document& document, int head, const TileShape& t, const Buffers& b,
                         float* d, float* mass) {
  TileRows& rows = *b.rows;
  detail::scores_and_d_p(call, document, head, t, b);
  alignas(64) float d_of_tile[kTile] = {}, mass_of_tile[kTile] = {};
  for (int j = 0; j < t.keys; ++j) {
    detail::p_of_ds(*call.settings, j, t, b);
    const auto [f0, f1] = detail::v_factors(rows, j);
    const float* d_p = b.ds + j * kTile;
    for (int i = rows.first[j]; i < rows.last[j]; ++i) {
      d_of_tile[i] = numerics::fma(rows.lane[i], numerics::mul(numerics::mul(d_p[i], f0), f1), d_of_tile[i]);
      mass_of_tile[i] = numerics::add(mass_of_tile[i], rows.lane[i]);
    }
  }
  for (int i = 0; i < t.width; ++i) {
    d[i] = numerics::add(d[i], d_of_tile[i]);
    mass[i] = numerics::add(mass[i], mass_of_tile[i]);
  }
}

/// A product of dS: dQ contracts over keys with K, dK over queries with Q.
enum class DsUse { d_q, d_k };

namespace detail {

struct DsExponents {
  bool of_row, of_query, of_key;  // which exponents dS is multiplied with before rounding: dO's, Q's, K's
  int constant;
};

/// With two payloads the partner's exponent is folded in before rounding, so it is part of what the exponent covers (numerics.md §8).
static DsExponents exponents_before(const Payload& form, bool one_payload, DsUse use) {
  const bool whole_tile = form.rows == kTile && form.columns == kTile;
  switch (form.kind) {
    case Payload::Kind::constant:
      return {true, false, false, 8};
    case Payload::Kind::tensor:
    case Payload::Kind::plain:  // the partner's scale is in its values
      return {true, false, false, 0};
    case Payload::Kind::blocks:
      if (one_payload) return {true, whole_tile, whole_tile, 0};
      break;
  }
  return {true, use == DsUse::d_k, use == DsUse::d_q, 0};
}

/// |dS| in the units of the call's tensors, short of the softmax scale.
FLAMIA_FN double mass(const TileRows& rows, int i, float ds) {
  return static_cast<double>(times_pow2(numerics::abs_of(ds), rows.g_exponent[i])) * static_cast<double>(rows.g_scale[i]) *
         static_cast<double>(rows.g_factor);
}

/// `before`: what was rounded, in units of the code; null where scales follow from the maximum and nothing saturates.
static void count_payload(const Payload& form, const TileRows& rows, const float* ds, const float* before, const float* code,
                          int first, int last, PayloadCounts* counts) {
  for (int i = first; i < last; ++i) {
    counts->saturated += before && saturates(form.element, before[i]);
    if (ds[i] == 0.f || code[i] != 0.f) continue;
    ++counts->zero;
    counts->lost += mass(rows, i, ds[i]);
  }
}

}  // namespace detail

/// The payload of dS for one product into b.payload. Exponents that are constant along the contraction stay outside and are returned:
/// per query in rows.reference for dQ, by the table for dK; others are multiplied into the values.
struct DsPayload {
  BlockExponents outer;  // valid if `has_outer`
  bool has_outer;
  int minus_partner;     // 1: the outer exponent of a row of the output is less by that row's own exponent (one payload a tile)
  OuterFactors factors;  // of E4M3 and FP32 scales
};

static DsPayload make_payload(const BackwardCall& call, const Payload& form, DsUse use, const TileShape& t, const Buffers& b,
                              PayloadCounts* counts) {
  const Settings& s = *call.settings;
  TileRows& rows = *b.rows;
  const bool one = s.one_ds_payload, blocks = form.kind == Payload::Kind::blocks;
  const detail::DsExponents before = detail::exponents_before(form, one, use);
  alignas(64) int lane_exponent[kTile], lane_partner[kTile];
  for (int i = 0; i < t.width; ++i) {
    lane_exponent[i] = rows.g_exponent[i] + (before.of_query ? rows.q2_exponent[i] : 0) + before.constant;
    lane_partner[i] = use == DsUse::d_k ? rows.q2_exponent[i] : 0;
  }
  for (int j = 0; j < t.keys; ++j) {
    const int key = before.of_key ? rows.k2_exponent[j] : 0;
    const float* ds = b.ds + j * kTile;
    float* z = b.p + j * kTile;
    for (int i = 0; i < t.width; ++i) z[i] = numerics::mul(times_pow2(ds[i], lane_exponent[i] + key), rows.g_scale[i]);
  }
  if (blocks && form.scale != ScaleType::ue8m0) {
    const OuterFactors factors = round_blocks(form, b.p, b.payload, t, b);
    for (int j = 0; counts && j < t.keys; ++j)
      detail::count_payload(form, rows, b.ds + j * kTile, nullptr, b.payload + j * kTile, rows.first[j], rows.last[j], counts);
    return {{}, false, 0, factors};
  }
  BlockExponents exponents{};
  if (blocks) exponents = block_exponents(form, b.p, t, use == DsUse::d_k && !one ? s.reach.right : -1, b);
  const bool whole_tile = form.rows == kTile && form.columns == kTile;
  const bool outer = blocks && (one ? whole_tile : use == DsUse::d_q ? form.columns == kTile : form.rows >= 64);
  const bool partner_after = !(form.kind == Payload::Kind::plain || (blocks && (!one || whole_tile)));
  for (int j = 0; j < t.keys; ++j) {
    const float* z = b.p + j * kTile;
    float* out = b.payload + j * kTile;
    const int* e = blocks ? exponents.row(j) : nullptr;
    if (blocks)
      for (int i = 0; i < t.width; ++i) rows.lane[i] = numerics::mul(z[i], numerics::pow2(-e[i]));
    else
      for (int i = 0; i < t.width; ++i) rows.lane[i] = z[i] / call.ds_scale;
    round_lanes(form.element, rows.lane, out, t.width);
    if (counts) detail::count_payload(form, rows, b.ds + j * kTile, rows.lane, out, rows.first[j], rows.last[j], counts);
    if (outer || form.kind == Payload::Kind::plain) continue;
    const int partner = (partner_after && use == DsUse::d_q ? rows.k2_exponent[j] : 0) - before.constant;
    for (int i = 0; i < t.width; ++i)
      out[i] = times_pow2(out[i], (blocks ? e[i] : 0) + partner + (partner_after ? lane_partner[i] : 0));
  }
  return {exponents, outer, one && whole_tile ? 1 : 0, {}};
}

/// Sum of |dS| and how many are not 0.
static void count_gradients(const TileShape& t, const TileRows& rows, const float* ds, ProbeCounts* counts) {
  for (int j = 0; j < t.keys; ++j)
    for (int i = rows.first[j]; i < rows.last[j]; ++i) {
      const float x = ds[j * kTile + i];
      if (x == 0.f) continue;
      ++counts->ds_pairs;
      counts->ds_mass += detail::mass(rows, i, x);
    }
}

}  // namespace flamia::cpu::FLAMIA_ISA
