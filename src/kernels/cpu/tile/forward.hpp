// SPDX-License-Identifier: Apache-2.0
// The forward pass of one tile of 128 queries (numerics.md §8):
//
//   for key tiles that some query sees, highest first:
//     y  = K Qt * 2^eK            t = y * rho
//     m  moves by the row's own scores (reference.hpp)
//     P^ = code(exp2(t + B + eV - R - m)),  l <- l * 2^(m_old - m_new) + sum of code(exp2(t + B - m)) * 2^-B
//     A  <- A * 2^(m_old - m_new) + (P^ V^) * 2^R
//   O = A * 2^-B / l,  LSE = (m + log2 l) ln 2
#pragma once
#include "kernels/cpu/dense.hpp"
#include "kernels/cpu/tile/accumulate.hpp"
#include "kernels/cpu/tile/log_codes.hpp"
#include "kernels/cpu/tile/reference.hpp"
#include "kernels/cpu/tile/smoothing.hpp"

namespace flamia::cpu::FLAMIA_ISA {

namespace detail {

/// Counts what rounding x to code did, over lanes [first, last).
static void count_p(Element element, const float* x, const float* code, int first, int last, ProbeCounts* counts) {
  counts->pairs += last - first;
  for (int i = first; i < last; ++i) {
    counts->p_zero += x[i] != 0.f && code[i] == 0.f;
    counts->p_saturated += saturates(element, x[i]);
  }
}

/// Compares rows.code with the codes that exp2 itself gives for the logarithms in rows.lane.
static void count_equal(Element element, TileRows& rows, int first, int last, int width, ProbeCounts* counts) {
  for (int i = 0; i < width; ++i) rows.lane[i] = numerics::exp2_reference(rows.lane[i]);
  round_lanes(element, rows.lane, rows.lane, width);
  counts->p_compared += last - first;
  for (int i = first; i < last; ++i) counts->p_equal += rows.lane[i] == rows.code[i];
}

static void store_codes(const TileShape& t, const Document& document, std::int64_t tokens, int key, int first, int last,
                        const float* code, float* matrix) {
  for (int i = first; i < last; ++i) matrix[(document.start + t.q0 + i) * tokens + document.start + t.k0 + key] = code[i];
}

/// P with the constant factor 2^B (or BF16, B = 0) into p; the codes' sum into rows.sum.
static void constant_p(const ForwardCall& call, const Item& item, const TileShape& t, bool folded, const float* y, float* p,
                       TileRows& rows, ProbeCounts* counts, float* codes) {
  const Settings& s = *call.settings;
  const float b = static_cast<float>(s.code_exponent);
  alignas(64) float shift[kTile];
  for (int i = 0; i < t.width; ++i) {
    rows.sum[i] = 0.f;
    rows.fold[i] = numerics::add(b, -static_cast<float>(rows.reference[i]));
  }
  for (int j = 0; j < t.keys; ++j) {
    const int first = rows.first[j], last = rows.last[j];
    float* out = p + j * kTile;
    const float* scores_of_key = y + j * kTile;
    if (first == last) {
      for (int i = 0; i < t.width; ++i) out[i] = 0.f;
      continue;
    }
    probabilities(s, j, scores_of_key, rows.rho, rows.m, b, t.width, rows.lane);  // unfolded
    round_lanes(s.p_first.element, rows.lane, rows.code, t.width);
    if (codes) store_codes(t, item.document, s.tokens, j, first, last, rows.code, codes);
    const float* addend = rows.code;
    if (s.sum_unrounded) {
      if (s.code_exponent != 0) probabilities(s, j, scores_of_key, rows.rho, rows.m, 0.f, t.width, rows.lane);
      addend = rows.lane;
    }
    for (int i = 0; i < t.width; ++i) rows.sum[i] = numerics::add(rows.sum[i], (i >= first) & (i < last) ? addend[i] : 0.f);
    if (!folded) {
      for (int i = 0; i < t.width; ++i) out[i] = rows.code[i];
      if (counts) probabilities(s, j, scores_of_key, rows.rho, rows.m, b, t.width, rows.lane);
    } else {
      const float exponent = static_cast<float>(rows.v_exponent[j]);
      for (int i = 0; i < t.width; ++i) shift[i] = numerics::add(rows.fold[i], exponent);
      probabilities(s, j, scores_of_key, rows.rho, rows.m, static_cast<const float*>(shift), t.width, rows.lane);
      round_lanes(s.p_first.element, rows.lane, out, t.width);
    }
    if (counts) count_p(s.p_first.element, rows.lane, out, first, last, counts);
    if (counts && (s.exp2 == numerics::Exp2Kind::mitchell || s.exp2 == numerics::Exp2Kind::schraudolph)) {
      log_probabilities(scores_of_key, rows.rho, rows.m, b, t.width, rows.lane);
      count_equal(s.p_first.element, rows, first, last, t.width, counts);
    }
    mask_lanes(out, first, last, t.width);
  }
}

/// exp2(t + eV - R - m) of the visible pairs (the exponents only if folded), 0 elsewhere; its logarithm for codes made from that.
static void unrounded_p(const Settings& s, const TileShape& t, bool folded, const float* y, TileRows& rows, float* x) {
  alignas(64) float shift[kTile];
  for (int j = 0; j < t.keys; ++j) {
    for (int i = 0; i < t.width; ++i) shift[i] = folded ? static_cast<float>(rows.v_exponent[j] - rows.reference[i]) : 0.f;
    float* out = x + j * kTile;
    if (s.log_codes == LogCodes::none) {
      probabilities(s, j, y + j * kTile, rows.rho, rows.m, static_cast<const float*>(shift), t.width, out);
      mask_lanes(out, rows.first[j], rows.last[j], t.width);
      continue;
    }
    log_probabilities(y + j * kTile, rows.rho, rows.m, static_cast<const float*>(shift), t.width, out);
    for (int i = 0; i < t.width; ++i) out[i] = (i >= rows.first[j]) & (i < rows.last[j]) ? out[i] : -numerics::infinity();
  }
}

/// Rounds what unrounded_p() left in b.payload into b.p.
static OuterFactors round_p(const Settings& s, const TileShape& t, const Buffers& b, ProbeCounts* counts) {
  if (s.log_codes != LogCodes::none) return round_log_blocks(s, b.payload, b.p, t, b, counts);
  return round_blocks(s.p_first, b.payload, b.p, t, b);
}

static void count_blocks(const Payload& form, const TileShape& t, const Buffers& b, ProbeCounts* counts) {
  TileRows& rows = *b.rows;
  const bool exponents = form.scale == ScaleType::ue8m0;
  for (int j = 0; j < t.keys; ++j) {
    const float* x = b.payload + j * kTile;
    for (int i = 0; i < t.width; ++i)
      rows.lane[i] = exponents ? numerics::mul(x[i], numerics::pow2(-b.exponents[j / form.columns * kTile + i])) : x[i];
    if (exponents) count_p(form.element, rows.lane, b.p + j * kTile, rows.first[j], rows.last[j], counts);
    if (!exponents) count_p(Element::bf16, rows.lane, b.p + j * kTile, rows.first[j], rows.last[j], counts);  // cannot saturate
  }
}

/// P with scales of its own blocks along the keys; values into b.p, their sum into rows.sum, which never holds the fold.
static OuterFactors block_p(const ForwardCall& call, const Item& item, const TileShape& t, bool folded, const float* y,
                            const Buffers& b, ProbeCounts* counts, float* codes) {
  const Settings& s = *call.settings;
  TileRows& rows = *b.rows;
  unrounded_p(s, t, false, y, rows, b.payload);
  OuterFactors outer = round_p(s, t, b, counts);
  if (counts && s.log_codes == LogCodes::none) count_blocks(s.p_first, t, b, counts);
  if (s.sum_unrounded) {
    for (int x = 0; s.log_codes != LogCodes::none && x < t.keys * kTile; ++x) b.payload[x] = numerics::exp2_reference(b.payload[x]);
    sum_of_values(b.payload, {}, t, rows.lane, rows.sum);
  } else {
    sum_of_values(b.p, outer, t, rows.lane, rows.sum);
  }
  for (int j = 0; codes && j < t.keys; ++j) {
    for (int i = 0; i < t.width; ++i) rows.code[i] = numerics::mul(b.p[j * kTile + i], outer.at(j, i));
    store_codes(t, item.document, s.tokens, j, rows.first[j], rows.last[j], rows.code, codes);
  }
  if (!folded) return outer;
  unrounded_p(s, t, true, y, rows, b.payload);
  return round_p(s, t, b, nullptr);
}

/// constant_p, once more where tilesum rejects the codes of a row; what the first attempt counted is forgotten.
static void accepted_p(const ForwardCall& call, const Item& item, const TileShape& t, bool folded, const float* y, float* p,
                       TileRows& rows, ProbeCounts* counts, float* codes) {
  const ProbeCounts before = counts ? *counts : ProbeCounts{};
  constant_p(call, item, t, folded, y, p, rows, counts, codes);
  if (call.settings->reference != numerics::RowReference::tilesum || !reject_free_rows(t, rows)) return;
  if (counts) *counts = before;
  constant_p(call, item, t, folded, y, p, rows, counts, codes);
}

/// Earlier codes of a row follow its reference: code * 2^(m of that moment - m now).
static void rescale_codes(const TileShape& t, const Document& document, std::int64_t tokens, const float* correction,
                          float* matrix) {
  for (int i = 0; i < t.queries; ++i)
    if (correction[i] != 1.f && correction[i] != 0.f)
      for (std::int64_t j = t.k0 + t.keys; j < document.length; ++j) {
        float& code = matrix[(document.start + t.q0 + i) * tokens + document.start + j];
        code = numerics::mul(code, correction[i]);
      }
}

static void write_output(const ForwardCall& call, const Item& item, const TileShape& t, float v_factor, const Buffers& b) {
  const Settings& s = *call.settings;
  const TileRows& rows = *b.rows;
  const float unit = numerics::pow2(-s.code_exponent);
  for (int i = 0; i < t.queries; ++i) {
    const std::int64_t token = item.document.start + t.q0 + i, at = item.head * s.tokens + token;
    float* out = b.part;
    const bool blind = rows.fresh[i] != 0;
    // every code of a row that sees keys vanished: its scores left the range in which FP32 resolves differences of 1
    const float l = !blind && rows.l[i] == 0.f ? numerics::quiet_nan() : rows.l[i];
    for (int c = 0; c < s.head_dim; ++c)
      out[c] = blind ? 0.f : numerics::mul(numerics::mul(b.sum0[i * s.head_dim + c], unit) / l, v_factor);
    write_row(call.o, token, item.head, s.query_heads, s.head_dim, out);
    const auto log2_l = static_cast<float>(__builtin_log2(static_cast<double>(l)));
    float lse = blind ? numerics::infinity() : numerics::natural_lse(rows.m[i], log2_l);
    if (s.smooth_k && !blind) lse = numerics::add(lse, mean_key_score(call, item, t.q0 + i, b));
    call.lse[at] = numerics::is_nan(lse) ? numerics::quiet_nan() : lse;
    if (call.m) {
      call.m[at] = rows.m[i];
      call.l[at] = l;
    }
  }
}

}  // namespace detail

static void forward_tile(const ForwardCall& call, const Item& item, Scratch scratch, ProbeCounts* counts) {
  const Settings& s = *call.settings;
  const Document& document = item.document;
  const Buffers b = buffers_of(scratch, s.head_dim);
  TileRows& rows = *b.rows;
  const int key_head = item.head / (s.query_heads / s.key_heads);
  TileShape t = place_tile(s, document, item.tile, item.tile, rows);
  rows.q_factor = load_values(call.q, document, item.head, t.q0, t.queries, b.part, rows.q_exponent, rows.q_scale, rows.q_flagged);
  transpose(b.part, t.queries, t.width, s.head_dim, b.q_t);
  for (int i = 0; i < t.width; ++i) rows.m[i] = rows.l[i] = 0.f, rows.fresh[i] = rows.careful[i] = 1, rows.rise[i] = 0;
  for (int x = 0; x < t.queries * s.head_dim; ++x) b.sum0[x] = 0.f;
  float* codes = call.probe_codes ? call.probe_codes + item.head * s.tokens * s.tokens : nullptr;
  float v_factor = 1.f;
  const int interval = numerics::min_of(s.promote_keys, s.o_piece);

  const schedule::Interval tiles = key_tiles(s, document, item.tile);
  for (std::int64_t tile = tiles.end - 1; tile >= tiles.begin; --tile) {
    t = place_tile(s, document, item.tile, tile, rows);
    rows.k_factor = load_values(call.k, document, key_head, t.k0, t.keys, b.k, rows.k_exponent, rows.k_scale, rows.k_flagged);
    const Operand& v = t.right_cut && call.v_diagonal.present() ? call.v_diagonal : call.v;
    v_factor = load_values(v, document, key_head, t.k0, t.keys, b.v, rows.v_exponent, rows.v_scale, rows.v_flagged);
    row_factors(s, t.queries, t.width, rows);
    scores(s, t, rows, b.k, b.q_t, b.scores);
    if (s.smooth_q && s.q_mean_times_codes) add_mean_scores_of_codes(s, call.q_means, document, item.head, t, b);
    if (s.smooth_q && !s.q_mean_times_codes) add_mean_scores_of_keys(call, item, key_head, t, b);
    move_reference(s, t, b.scores, rows);
    const bool folded = fold_reference(s, t, rows);
    OuterFactors outer;
    if (s.p_first.kind == Payload::Kind::blocks)
      outer = detail::block_p(call, item, t, folded, b.scores, b, counts, codes);
    else
      detail::accepted_p(call, item, t, folded, b.scores, b.p, rows, counts, codes);
    if (codes) detail::rescale_codes(t, document, s.tokens, rows.correction, codes);
    const float unit = numerics::pow2(-s.code_exponent);
    for (int i = 0; i < t.width; ++i)
      if (rows.seen[i])
        rows.l[i] = numerics::add(numerics::mul(rows.l[i], rows.correction[i]),
                                  s.sum_unrounded ? rows.sum[i] : numerics::mul(rows.sum[i], unit));
    if (s.reference == numerics::RowReference::tilesum) free_rows(s, t, tile, document.length, rows);
    accumulate(
        s.accumulator, {b.sum0, t.queries, s.head_dim, rows.seen, rows.correction}, {b.p, 1, kTile}, {b.v, s.head_dim}, t.keys,
        interval, b.part, [&rows](int i, int) { return rows.reference[i]; },
        [&](int i, int k) { return numerics::mul(outer.at(k, i), rows.v_scale[k]); });
  }
  detail::write_output(call, item, t, v_factor, b);
}

}  // namespace flamia::cpu::FLAMIA_ISA
