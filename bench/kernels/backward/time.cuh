// SPDX-License-Identifier: Apache-2.0
// Timing of the backward kernels on the project's workloads: 65,536 tokens, random codes. Burst = median of single launches after a pause;
// sustained = launches back to back for about half a second, with the clock seen by a probe kernel at the end.
#pragma once
#include <unistd.h>
#include <cuda/ptx>

#include <functional>
#include <string>
#include <tuple>

#include "problem.cuh"

namespace bench {

inline constexpr int kQueryStepTokens = 64;

static __global__ void random_codes(std::uint8_t* x, std::int64_t n, std::uint64_t seed) {
  FOR_EACH(i, n) x[i] = encode(normal(i, seed) * 90.0f);  // a token's greatest of 128 near 256
}
static __global__ void random_rows16(std::uint16_t* x, std::int64_t n, std::uint64_t seed) {
  FOR_EACH(i, n) x[i] = static_cast<std::uint16_t>(__float_as_uint(decode(encode(normal(i, seed) * 90.0f)) * 0x1p-7f) >> 16);
}
static __global__ void random_halves(std::uint16_t* x, std::int64_t n, std::uint64_t seed) {
  FOR_EACH(i, n) {
    const float value = normal(i, seed), scale = decode(encode(0.25f + 0.01f * (mix(i / 16 + seed) % 16)));
    x[i] = half_bits(copysignf(round_e2m1(fabsf(value) / scale) * scale, value));
  }
}
/// Tails stay zero as the layout promises: only documents' slots are filled. Exponents of a mixed kind every few blocks when asked.
static __global__ void plain_rows(float* reference, float* d_prime, std::int16_t* z, std::int64_t n, std::uint64_t seed) {
  FOR_EACH(i, n) {
    reference[i] = 6.0f;
    d_prime[i] = normal(i, seed) * 0.05f;
    z[i] = 8;
  }
}
static __global__ void constant_bytes(std::uint8_t* x, std::int64_t n, int byte, int mixed_every, std::uint64_t seed) {
  FOR_EACH(i, n) x[i] = static_cast<std::uint8_t>(byte + (mixed_every > 0 && mix(i / 32 * 77 + seed) % mixed_every == 0 ? 1 : 0));
}
/// Clock of the multiprocessors, from a spin of known length.
static __global__ void read_clock(long long* out) {
  const auto start_ns = static_cast<long long>(cuda::ptx::get_sreg_globaltimer());
  const long long start = clock64();
  while (clock64() - start < 200000) {
  }
  const auto end_ns = static_cast<long long>(cuda::ptx::get_sreg_globaltimer());
  out[0] = clock64() - start, out[1] = end_ns - start_ns;
}

/// One launch of a pass, between two others.
struct Part {
  const char* name;
  std::function<cudaError_t()> launch;
};
/// A pass as a caller sees it, in the order of its launches.
inline std::vector<Part> parts_of(const Problem& p) {
  const BackwardParams b = p.params;
  const BackwardConfig c = p.shape.config;
  if (is_split()) {
    return {{"prepare", [=] { return launch_split_prepare(b, c, nullptr); }},
            {"dQ", [=] { return launch_split_query_gradient(b, c, nullptr); }},
            {"dK dV", [=] { return launch_split_key_gradients(b, c, nullptr); }}};
  }
  const std::int64_t bytes = p.shape.query_heads * p.slots * p.shape.head_dim * (c.partials == PartialFormat::f16 ? 2 : 4);
  const bool cleared = !is_ds16() || p.longest > kOneBlockTokens;
  return {{"clear", [=] { return cleared ? cudaMemsetAsync(b.dq_partials, 0, bytes, nullptr) : cudaSuccess; }},
          {"prepare", [=] { return launch_backward_prepare(b, c, nullptr); }},
          {"gradients", [=] { return launch_backward_gradients(b, c, nullptr); }},
          {"finish", [=] { return launch_backward_finish(b, c, nullptr); }}};
}

/// Milliseconds: `burst` of each part; `sustained` of each part alone (of those that take longer than half a millisecond), and `whole` of all
/// together, back to back.
struct Timing {
  struct Sustained {
    double ms, clock;
  };
  std::vector<double> burst;
  std::vector<Sustained> sustained;
  Sustained whole;
};

inline double pairs_of_workload(const std::vector<int>& lengths) {
  double pairs = 0;
  for (int l : lengths) pairs += 0.5 * l * static_cast<double>(l);
  return pairs;
}

/// mixed_every: one token-block in so many has another exponent (0: all uniform).
inline Timing time_workload(const Shape& shape, int mixed_every, int repeats, std::vector<const char*>& names) {
  Problem p = make_problem(shape);
  const BackwardParams& b = p.params;
  const std::int64_t qn = shape.query_heads * p.slots, kn = shape.key_heads * p.slots, d = shape.head_dim;
  random_codes<<<2048, 256>>>(p.query.rows, qn * d, 1), random_codes<<<2048, 256>>>(p.query.transposed, qn * d, 2);
  random_codes<<<2048, 256>>>(p.gradient.rows, qn * d, 3), random_codes<<<2048, 256>>>(p.gradient.transposed, qn * d, 4);
  random_codes<<<2048, 256>>>(p.key.rows, kn * d, 5), random_codes<<<2048, 256>>>(p.key.transposed, kn * d, 6),
      random_codes<<<2048, 256>>>(p.value.rows, kn * d, 7);
  random_rows16<<<2048, 256>>>(p.query.rows16, qn * d, 8), random_rows16<<<2048, 256>>>(p.key.rows16, kn * d, 10);
  random_halves<<<2048, 256>>>(p.query.halves, qn * d, 11), random_halves<<<2048, 256>>>(p.key.halves, kn * d, 12);
  random_codes<<<2048, 256>>>(p.key.nvfp4, kn * d / 2, 13);
  CHECK(cudaMemset(p.key.scales, 0x2c, kn * d / 16));  // E4M3 .375
  for (auto [bytes, n, seed] :
       {std::tuple{p.query.exponents, qn, 1}, {p.gradient.exponents, qn, 2}, {p.key.exponents, kn, 3}, {p.value.exponents, kn, 4}})
    constant_bytes<<<512, 256>>>(bytes, n, 127 - 7, mixed_every, seed);
  plain_rows<<<512, 256>>>(p.reference, p.d_prime, p.dq_exponent, qn, 9);
  CHECK(cudaMemset(b.dq_partials, 0, qn * d * (shape.config.partials == PartialFormat::f16 ? 2 : 4)));
  CHECK(cudaDeviceSynchronize());
  const std::vector<Part> parts = parts_of(p);
  std::vector<cudaEvent_t> marks(parts.size() + 1);
  for (auto& mark : marks) CHECK(cudaEventCreate(&mark));
  std::vector<std::vector<float>> times(parts.size());
  for (int i = 0; i < repeats + 2; ++i) {
    usleep(20000);
    CHECK(cudaEventRecord(marks[0]));
    for (std::size_t k = 0; k < parts.size(); ++k) {
      CHECK(parts[k].launch());
      CHECK(cudaEventRecord(marks[k + 1]));
    }
    CHECK(cudaEventSynchronize(marks.back()));
    for (std::size_t k = 0; k < parts.size() && i >= 2; ++k) {
      float ms;
      CHECK(cudaEventElapsedTime(&ms, marks[k], marks[k + 1]));
      times[k].push_back(ms);
    }
  }
  Timing timing;
  double sum = 0;
  for (auto& x : times) {
    std::sort(x.begin(), x.end());
    timing.burst.push_back(x[x.size() / 2]);
    sum += timing.burst.back();
  }
  long long* clock;
  CHECK(cudaMallocHost(&clock, 16));
  const auto sustain = [&](double about, const std::function<void()>& launch) {
    const int count = std::max(4, static_cast<int>(250.0 / std::max(about, 0.05)));
    CHECK(cudaEventRecord(marks[0]));
    for (int i = 0; i < count; ++i) launch();
    CHECK(cudaEventRecord(marks[1]));
    read_clock<<<1, 1>>>(clock);
    CHECK(cudaDeviceSynchronize());
    float total;
    CHECK(cudaEventElapsedTime(&total, marks[0], marks[1]));
    return Timing::Sustained{total / count, 1e3 * clock[0] / clock[1]};
  };
  for (std::size_t k = 0; k < parts.size(); ++k)
    timing.sustained.push_back(timing.burst[k] < 0.5 ? Timing::Sustained{}
                                                     : sustain(timing.burst[k], [&] { CHECK(parts[k].launch()); }));
  timing.whole = sustain(sum, [&] {
    for (const Part& part : parts) CHECK(part.launch());
  });
  CHECK(cudaFreeHost(clock));
  for (auto& mark : marks) CHECK(cudaEventDestroy(mark));
  for (std::size_t k = 0; k < parts.size(); ++k) names.push_back(parts[k].name);
  release(p);
  return timing;
}

struct Workload {
  const char* name;
  std::vector<int> lengths;
};
inline std::vector<Workload> workloads() {
  std::vector<int> mixed{8192};
  mixed.insert(mixed.end(), 224, 256);
  return {{"32x2048", std::vector<int>(32, 2048)},
          {"16x4096", std::vector<int>(16, 4096)},
          {"8x8192", std::vector<int>(8, 8192)},
          {"4x16384", std::vector<int>(4, 16384)},
          {"2x32768", std::vector<int>(2, 32768)},
          {"256x256", std::vector<int>(256, 256)},
          {"8192+224x256", mixed},
          {"manual_pages",
           {313,  1529, 13242, 756, 279, 4473, 1102, 1058, 717, 4303, 1228, 580,  518, 541,  290, 295, 555,  631,  354,
            1057, 1122, 659,   396, 737, 3798, 804,  993,  285, 364,  2257, 9905, 302, 4233, 535, 631, 1142, 2560, 992}},
          {"uniform_64_8192", {4689, 3643, 6960, 8176, 4173, 69, 7762, 4088, 5410, 4566, 2449, 4730, 200, 4995, 1848, 1778}}};
}

/// Steps of 64 queries x 128 keys under a causal mask.
inline double steps_of_workload(const Shape& shape) {
  double steps = 0;
  for (int l : shape.lengths)
    for (int first = 0; first < l; first += kKeyTile)
      steps += (l + kQueryStepTokens - 1) / kQueryStepTokens - first / kQueryStepTokens;
  return steps * shape.query_heads;
}

inline void print_timing(const char* name, const char* variant, const Shape& shape, const Timing& t,
                         const std::vector<const char*>& names) {
  const double flops = 2.5 * 4 * pairs_of_workload(shape.lengths) * shape.head_dim * shape.query_heads;
  int device, multiprocessors;
  CHECK(cudaGetDevice(&device));
  CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  const double steps = steps_of_workload(shape) / multiprocessors;
  std::printf("%-16s %-10s %-22s", name, name_of(pass), variant);
  double sum = 0;
  for (std::size_t k = 0; k < names.size(); ++k) {
    std::printf(" %s %.3f", names[k], t.burst[k]);
    sum += t.burst[k];
    if (t.sustained[k].ms > 0)
      std::printf(" (%.3f at %.0f MHz, %.0f cycles a step)", t.sustained[k].ms, t.sustained[k].clock,
                  t.sustained[k].ms * 1e3 * t.sustained[k].clock / steps);
  }
  std::printf(" | whole burst %.3f ms %.0f TFLOP/s, sustained %.3f ms %.0f TFLOP/s at %.0f MHz\n", sum, flops / sum / 1e9,
              t.whole.ms, flops / t.whole.ms / 1e9, t.whole.clock);
}

}  // namespace bench
