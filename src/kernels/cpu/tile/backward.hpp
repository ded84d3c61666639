// SPDX-License-Identifier: Apache-2.0
// The backward pass (numerics.md §8), as two passes over the tiles so that no sum is shared by two threads: dQ of a query tile, and
// dK and dV of a key tile. Both make the same S, P and dS from the same codes.
#pragma once
#include "kernels/cpu/tile/gradient.hpp"
#include "numerics/hadamard.hpp"

namespace flamia::cpu::FLAMIA_ISA {

namespace detail {

/// x * factor, rotated back where Q and K were rotated, * c.
static void finish_row(const Settings& s, float* x, float factor, bool rotate) {
  for (int c = 0; c < s.head_dim; ++c) x[c] = numerics::mul(x[c], factor);
  if (rotate && s.head_dim == 64) numerics::rotate_back<64>(x);
  if (rotate && s.head_dim == 128) numerics::rotate_back<128>(x);
}

/// Adds part * factors * 2^reference to dQ: in FP32, or in FP16 with the row's pre-scale, rounding the part and the sum.
static void add_d_q(const Settings& s, const TileShape& t, const TileRows& rows, const std::int16_t* pre_scale,
                    const float* factors, const float* part, float* sum) {
  for (int i = 0; i < t.queries; ++i) {
    if (!rows.seen[i]) continue;
    const int e = rows.reference[i] + (s.dq_f16 ? pre_scale[i] : 0);
    const float* in = part + i * s.head_dim;
    float* out = sum + i * s.head_dim;
    const float factor = factors[i];
    if (s.dq_f16)
      for (int c = 0; c < s.head_dim; ++c) {
        const float x = numerics::decode_f16(numerics::encode_f16(times_pow2(numerics::mul(in[c], factor), e)));
        out[c] = numerics::decode_f16(numerics::encode_f16(numerics::add(out[c], x)));
      }
    else
      for (int c = 0; c < s.head_dim; ++c) out[c] = numerics::add(out[c], times_pow2(numerics::mul(in[c], factor), e));
  }
}

static void record_codes(const BackwardCall& call, const Item& item, const TileShape& t, const Buffers& b) {
  const Settings& s = *call.settings;
  TileRows& rows = *b.rows;
  float* matrix = call.probe_codes + item.head * s.tokens * s.tokens;
  for (int j = 0; j < t.keys; ++j) {
    probabilities(s, j, b.scores + j * kTile, rows.rho, rows.m, static_cast<float>(s.code_exponent), t.width, rows.lane);
    round_lanes(s.p_first.element, rows.lane, rows.code, t.width);
    for (int i = rows.first[j]; i < rows.last[j]; ++i)
      matrix[(item.document.start + t.q0 + i) * s.tokens + item.document.start + t.k0 + j] = rows.code[i];
  }
}

/// P for dV into b.p. rows.reference[j] = the exponent that stays outside: R - B, R = the greatest exponent of dO' among the tile's
/// queries from key j - right reach on.
static OuterFactors p_of_d_v(const Settings& s, const TileShape& t, const Buffers& b) {
  TileRows& rows = *b.rows;
  if (s.p_second.kind == Payload::Kind::blocks) {
    for (int j = 0; j < t.keys; ++j) {
      probabilities(s, j, b.scores + j * kTile, rows.rho, rows.m, 0.f, t.width, b.payload + j * kTile);
      mask_lanes(b.payload + j * kTile, rows.first[j], rows.last[j], t.width);
    }
    const OuterFactors outer = round_blocks(s.p_second, b.payload, b.p, t, b);
    for (int j = 0; j < t.keys; ++j) {
      float* out = b.p + j * kTile;
      for (int i = 0; i < t.width; ++i) out[i] = times_pow2(out[i], rows.g2_exponent[i]);
      rows.reference[j] = 0;
    }
    return outer;
  }
  int suffix[kTile + 1];
  suffix[t.queries] = numerics::kLeastExponent;
  for (int i = t.queries - 1; i >= 0; --i)
    suffix[i] = rows.g_flagged[i] ? suffix[i + 1] : numerics::max_of(suffix[i + 1], rows.g2_exponent[i]);
  alignas(64) float exponent[kTile], shift[kTile];
  for (int i = 0; i < t.width; ++i) exponent[i] = static_cast<float>(s.code_exponent + rows.g2_exponent[i]);
  for (int j = 0; j < t.keys; ++j) {
    const int r = suffix[clipped(t.k0 + j - s.reach.right - t.q0, t.queries)];
    for (int i = 0; i < t.width; ++i) shift[i] = numerics::add(exponent[i], -static_cast<float>(r));
    float* out = b.p + j * kTile;
    probabilities(s, j, b.scores + j * kTile, rows.rho, rows.m, static_cast<const float*>(shift), t.width, rows.lane);
    round_lanes(s.p_second.element, rows.lane, out, t.width);
    mask_lanes(out, rows.first[j], rows.last[j], t.width);
    rows.reference[j] = r - s.code_exponent;
  }
  return {};
}

}  // namespace detail

/// exponent_bound[j] = greatest exponent of V so far + greatest exponent of K so far, over one document's keys.
static void bound_exponents_of_document(const BackwardCall& call, const Item& item, Scratch) {
  const Settings& s = *call.settings;
  int v = numerics::kLeastExponent, k = numerics::kLeastExponent;
  std::int16_t* out = call.exponent_bound + item.head * s.tokens + item.document.start;
  for (std::int64_t j = 0; j < item.document.length; ++j) {
    // of every form that V and K have: D' is made of O, and one form may hold what is too small for another
    for (const Operand* form : {&call.v, &call.v_of_o, &call.v_of_o_diagonal})
      if (form->present()) v = numerics::max_of(v, greatest_exponent(*form, item.document, item.head, j));
    for (const Operand* form : {&call.k_second, &call.k_diagonal})
      if (form->present()) k = numerics::max_of(k, greatest_exponent(*form, item.document, item.head, j));
    out[j] = static_cast<std::int16_t>(v + k);
  }
}

namespace detail {

/// D' as the mean of dP' under P over the keys that a row sees: tiles downwards, as dQ takes them.
static void d_of_scores(const BackwardCall& call, const Item& item, const Buffers& b) {
  const Settings& s = *call.settings;
  TileRows& rows = *b.rows;
  alignas(64) float d[kTile] = {}, mass[kTile] = {};
  const schedule::Interval tiles = key_tiles(s, item.document, item.tile);
  TileShape t = place_tile(s, item.document, item.tile, item.tile, rows);
  load_queries(call, item.document, item.head, t, true, b);
  for (std::int64_t tile = tiles.end - 1; tile >= tiles.begin; --tile) {
    t = place_tile(s, item.document, item.tile, tile, rows);
    load_keys(call, item.document, item.head / (s.query_heads / s.key_heads), t, false, b);
    add_row_sums(call, item.document, item.head, t, b, d, mass);
  }
  float* out = call.d + item.head * s.tokens + item.document.start + t.q0;
  for (int i = 0; i < t.queries; ++i) out[i] = mass[i] == 0.f ? 0.f : d[i] / mass[i];  // 0: P vanished in every pair
}

}  // namespace detail

/// D' = rowsum(dO' o BF16(O)), if it is not made of the scores, and the FP16 pre-scale z = 15 - E, 2^E > 2.002 |dO'| l N K (numerics.md §6), N and K from exponents.
static void prepare_rows_of_tile(const BackwardCall& call, const Item& item, Scratch scratch) {
  const Settings& s = *call.settings;
  const Buffers b = buffers_of(scratch, s.head_dim);
  TileRows& rows = *b.rows;
  const std::int64_t q0 = item.tile * kTile, length = item.document.length;
  const int queries = clipped(length - q0, kTile);
  const float factor =
      load_values(call.d_o, item.document, item.head, q0, queries, b.g, rows.g_exponent, rows.g_scale, rows.g_flagged);
  for (int i = 0; i < queries; ++i) {
    const std::int64_t token = item.document.start + q0 + i, at = item.head * s.tokens + token;
    const float* g = b.g + i * s.head_dim;
    read_row(call.o, token, item.head, s.query_heads, s.head_dim, b.part);
    float d = 0.f;
    double square = 0;
    for (int c = 0; c < s.head_dim; ++c) {
      d = numerics::fma(g[c], numerics::round_bf16(b.part[c]), d);
      square += static_cast<double>(g[c]) * static_cast<double>(g[c]);
    }
    call.d[at] = d;
    if (!s.dq_f16) continue;
    const std::int64_t last = least(q0 + i + s.reach.right, length - 1);
    const std::int64_t key_head = item.head / (s.query_heads / s.key_heads);
    const int exponent = call.exponent_bound[key_head * s.tokens + item.document.start + last] + rows.g_exponent[i];
    const double bound = 2.002 * __builtin_sqrt(square) * static_cast<double>(factor) * static_cast<double>(rows.g_scale[i]) *
                         static_cast<double>(call.l[at]) * static_cast<double>(largest_code(call.v.element)) *
                         static_cast<double>(largest_code(call.k_second.element)) * __builtin_sqrt(static_cast<double>(s.head_dim));
    int e = 0;
    __builtin_frexp(bound, &e);  // bound < 2^e
    const bool nothing = !(bound > 0) || bound > 1e300;
    call.pre_scale[at] =
        static_cast<std::int16_t>(nothing ? 127 : numerics::max_of(-250, numerics::min_of(15 - (e + exponent), 250)));
  }
  if (s.d_of_scores) detail::d_of_scores(call, item, b);
}

/// Greatest |dS| of the tile's rows, NaN skipped, in units of dO's factor (for one scale of dS per call).
static float greatest_ds_of_tile(const BackwardCall& call, const Item& item, Scratch scratch) {
  const Settings& s = *call.settings;
  const Buffers b = buffers_of(scratch, s.head_dim);
  const schedule::Interval tiles = key_tiles(s, item.document, item.tile);
  std::uint32_t greatest_bits = 0;
  for (std::int64_t tile = tiles.end - 1; tile >= tiles.begin; --tile) {
    const TileShape t = place_tile(s, item.document, item.tile, tile, *b.rows);
    load_queries(call, item.document, item.head, t, false, b);
    load_keys(call, item.document, item.head / (s.query_heads / s.key_heads), t, true, b);
    gradient_of_scores(call, item.document, item.head, t, b);
    for (int j = 0; j < t.keys; ++j)
      for (int i = 0; i < t.queries; ++i) {
        const float ds = numerics::mul(times_pow2(b.ds[j * kTile + i], b.rows->g_exponent[i]), b.rows->g_scale[i]);
        const std::uint32_t x = magnitude_bits(ds);
        greatest_bits = greatest_bits > x ? greatest_bits : x;
      }
  }
  return numerics::float_of(greatest_bits);
}

/// dQ of a query tile: key tiles downwards.
static void d_q_tile(const BackwardCall& call, const Item& item, Scratch scratch, ProbeCounts* counts) {
  const Settings& s = *call.settings;
  const Buffers b = buffers_of(scratch, s.head_dim);
  TileRows& rows = *b.rows;
  const int key_head = item.head / (s.query_heads / s.key_heads);
  const schedule::Interval tiles = key_tiles(s, item.document, item.tile);
  TileShape t = place_tile(s, item.document, item.tile, item.tile, rows);
  load_queries(call, item.document, item.head, t, true, b);
  const std::int64_t first = item.head * s.tokens + item.document.start + t.q0;
  for (int x = 0; x < t.queries * s.head_dim; ++x) b.sum0[x] = 0.f;
  for (std::int64_t tile = tiles.end - 1; tile >= tiles.begin; --tile) {
    t = place_tile(s, item.document, item.tile, tile, rows);
    const float* k = load_keys(call, item.document, key_head, t, true, b);
    gradient_of_scores(call, item.document, item.head, t, b);
    if (call.probe_codes) detail::record_codes(call, item, t, b);
    PayloadCounts payload_counts;
    if (counts) count_gradients(t, rows, b.ds, counts);
    const DsPayload payload = make_payload(call, s.ds_first, DsUse::d_q, t, b, counts ? &payload_counts : nullptr);
    if (counts) {
      counts->ds_zero_q += payload_counts.zero;
      counts->ds_saturated_q += payload_counts.saturated;
      counts->ds_lost_q += payload_counts.lost;
    }
    for (int i = 0; i < t.width; ++i)
      rows.reference[i] = payload.has_outer ? payload.outer.row(0)[i] - payload.minus_partner * rows.q2_exponent[i] : 0;
    const float factor = numerics::mul(numerics::mul(call.ds_scale, rows.k2_factor), rows.g_factor);
    for (int piece = 0; piece < t.keys; piece += s.d_q_piece) {
      for (int i = 0; i < t.width; ++i)
        rows.lane[i] = numerics::mul(factor, numerics::mul(payload.factors.at(piece, i), rows.k2_scale[piece]));
      product(s.d_q_accumulator, {b.payload + piece * kTile, 1, kTile}, {k + piece * s.head_dim, s.head_dim}, b.part, s.head_dim,
              t.queries, s.head_dim, numerics::min_of(s.d_q_piece, t.keys - piece));
      detail::add_d_q(s, t, rows, call.pre_scale + (s.dq_f16 ? first : 0), rows.lane, b.part, b.sum0);
    }
  }
  for (int i = 0; i < t.queries; ++i) {
    float* row = b.sum0 + i * s.head_dim;
    if (s.dq_f16)
      for (int c = 0; c < s.head_dim; ++c) row[c] = times_pow2(row[c], -call.pre_scale[first + i]);
    detail::finish_row(s, row, 1.f, s.rotate);
    for (int c = 0; c < s.head_dim; ++c) row[c] = numerics::mul(row[c], s.scale);
    write_row(call.d_q, item.document.start + t.q0 + i, item.head, s.query_heads, s.head_dim, row);
  }
}

/// dK and dV of a key tile: query heads of the group upwards, query tiles upwards.
static void d_k_d_v_tile(const BackwardCall& call, const Item& item, Scratch scratch, ProbeCounts* counts) {
  const Settings& s = *call.settings;
  const Buffers b = buffers_of(scratch, s.head_dim);
  TileRows& rows = *b.rows;
  const int group = s.query_heads / s.key_heads, d = s.head_dim;
  const schedule::Interval tiles = query_tiles(s, item.document, item.tile);
  TileShape t = place_tile(s, item.document, tiles.begin, item.tile, rows);
  const int keys = t.keys;
  for (int x = 0; x < keys * d; ++x) b.sum0[x] = b.sum1[x] = b.sum2[x] = 0.f;
  int active[kTile];
  bool loaded = false, loaded_cut = false;  // V may have a form of its own where the mask's right edge cuts the tile
  for (int head = item.head * group; head < (item.head + 1) * group; ++head)
    for (std::int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
      t = place_tile(s, item.document, tile, item.tile, rows);
      if (!loaded || t.right_cut != loaded_cut) load_keys(call, item.document, item.head, t, s.one_ds_payload, b);
      loaded = true;
      loaded_cut = t.right_cut;
      load_queries(call, item.document, head, t, true, b);
      for (int j = 0; j < t.keys; ++j) active[j] = rows.last[j] - rows.first[j];
      gradient_of_scores(call, item.document, head, t, b);
      if (s.smooth_q) add_mean_gradients(call, item.document, head, t, b);
      const OuterFactors outer = detail::p_of_d_v(s, t, b);
      accumulate(
          s.accumulator, {b.sum1, t.keys, d, active, nullptr}, {b.p, kTile, 1}, {b.g, d}, t.queries,
          numerics::min_of(s.promote_queries, s.d_v_piece), b.part, [&rows](int j, int) { return rows.reference[j]; },
          [&](int j, int i) { return numerics::mul(outer.at(j, i), rows.g2_scale[i]); });
      PayloadCounts payload_counts;
      const DsPayload payload = make_payload(call, s.ds_second, DsUse::d_k, t, b, counts ? &payload_counts : nullptr);
      if (counts) {
        counts->ds_zero_k += payload_counts.zero;
        counts->ds_saturated_k += payload_counts.saturated;
        counts->ds_lost_k += payload_counts.lost;
      }
      // an exponent holds for the queries of one block only
      const int rows_of_block = payload.has_outer ? s.ds_second.rows : kTile;
      for (int q = 0; q < t.queries; q += rows_of_block) {
        const int count = numerics::min_of(rows_of_block, t.queries - q);
        accumulate(
            s.d_k_accumulator, {b.sum0, t.keys, d, active, nullptr}, {b.payload + q, kTile, 1}, {b.q + q * d, d}, count,
            numerics::min_of(s.promote_queries, s.d_k_piece), b.part,
            [&](int j, int) {
              return payload.has_outer ? payload.outer.row(j)[q] - payload.minus_partner * rows.k2_exponent[j] : 0;
            },
            [&](int j, int i) { return numerics::mul(payload.factors.at(j, q + i), rows.q2_scale[q + i]); });
      }
    }
  const float k_factor = numerics::mul(numerics::mul(call.ds_scale, rows.q2_factor), rows.g_factor);
  for (int j = 0; j < keys; ++j) {
    float* row = b.sum0 + j * d;
    if (s.smooth_q)
      for (int c = 0; c < d; ++c) row[c] = numerics::fma(b.sum2[j * d + c], rows.g_factor, numerics::mul(row[c], k_factor));
    detail::finish_row(s, row, s.smooth_q ? 1.f : k_factor, s.rotate);
    for (int c = 0; c < d; ++c) row[c] = numerics::mul(row[c], s.scale);
    write_row(call.d_k, item.document.start + t.k0 + j, item.head, s.key_heads, d, row);
    row = b.sum1 + j * d;
    detail::finish_row(s, row, rows.g2_factor, false);
    write_row(call.d_v, item.document.start + t.k0 + j, item.head, s.key_heads, d, row);
  }
}

}  // namespace flamia::cpu::FLAMIA_ISA
