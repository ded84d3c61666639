// SPDX-License-Identifier: Apache-2.0
// References for the backward kernel, by plain kernels in double: attention on the unquantised input, and the recipe's own arithmetic on the
// same codes (the payloads of P and dS rounded as numerics sections 0 and 8 say, dK's exponent per key and 64 queries).
#pragma once
#include <cuda_bf16.h>

#include "problem.cuh"
#include "quantize/cuda/prescale.hpp"

namespace bench {

struct Pairs {
  std::int64_t stride;  // keys per row
  int query_heads, key_heads, d, left, right;
  std::int64_t tokens, slots;
  float scale;
  const Document* documents;
  const std::int32_t* document_of;
  bool nvfp4;  // scores
};
struct Place {
  Document document;
  int i;  // position
  int head, key_head;
  std::int64_t token, slot;
};
__device__ inline Place place(const Pairs& s, std::int64_t index) {
  Place p;
  p.token = index / s.query_heads;
  p.head = static_cast<int>(index % s.query_heads);
  p.key_head = p.head / (s.query_heads / s.key_heads);
  p.document = s.documents[s.document_of[p.token]];
  p.i = static_cast<int>(p.token) - p.document.token_start;
  p.slot = p.document.slot_start + p.i;
  return p;
}
__device__ inline bool visible(const Pairs& s, const Place& p, int j) {
  return j < p.document.length && (s.left < 0 || j >= p.i - s.left) && (s.right < 0 || j <= p.i + s.right);
}
__device__ inline double dot_codes(const std::uint8_t* a, std::int64_t ah, std::int64_t as, const std::uint8_t* b, std::int64_t bh,
                                   std::int64_t bs, const Pairs& s) {
  double sum = 0;
  for (int c = 0; c < s.d; ++c)
    sum += static_cast<double>(decode(a[rows_offset(s.slots, s.d, ah, as, c)])) * decode(b[rows_offset(s.slots, s.d, bh, bs, c)]);
  return sum;
}
__device__ inline int exponent_at(const std::uint8_t* bytes, std::int64_t at) { return bytes[at] == 255 ? 0 : bytes[at] - 127; }
/// A score of query and key without their exponents, and those.
__device__ inline double dot_scores(const Operand& q, std::int64_t qh, std::int64_t qs, const Operand& k, std::int64_t kh,
                                    std::int64_t ks, const Pairs& s) {
  if (!s.nvfp4) return dot_codes(q.rows, qh, qs, k.rows, kh, ks, s);
  double sum = 0;
  const auto value = [&](const Operand& o, std::int64_t head, std::int64_t slot, int c) {
    return static_cast<double>(half_value(o.halves[rows_offset(s.slots, 2 * s.d, head, slot, 2 * c) / 2]));
  };
  for (int c = 0; c < s.d; ++c) sum += value(q, qh, qs, c) * value(k, kh, ks, c);
  return sum;
}
__device__ inline int score_exponent(const Pairs& s, const std::uint8_t* bytes, std::int64_t at) {
  return s.nvfp4 ? 0 : exponent_at(bytes, at);
}

/// t = y rho, row references, sums of codes, O, and what the dO pass makes of them.
static __global__ void row_statistics(Pairs s, Operand q, Operand k, Operand v, float* t, float* reference, float* sum, float* o) {
  FOR_EACH(x, s.tokens * s.query_heads) {
    const Place p = place(s, x);
    const std::int64_t row = p.head * s.slots + p.slot;
    const float rho =
        numerics::mul(numerics::mul(s.scale, 1.4426950408889634f), numerics::pow2(score_exponent(s, q.exponents, row)));
    float greatest = -INFINITY;
    for (int j = 0; j < p.document.length; ++j) {
      if (!visible(s, p, j)) continue;
      const std::int64_t ks = p.document.slot_start + j;
      const float y = static_cast<float>(dot_scores(q, p.head, p.slot, k, p.key_head, ks, s)) *
                      numerics::pow2(score_exponent(s, k.exponents, p.key_head * s.slots + ks));
      t[x * s.stride + j] = y;
      greatest = fmaxf(greatest, y * rho);
    }
    const float m = ceilf(greatest * 32.0f) / 32.0f;
    double l = 0;
    double out[128] = {};
    bool flagged = q.exponents[row] == 255;
    for (int j = 0; j < p.document.length; ++j) {
      if (!visible(s, p, j)) continue;
      const std::int64_t at = p.key_head * s.slots + p.document.slot_start + j;
      flagged |= k.exponents[at] == 255 || v.exponents[at] == 255;
      const double code = decode(encode(exp2f(fmaf(t[x * s.stride + j], rho, 8.0f - m)))) / 256.0;
      l += code;
      for (int c = 0; c < s.d; ++c)
        out[c] +=
            code * ldexp(static_cast<double>(decode(v.rows[rows_offset(s.slots, s.d, p.key_head, p.document.slot_start + j, c)])),
                         exponent_at(v.exponents, at));
    }
    reference[row] = m;
    sum[row] = flagged ? NAN : static_cast<float>(l);
    for (int c = 0; c < s.d; ++c) o[x * s.d + c] = round_bf16(flagged ? NAN : static_cast<float>(out[c] / l));
  }
}
static __global__ void row_gradients(Pairs s, Operand k, Operand v, Operand g, const float* o, const float* sum, float* d_prime,
                                     std::int16_t* z) {
  FOR_EACH(x, s.tokens * s.query_heads) {
    const Place p = place(s, x);
    const std::int64_t row = p.head * s.slots + p.slot;
    const int e = exponent_at(g.exponents, row);
    float d = 0.0f, square = 0.0f;
    for (int c = 0; c < s.d; ++c) {
      const float code = decode(g.rows[rows_offset(s.slots, s.d, p.head, p.slot, c)]);
      d = fmaf(numerics::scale_pow2(code, e), o[x * s.d + c], d);
      square += code * code;
    }
    int ek = -127, ev = -127;
    for (int j = 0; j < p.document.length; ++j) {
      const std::int64_t at = p.key_head * s.slots + p.document.slot_start + j;
      if (s.right >= 0 && j > p.i + s.right) continue;
      if (k.exponents[at] != 255) ek = max(ek, k.exponents[at] - 127);
      if (v.exponents[at] != 255) ev = max(ev, v.exponents[at] - 127);
    }
    d_prime[row] = d;
    z[row] = static_cast<std::int16_t>(max(-250, min(250, flamia::quantize::dq_exponent(square, sum[row], s.d, e, ek, ev))));
  }
}

/// P 2^8 and dS 2^-eG of the visible pairs, 0 elsewhere.
static __global__ void pair_values(Pairs s, Operand q, Operand k, Operand v, Operand g, const float* t, const float* reference,
                                   const float* d_prime, float* probability, double* ds) {
  FOR_EACH(y, s.tokens * s.query_heads * s.stride) {
    const std::int64_t x = y / s.stride;
    const int j = static_cast<int>(y % s.stride);
    const Place p = place(s, x);
    probability[y] = 0.0f, ds[y] = 0.0;
    if (!visible(s, p, j)) continue;
    const std::int64_t row = p.head * s.slots + p.slot, at = p.key_head * s.slots + p.document.slot_start + j;
    const float rho =
        numerics::mul(numerics::mul(s.scale, 1.4426950408889634f), numerics::pow2(score_exponent(s, q.exponents, row)));
    probability[y] = exp2f(fmaf(t[y], rho, 8.0f - reference[row]));
    const double dp =
        ldexp(dot_codes(g.rows, p.head, p.slot, v.rows, p.key_head, p.document.slot_start + j, s), exponent_at(v.exponents, at));
    ds[y] = probability[y] / 256.0 * (dp - ldexp(static_cast<double>(d_prime[row]), -exponent_at(g.exponents, row)));
  }
}
__device__ inline int ceil_of(double x) {
  return x == 0 ? -127 : numerics::ceil_exponent<numerics::kE4M3>(static_cast<float>(fabs(x)));
}
__device__ inline double payload(double x, int e) {
  return ldexp(static_cast<double>(decode(encode(static_cast<float>(ldexp(x, -e))))), e);
}

/// dS in BF16: rounded once in true units, no exponent of its own.
__device__ inline double bf16_payload(double x) { return __bfloat162float(__double2bfloat16(x)); }

/// dQ without the softmax scale and rotated; one thread a row.
static __global__ void query_reference(Pairs s, Operand k, Operand g, const double* ds, double* dq, bool bf16) {
  FOR_EACH(x, s.tokens * s.query_heads) {
    const Place p = place(s, x);
    const int eg = exponent_at(g.exponents, p.head * s.slots + p.slot);
    double sum[128] = {};
    for (int first = 0; first < p.document.length; first += 128) {
      int e = -127;
      const int end = min(first + 128, p.document.length);
      for (int j = first; j < end; ++j)
        e = max(e, ceil_of(ldexp(ds[x * s.stride + j],
                                 eg + exponent_at(k.exponents, p.key_head * s.slots + p.document.slot_start + j))));
      for (int j = first; j < end; ++j) {
        const std::int64_t ks = p.document.slot_start + j;
        const int ek = exponent_at(k.exponents, p.key_head * s.slots + ks);
        const double z =
            bf16 ? ldexp(bf16_payload(ldexp(ds[x * s.stride + j], eg)), ek) : payload(ldexp(ds[x * s.stride + j], eg + ek), e);
        if (z != 0)
          for (int c = 0; c < s.d; ++c) sum[c] += z * decode(k.rows[rows_offset(s.slots, s.d, p.key_head, ks, c)]);
      }
    }
    for (int c = 0; c < s.d; ++c) dq[x * s.d + c] = sum[c];
  }
}
/// dK (rotated, unscaled) and dV of one key of one key head.
static __global__ void key_reference(Pairs s, Operand q, Operand g, const float* probability, const double* ds, double* dk,
                                     double* dv, bool bf16) {
  FOR_EACH(y, s.tokens * s.key_heads) {
    const std::int64_t token = y / s.key_heads;
    const int key_head = static_cast<int>(y % s.key_heads), group = s.query_heads / s.key_heads;
    const Document document = s.documents[s.document_of[token]];
    const int j = static_cast<int>(token) - document.token_start;
    double sum_k[128] = {}, sum_v[128] = {};
    for (int head = key_head * group; head < (key_head + 1) * group; ++head)
      for (int first = 0; first < document.length; first += 64) {
        const int tile = first / 128 * 128, end = min(first + 64, document.length),
                  from = s.right < 0 ? tile : max(tile, j - s.right);
        int ref = -127, e = -127;
        for (int i = from; i < min(tile + 128, document.length); ++i)
          if (g.exponents[head * s.slots + document.slot_start + i] != 255)
            ref = max(ref, exponent_at(g.exponents, head * s.slots + document.slot_start + i));
        for (int i = first; i < end; ++i) {
          const std::int64_t row = head * s.slots + document.slot_start + i,
                             x = (document.token_start + i) * static_cast<std::int64_t>(s.query_heads) + head;
          e = max(e, ceil_of(ldexp(ds[x * s.stride + j], exponent_at(g.exponents, row) + exponent_at(q.exponents, row))));
        }
        for (int i = first; i < end; ++i) {
          const std::int64_t slot = document.slot_start + i, row = head * s.slots + slot,
                             x = (document.token_start + i) * static_cast<std::int64_t>(s.query_heads) + head;
          const int eg = exponent_at(g.exponents, row), eq = exponent_at(q.exponents, row);
          const double z =
              bf16 ? ldexp(bf16_payload(ldexp(ds[x * s.stride + j], eg)), eq) : payload(ldexp(ds[x * s.stride + j], eg + eq), e);
          const double w = ldexp(static_cast<double>(decode(encode(static_cast<float>(ldexp(
                                     static_cast<double>(probability[x * s.stride + j]), exponent_at(g.exponents, row) - ref))))),
                                 ref - 8);
          if (z == 0 && w == 0) continue;
          for (int c = 0; c < s.d; ++c) {
            sum_k[c] += z * decode(q.rows[rows_offset(s.slots, s.d, head, slot, c)]);
            sum_v[c] += w * decode(g.rows[rows_offset(s.slots, s.d, head, slot, c)]);
          }
        }
      }
    for (int c = 0; c < s.d; ++c) dk[y * s.d + c] = sum_k[c], dv[y * s.d + c] = sum_v[c];
  }
}
/// Rotates rows back and scales them, in double.
static __global__ void finish_rows(double* x, std::int64_t rows, int d, double scale, bool rotate) {
  FOR_EACH(r, rows) {
    double* row = x + r * d;
    if (rotate) {
      for (int h = 1; h < d; h *= 2)
        for (int c = 0; c < d; ++c)
          if ((c & h) == 0) {
            const double a = row[c], b = row[c + h];
            row[c] = a + b, row[c + h] = a - b;
          }
      for (int c = 0; c < d; ++c) row[c] *= (numerics::rotation_sign(c) != 0 ? -1.0 : 1.0) / sqrt(static_cast<double>(d));
    }
    for (int c = 0; c < d; ++c) row[c] *= scale;
  }
}

// ---- attention on the unquantised input ---------------------------------------------------------------------------------------

static __global__ void ideal_rows(Pairs s, const float* q, const float* k, const float* v, const float* g, double* probability,
                                  double* ds) {
  FOR_EACH(x, s.tokens * s.query_heads) {
    const Place p = place(s, x);
    double greatest = -1e300, sum = 0, d = 0;
    double* const row = probability + x * s.stride;
    double* const out = ds + x * s.stride;
    for (int j = 0; j < p.document.length; ++j) {
      row[j] = 0, out[j] = 0;
      if (!visible(s, p, j)) continue;
      const float* const kj = k + ((p.document.token_start + j) * static_cast<std::int64_t>(s.key_heads) + p.key_head) * s.d;
      const float* const vj = v + ((p.document.token_start + j) * static_cast<std::int64_t>(s.key_heads) + p.key_head) * s.d;
      double t = 0, dp = 0;
      for (int c = 0; c < s.d; ++c)
        t += static_cast<double>(q[x * s.d + c]) * kj[c], dp += static_cast<double>(g[x * s.d + c]) * vj[c];
      row[j] = t * s.scale, out[j] = dp;
      greatest = fmax(greatest, row[j]);
    }
    for (int j = 0; j < p.document.length; ++j)
      if (visible(s, p, j)) sum += row[j] = exp(row[j] - greatest);
    for (int j = 0; j < p.document.length; ++j) row[j] /= sum, d += row[j] * out[j];
    for (int j = 0; j < p.document.length; ++j) out[j] = row[j] * (out[j] - d);
  }
}
static __global__ void ideal_queries(Pairs s, const float* k, const double* ds, double* dq) {
  FOR_EACH(y, s.tokens * s.query_heads * s.d) {
    const std::int64_t x = y / s.d;
    const Place p = place(s, x);
    double sum = 0;
    for (int j = 0; j < p.document.length; ++j)
      sum += ds[x * s.stride + j] *
             k[((p.document.token_start + j) * static_cast<std::int64_t>(s.key_heads) + p.key_head) * s.d + y % s.d];
    dq[y] = sum * s.scale;
  }
}
static __global__ void ideal_keys(Pairs s, const float* q, const float* g, const double* probability, const double* ds, double* dk,
                                  double* dv) {
  FOR_EACH(y, s.tokens * s.key_heads * s.d) {
    const std::int64_t token = y / s.d / s.key_heads;
    const int key_head = static_cast<int>(y / s.d % s.key_heads), c = static_cast<int>(y % s.d),
              group = s.query_heads / s.key_heads;
    const Document document = s.documents[s.document_of[token]];
    const int j = static_cast<int>(token) - document.token_start;
    double a = 0, b = 0;
    for (int i = 0; i < document.length; ++i)
      for (int head = key_head * group; head < (key_head + 1) * group; ++head) {
        const std::int64_t x = (document.token_start + i) * static_cast<std::int64_t>(s.query_heads) + head;
        a += ds[x * s.stride + j] * q[x * s.d + c];
        b += probability[x * s.stride + j] * g[x * s.d + c];
      }
    dk[y] = a * s.scale, dv[y] = b;
  }
}

}  // namespace bench
