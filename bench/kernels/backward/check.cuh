// SPDX-License-Identifier: Apache-2.0
// Errors and bitwise probes of the backward kernel.
#pragma once
#include <cmath>
#include <cstring>
#include <functional>
#include <string>

#include "reference.cuh"

namespace bench {

inline Pairs pairs_of(const Problem& p) {
  return {p.longest, p.shape.query_heads,    p.shape.key_heads,  p.shape.head_dim, p.shape.left,   p.shape.right, p.tokens,
          p.slots,   p.params.softmax_scale, p.device_documents, p.token_document, p.shape.nvfp4()};
}

/// Inputs, in host memory so that probes can change tokens.
struct Inputs {
  std::vector<float> q, k, v, g;
};
inline Inputs draw_inputs(const Problem& p, std::uint64_t seed) {
  Inputs in;
  const auto draw = [&](std::vector<float>& x, std::int64_t n, std::uint64_t s) {
    float* device = device_array<float>(n);
    fill_normal<<<256, 256>>>(device, n, s, p.shape.amplitude);
    x.resize(static_cast<std::size_t>(n));
    CHECK(cudaMemcpy(x.data(), device, n * 4, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(device));
  };
  draw(in.q, p.query_elements(), seed);
  draw(in.g, p.query_elements(), seed + 1);
  draw(in.k, p.key_elements(), seed + 2);
  draw(in.v, p.key_elements(), seed + 3);
  const auto scale_all = [](std::vector<float>& x, int power) {
    for (float& value : x) value = std::ldexp(value, power);
  };
  scale_all(in.q, p.shape.query_power), scale_all(in.k, -p.shape.query_power);
  scale_all(in.g, p.shape.gradient_power), scale_all(in.v, -p.shape.gradient_power);
  if (p.shape.stress) {
    // Every 200 tokens: a sink key with a small value, a block of zero values, zero keys, an outlier value, gradient and query.
    const std::int64_t q_row = static_cast<std::int64_t>(p.shape.query_heads) * p.shape.head_dim,
                       k_row = static_cast<std::int64_t>(p.shape.key_heads) * p.shape.head_dim;
    const auto scale = [&](std::vector<float>& x, std::int64_t row, std::int64_t from, std::int64_t count, float by) {
      for (std::int64_t i = from * row; i < std::min(from + count, p.tokens) * row; ++i) x[static_cast<std::size_t>(i)] *= by;
    };
    for (std::int64_t at = 0; at < p.tokens; at += 200) {
      scale(in.v, k_row, at, 1, 0x1p-14f), scale(in.k, k_row, at, 1, 4.0f);
      scale(in.v, k_row, at + 64, 40, 0.0f), scale(in.k, k_row, at + 120, 9, 0.0f);
      scale(in.v, k_row, at + 150, 1, 0x1p10f), scale(in.g, q_row, at + 160, 1, 8192.0f), scale(in.q, q_row, at + 170, 3, 0.0f);
    }
  }
  return in;
}

/// Quantises, makes the forward pass's row statistics by the reference, and what the dO pass would.
template <int kHeadDim>
void load(Problem& p, const Inputs& in, float* o, float* t) {
  const auto upload = [&](float*& to, const std::vector<float>& from) {
    if (to == nullptr) to = device_array<float>(static_cast<std::int64_t>(from.size())), p.owned.push_back(to);
    CHECK(cudaMemcpy(to, from.data(), from.size() * 4, cudaMemcpyHostToDevice));
  };
  upload(p.q, in.q), upload(p.k, in.k), upload(p.v, in.v), upload(p.g, in.g);
  const Pairs s = pairs_of(p);
  const bool rotated = p.shape.config.rotated;
  quantise<kHeadDim>(p, p.q, nullptr, p.query, p.shape.query_heads, rotated, false);
  quantise<kHeadDim>(p, p.k, nullptr, p.key, p.shape.key_heads, rotated, p.shape.sticky);
  quantise<kHeadDim>(p, p.v, nullptr, p.value, p.shape.key_heads, false, p.shape.sticky);
  row_statistics<<<512, 64>>>(s, p.query, p.key, p.value, t, p.reference, p.sum, o);
  quantise<kHeadDim>(p, p.g, p.sum, p.gradient, p.shape.query_heads, false, false);
  row_gradients<<<512, 64>>>(s, p.key, p.value, p.gradient, o, p.sum, p.d_prime, p.dq_exponent);
  CHECK(cudaGetLastError());
}

inline std::vector<float> download(const Problem& p, const void* from, std::int64_t n) {
  std::vector<float> x(static_cast<std::size_t>(n));
  if (p.shape.config.gradients == GradientFormat::f32) {
    CHECK(cudaMemcpy(x.data(), from, n * 4, cudaMemcpyDeviceToHost));
  } else {
    std::vector<std::uint16_t> h(static_cast<std::size_t>(n));
    CHECK(cudaMemcpy(h.data(), from, n * 2, cudaMemcpyDeviceToHost));
    for (std::int64_t i = 0; i < n; ++i) {
      const std::uint32_t u = static_cast<std::uint32_t>(h[i]) << 16;
      std::memcpy(&x[i], &u, 4);
    }
  }
  return x;
}

struct Error {
  double relative, worst_row, cosine;
};
inline Error error_of(const std::vector<float>& x, const std::vector<double>& want, int d) {
  double difference = 0, norm = 0, dot = 0, own = 0, worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    difference += (x[i] - want[i]) * (x[i] - want[i]), norm += want[i] * want[i], dot += x[i] * want[i],
        own += static_cast<double>(x[i]) * x[i];
  }
  const double floor = 0.01 * norm / (static_cast<double>(x.size()) / d);  // a tenth of the rms row norm, squared
  for (std::size_t r = 0; r < x.size(); r += d) {
    double a = 0, b = 0;
    for (int c = 0; c < d; ++c) a += (x[r + c] - want[r + c]) * (x[r + c] - want[r + c]), b += want[r + c] * want[r + c];
    const double e = std::sqrt(a / std::max(b, floor));
    worst = e > worst || std::isnan(e) ? (std::isnan(e) ? 1e9 : e) : worst;
  }
  return {std::sqrt(difference / norm), worst, dot / std::sqrt(norm * own)};
}

struct Results {
  std::vector<float> q, k, v;
};
inline Results results(const Problem& p) {
  return {download(p, p.params.d_query, p.query_elements()), download(p, p.params.d_key, p.key_elements()),
          download(p, p.params.d_value, p.key_elements())};
}

inline int failures = 0;
inline void expect(bool good, const char* what) {
  if (!good) ++failures, std::printf("  FAILED: %s\n", what);
}
inline std::vector<double> fetch(const double* device, std::int64_t n) {
  std::vector<double> x(static_cast<std::size_t>(n));
  CHECK(cudaMemcpy(x.data(), device, n * 8, cudaMemcpyDeviceToHost));
  return x;
}
inline std::int64_t different(const std::vector<float>& a, const std::vector<float>& b,
                              const std::function<bool(std::int64_t)>& counts) {
  std::int64_t n = 0;
  for (std::size_t i = 0; i < a.size(); ++i) n += counts(static_cast<std::int64_t>(i)) && std::memcmp(&a[i], &b[i], 4) != 0;
  return n;
}

/// One case: errors against the recipe's own arithmetic and against attention on the unquantised input, and repetition.
template <int kHeadDim>
void check_case(const char* name, const Shape& shape, std::uint64_t seed) {
  Problem p = make_problem(shape);
  const Pairs s = pairs_of(p);
  const std::int64_t pairs = p.tokens * shape.query_heads * p.longest, nq = p.query_elements(), nk = p.key_elements();
  float* t = device_array<float>(pairs);
  float* o = device_array<float>(nq);
  float* probability = device_array<float>(pairs);
  double *ds = device_array<double>(pairs), *ideal = device_array<double>(pairs), *dq = device_array<double>(nq),
         *dk = device_array<double>(nk), *dv = device_array<double>(nk);
  if (shape.config.record_codes) {
    p.params.record_keys = p.longest;
    p.params.recorded_codes = device_array<std::uint8_t>(shape.query_heads * p.slots * p.longest, 0xEE);
    p.owned.push_back(p.params.recorded_codes);
  }
  const Inputs in = draw_inputs(p, seed);
  load<kHeadDim>(p, in, o, t);
  pair_values<<<1024, 128>>>(s, p.query, p.key, p.value, p.gradient, t, p.reference, p.d_prime, probability, ds);
  query_reference<<<512, 64>>>(s, p.key, p.gradient, ds, dq, is_ds16());
  key_reference<<<512, 64>>>(s, p.query, p.gradient, probability, ds, dk, dv, is_ds16());
  finish_rows<<<64, 64>>>(dq, nq / kHeadDim, kHeadDim, s.scale, shape.config.rotated);
  finish_rows<<<64, 64>>>(dk, nk / kHeadDim, kHeadDim, s.scale, shape.config.rotated);
  CHECK(cudaDeviceSynchronize());
  const std::vector<double> want_q = fetch(dq, nq), want_k = fetch(dk, nk), want_v = fetch(dv, nk);
  run(p);
  const Results r = results(p);
  const Error q = error_of(r.q, want_q, kHeadDim), k = error_of(r.k, want_k, kHeadDim), v = error_of(r.v, want_v, kHeadDim);
  if (shape.config.record_codes) {
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(shape.query_heads * p.slots * p.longest));
    std::vector<float> host(static_cast<std::size_t>(pairs));
    CHECK(cudaMemcpy(codes.data(), p.params.recorded_codes, codes.size(), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(host.data(), probability, host.size() * 4, cudaMemcpyDeviceToHost));
    std::int64_t seen = 0, off = 0, far = 0, missing = 0, control = 0;
    for (std::int64_t token = 0; token < p.tokens; ++token)
      for (int h = 0; h < shape.query_heads; ++h)
        for (const Document& d : p.documents) {
          if (token < d.token_start || token >= d.token_start + d.length) continue;
          const int i = static_cast<int>(token) - d.token_start;
          for (int j = 0; j < d.length; ++j) {
            if ((shape.left >= 0 && j < i - shape.left) || (shape.right >= 0 && j > i + shape.right)) continue;
            const int got = codes[(h * p.slots + d.slot_start + i) * p.longest + j];
            const float p_unfolded = host[(token * shape.query_heads + h) * p.longest + j];
            const int want = __nv_cvt_float_to_fp8(p_unfolded, __NV_SATFINITE, __NV_E4M3);
            control += got != __nv_cvt_float_to_fp8(p_unfolded * (1.0f + 0x1p-8f), __NV_SATFINITE, __NV_E4M3);
            ++seen, off += got != want, far += std::abs(got - want) > 1, missing += got == 0xEE;
          }
        }
    // The tensor core keeps 13 bits of a sum, the reference all: 1 code in 1,000 rounds the other way. A score wrong by 2^-8 of a binade is
    // the control: it must not pass.
    const std::int64_t bound = seen / 400;
    std::printf("  codes: %lld pairs, %lld differ (bound %lld, control %lld), %lld by more than a step, %lld missing\n",
                static_cast<long long>(seen), static_cast<long long>(off), static_cast<long long>(bound),
                static_cast<long long>(control), static_cast<long long>(far), static_cast<long long>(missing));
    expect(far == 0 && missing == 0 && off <= bound && control > bound, "codes of P");
  }
  ideal_rows<<<512, 64>>>(s, p.q, p.k, p.v, p.g, ideal, ds);
  ideal_queries<<<1024, 128>>>(s, p.k, ds, dq);
  ideal_keys<<<1024, 128>>>(s, p.q, p.g, ideal, ds, dk, dv);
  CHECK(cudaDeviceSynchronize());
  const Error iq = error_of(r.q, fetch(dq, nq), kHeadDim), ik = error_of(r.k, fetch(dk, nk), kHeadDim),
              iv = error_of(r.v, fetch(dv, nk), kHeadDim);
  std::int64_t repeats = 0, q_repeats = 0;
  for (int round = 0; round < 3; ++round) {
    run(p);
    const Results again = results(p);
    const auto all = [](std::int64_t) { return true; };
    repeats += different(r.k, again.k, all) + different(r.v, again.v, all);
    q_repeats += different(r.q, again.q, all);
  }
  std::printf(
      "%-40s same recipe dQ %.1e (%.1e) dK %.1e (%.1e) dV %.1e (%.1e) | float64 cosine dQ %.5f dK %.5f dV %.5f, worst row dQ %.2f "
      "| repeats differ dK dV %lld dQ %lld\n",
      name, q.relative, q.worst_row, k.relative, k.worst_row, v.relative, v.worst_row, iq.cosine, ik.cosine, iv.cosine,
      iq.worst_row, static_cast<long long>(repeats), static_cast<long long>(q_repeats));
  expect(q.relative < 2e-2 && k.relative < 2e-2 && v.relative < 1.5e-2, "errors against the recipe");
  expect(q.worst_row < 0.3 && k.worst_row < 0.3 && v.worst_row < 0.3, "worst row against the recipe");
  expect(repeats == 0 && (!is_split() || q_repeats == 0), "repetition");
  for (void* x : {static_cast<void*>(t), static_cast<void*>(o), static_cast<void*>(probability), static_cast<void*>(ds),
                  static_cast<void*>(ideal), static_cast<void*>(dq), static_cast<void*>(dk), static_cast<void*>(dv)})
    CHECK(cudaFree(x));
  release(p);
}

/// Bitwise probes of the exact recipe: later tokens must not reach dQ, earlier queries must not reach dK and dV, documents are alone.
template <int kHeadDim>
void check_exactness(const Shape& shape, std::uint64_t seed) {
  Problem p = make_problem(shape);
  float* t = device_array<float>(p.tokens * shape.query_heads * p.longest);
  float* o = device_array<float>(p.query_elements());
  const Inputs in = draw_inputs(p, seed);
  load<kHeadDim>(p, in, o, t);
  run(p);
  const Results base = results(p);
  const Document& d = p.documents[1];
  const std::int64_t cut = d.token_start + d.length * 2 / 5;
  const std::int64_t q_row = static_cast<std::int64_t>(shape.query_heads) * kHeadDim,
                     k_row = static_cast<std::int64_t>(shape.key_heads) * kHeadDim;
  const auto inside = [&](std::int64_t token) { return token >= d.token_start && token < d.token_start + d.length; };
  for (const float amplify : {16.0f, 1024.0f, 1e4f}) {
    Inputs changed = in;  // tokens after the cut
    const auto scale = [&](std::vector<float>& x, std::int64_t row, std::int64_t from, std::int64_t to) {
      for (std::int64_t i = from * row; i < to * row; ++i) {
        const float y = x[i] * amplify;
        std::uint32_t u;
        std::memcpy(&u, &y, 4);
        u = (u + 0x7FFF + (u >> 16 & 1)) & 0xFFFF0000u;
        std::memcpy(&x[i], &u, 4);
      }
    };
    const std::int64_t end = d.token_start + d.length;
    scale(changed.q, q_row, cut + 1, end), scale(changed.g, q_row, cut + 1, end), scale(changed.k, k_row, cut + 1, end),
        scale(changed.v, k_row, cut + 1, end);
    load<kHeadDim>(p, changed, o, t);
    run(p);
    const Results later = results(p);
    const std::int64_t leak = different(base.q, later.q, [&](std::int64_t i) { return i / q_row <= cut || !inside(i / q_row); });
    const std::int64_t moved = different(base.q, later.q, [&](std::int64_t i) { return inside(i / q_row) && i / q_row > cut; });
    const std::int64_t others = different(base.k, later.k, [&](std::int64_t i) { return !inside(i / k_row); }) +
                                different(base.v, later.v, [&](std::int64_t i) { return !inside(i / k_row); });
    changed = in;  // queries and gradients before the cut
    scale(changed.q, q_row, d.token_start, cut), scale(changed.g, q_row, d.token_start, cut);
    load<kHeadDim>(p, changed, o, t);
    run(p);
    const Results earlier = results(p);
    const auto from_cut = [&](std::int64_t i) { return i / k_row >= cut || !inside(i / k_row); };
    const std::int64_t back = different(base.k, earlier.k, from_cut) + different(base.v, earlier.v, from_cut);
    std::printf("  tokens x %-6g dQ leak %lld, look-back dK dV %lld, other documents %lld (control: %lld changed)\n", amplify,
                static_cast<long long>(leak), static_cast<long long>(back), static_cast<long long>(others),
                static_cast<long long>(moved));
    expect(others == 0 && moved > 0, "isolation of documents");
    if (!shape.blocks()) expect((leak == 0 || !is_split()) && back == 0, "exactness");  // the fused passes add in any order
  }
  // One element of V and of dO is NaN: who sees it is NaN, nobody else changes.
  Inputs changed = in;
  changed.v[cut * k_row + 3] = NAN;
  load<kHeadDim>(p, changed, o, t);
  run(p);
  const Results flagged = results(p);
  const int group = shape.query_heads / shape.key_heads;
  const auto touched = [&](std::int64_t i) { return inside(i / q_row) && i % q_row / kHeadDim < group; };  // heads of key head 0
  const std::int64_t block = d.token_start + (cut - d.token_start) / 32 * 32, first = shape.blocks() ? block : cut;
  std::int64_t finite = 0;
  for (std::size_t i = 0; i < flagged.q.size(); ++i)
    finite += touched(i) && static_cast<std::int64_t>(i) / q_row >= first && !std::isnan(flagged.q[i]);
  const std::int64_t spread = different(base.q, flagged.q, [&](std::int64_t i) { return !touched(i) || i / q_row < block; });
  std::printf("  NaN in V: %lld elements that see it stay finite, %lld others change\n", static_cast<long long>(finite),
              static_cast<long long>(spread));
  expect(finite == 0 && (spread == 0 || !is_split()), "flagged token");
  CHECK(cudaFree(t));
  CHECK(cudaFree(o));
  release(p);
}

}  // namespace bench
