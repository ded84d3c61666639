// SPDX-License-Identifier: Apache-2.0
// Two references for the forward kernel on the same codes: float64 attention without any rounding of P, and the recipe itself (row
// reference, codes, fold, promotion per tile) with exact products. One block of 128 threads a row.
#pragma once
#include "line.hpp"
#include "problem.cuh"

namespace bench {

__device__ inline double decode(std::uint8_t code) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3))); }

struct Inputs {
  ForwardParams p;
  int d;
  bool tilesum;
  flamia::sm90::forward::Exponential kind;
  ScaleGroup scales;

  /// Element of Q or K. NVFP4: code times scale in FP16, eight rows after each other.
  __device__ double operand(const std::uint8_t* codes, int head, std::int64_t slot, int channel) const {
    if (scales != ScaleGroup::nvfp4) return decode(codes[flamia::sm90::rows_offset(p.slots, d, head, slot, channel)]);
    return __half2float(reinterpret_cast<const __half*>(codes)[half_offset(p.slots, d, head, slot, channel)]);
  }
};

__device__ inline double block_reduce(double value, bool maximum, double* scratch) {
  __syncthreads();
  scratch[threadIdx.x] = value;
  __syncthreads();
  for (int i = 64; i; i /= 2) {
    if (threadIdx.x < i) {
      const double a = scratch[threadIdx.x], b = scratch[threadIdx.x + i];
      scratch[threadIdx.x] = maximum ? fmax(a, b) : a + b;
    }
    __syncthreads();
  }
  return scratch[0];
}

/// E4M3(2^x) with 2^x by `kind`; NaN stays NaN.
__device__ inline double code_of(double x, flamia::sm90::forward::Exponential kind) {
  using flamia::sm90::forward::Exponential;
  if (isnan(x)) return NAN;
  const double on_line = kind == Exponential::schraudolph ? x - 0.04303566 : x;
  const double p = kind == Exponential::hardware ? exp2(x) : exp2(floor(on_line)) * (1 + on_line - floor(on_line));
  return decode(__nv_cvt_float_to_fp8(static_cast<float>(p), __NV_SATFINITE, __NV_E4M3));
}

/// Errors of a row against both references: squared differences and norms, greatest differences of LSE, m and l.
struct RowError {
  double exact_error, exact_norm, recipe_error, recipe_norm, bias, lse, reference, sum;
  long long nan_mismatch;  // no padding: the whole record is written
};

__global__ void check_rows(Inputs in, const int* document_of_row, const int* position_of_row, RowError* errors) {
  __shared__ double scratch[128], weights[128], plain[128];
  const ForwardParams& p = in.p;
  const int t = threadIdx.x, d = in.d, head = blockIdx.y, key_head = head / (p.query_heads / p.key_heads);
  const Document doc = p.documents[document_of_row[blockIdx.x]];
  const int i = position_of_row[blockIdx.x];
  const std::int64_t query_slot = doc.slot_start + i;
  const flamia::sm90::forward::Window window{p.window_left, p.window_right};
  const int low = window.first_key(i), high = window.last_key(i, doc.length);
  const float c = p.softmax_scale * 1.4426950408889634f;
  const int query_byte = p.query_exponents[head * p.slots + query_slot];
  const double shift = 8, headroom = in.tilesum ? 1 : 0;

  double exact_max = -1e300, exact_sum = 0, exact_out = 0;  // streaming softmax in double
  double m = 0, l = 0, out = 0;                             // the recipe
  bool first = true, careful = true;                        // tilesum
  for (int tile = high / 128; tile >= low / 128; --tile) {
    const int j = tile * 128 + t;
    const bool visible = j >= low && j <= high;
    const std::int64_t slot = doc.slot_start + min(j, doc.length - 1);
    const int key_byte = p.key_exponents[key_head * p.slots + slot], value_byte = p.value_exponents[key_head * p.slots + slot];
    const bool flagged = query_byte == 255 || key_byte == 255 || value_byte == 255;
    double s = 0;
    for (int ch = 0; ch < d; ++ch) {
      s += in.operand(p.query_codes, head, query_slot, ch) * in.operand(p.key_codes, key_head, slot, ch);
    }
    const double product = s * exp2(static_cast<double>(query_byte + key_byte - 254)) * c;
    const double score = static_cast<float>(product);  // t = fl(y rho)
    // float64 attention
    const double tile_max = block_reduce(visible && !flagged ? product : -1e300, true, scratch);
    const double new_max = fmax(exact_max, tile_max);
    const double w = visible ? (flagged ? NAN : exp2(product - new_max)) : 0;
    const double v_scale = exp2(static_cast<double>(value_byte - 127));
    const double keep = exp2(exact_max - new_max);
    exact_sum = exact_sum * keep + block_reduce(w, false, scratch);
    weights[t] = w * v_scale;
    __syncthreads();
    double part = 0;
    if (t < d) {
      for (int k = 0; k < 128; ++k) {
        if (weights[k] == 0) continue;
        part += weights[k] * decode(p.value_codes[flamia::sm90::transposed_offset(
                                 p.slots, d, key_head, doc.slot_start + tile * 128 + k, t, flamia::sm90::TokenOrder::pi)]);
      }
    }
    exact_out = exact_out * keep + part;
    exact_max = new_max;
    // the recipe
    const double x = block_reduce(visible && !flagged ? score : -1e300, true, scratch);
    double m_new = m;
    if (x > -1e299) {
      if (in.tilesum && !careful) {
        careful = block_reduce(visible && !flagged ? code_of(score - m + shift, in.kind) : 0, false, scratch) >= 440;
      }
      if (!in.tilesum || careful) {
        m_new = first ? ceil(32 * x) / 32 + headroom : m + ceil(fmax(0.0, x + headroom - m));
        if (fabs(x) >= 65536) m_new = first ? x + headroom : fmax(m, x + headroom);
      }
    }
    const double reach = block_reduce(
        j <= min(p.window_right < 0 ? doc.length - 1 : i + p.window_right, doc.length - 1) && value_byte != 255 ? value_byte - 127
                                                                                                                : -127,
        true, scratch);
    const double correction = first ? 0 : exp2(m - m_new);  // NaN times 0 stays NaN: a flagged key may come first
    const double code = visible ? (flagged ? NAN : code_of(score + shift - m_new, in.kind)) : 0;
    const double fold = value_byte == 255 ? 0 : value_byte - 127 - reach;
    // Where the exponents of token-blocks lie close together, l counts the folded codes.
    const int of_block = p.value_exponents[key_head * p.slots + doc.slot_start + min(tile * 128 + t / 32 * 32, doc.length - 1)];
    const bool far = block_reduce(value_byte == 255 || value_byte != of_block || fold < -2, true, scratch) != 0;
    const bool close = in.scales != ScaleGroup::token && !far && tile * 128 + 127 <= window.last_key(i / 64 * 64, doc.length);
    const double folded = visible ? (flagged ? NAN : code_of(score + shift + fold - m_new, in.kind)) : 0;
    const double sum = block_reduce(close ? folded * exp2(-fold) : code, false, scratch);
    l = l * correction + sum * exp2(-shift);
    __syncthreads();
    plain[t] = folded;
    __syncthreads();
    part = 0;
    if (t < d) {
      for (int k = 0; k < 128; ++k) {
        if (plain[k] == 0) continue;
        part += plain[k] * decode(p.value_codes[flamia::sm90::transposed_offset(
                               p.slots, d, key_head, doc.slot_start + tile * 128 + k, t, flamia::sm90::TokenOrder::pi)]);
      }
    }
    out = out * correction + part * exp2(reach);
    m = m_new;
    if (x > -1e299) first = false;
    const int seen = min(high, tile * 128 + 127) - max(low, tile * 128) + 1;
    const bool may_free = high / 128 - tile < 3 || tile % 8 == 0, flat = l * exp2(shift) > 640;
    if (in.tilesum && careful && fabs(m) < 65536 && seen >= 32 && tile > low / 128 && may_free &&
        (flat || (high / 128 - tile >= 16 && l > 0))) {  // flat or settled: m rises, the row is free
      const double rise = fmax(flat ? 6.0 : 7.0, ceil(log2(fmax(sum, 1.0))) + (seen == 128 ? -7 : seen >= 64 ? -6 : -5));
      careful = false;
      m += rise;
      l *= exp2(-rise);
      out *= exp2(-rise);
    }
    __syncthreads();
  }
  const std::int64_t token = doc.token_start + i;
  const double got =
      t < d ? __bfloat162float(static_cast<const __nv_bfloat16*>(p.output)[(token * p.query_heads + head) * d + t]) : 0;
  const double exact = t < d ? exact_out / exact_sum : 0, recipe = t < d ? out * exp2(-shift) / l : 0;
  const bool want_nan = isnan(recipe), is_nan = isnan(got);
  const double de = want_nan && is_nan ? 0 : got - exact, dr = want_nan && is_nan ? 0 : got - recipe;
  RowError e;
  e.exact_error = block_reduce(de * de, false, scratch);
  e.exact_norm = block_reduce(want_nan ? 0 : exact * exact, false, scratch);
  e.recipe_error = block_reduce(dr * dr, false, scratch);
  e.recipe_norm = block_reduce(want_nan ? 0 : recipe * recipe, false, scratch);
  e.bias = block_reduce(de, false, scratch);
  e.nan_mismatch = static_cast<long long>(block_reduce(want_nan != is_nan, false, scratch));
  const double got_lse = p.lse[head * p.tokens + token], want_lse = (m + log2(l)) * 0.6931471805599453;
  const std::int64_t saved = head * p.slots + query_slot;
  e.lse = isnan(want_lse) && isnan(got_lse) ? 0 : fabs(got_lse - want_lse);
  e.reference = isnan(want_lse) ? 0 : fabs(p.row_reference[saved] - m);
  e.sum = isnan(want_lse) ? (isnan(p.row_sum[saved]) ? 0 : 1) : fabs(p.row_sum[saved] - l) / l;
  if (t == 0) errors[blockIdx.x * gridDim.y + head] = e;
}

}  // namespace bench
