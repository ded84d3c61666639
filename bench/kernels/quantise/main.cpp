// SPDX-License-Identifier: Apache-2.0
// Times the schedule, the quantiser and the dO pass on a Hopper GPU beside a device-to-device copy of the same run.
//
//   kernel_quantise_bench [--quick]        CSV on stdout, medians of batches
//
// `share` = bytes that the launch must move over its time, relative to the copy's (read + written).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "control.hpp"
#include "full_rows.hpp"
#include "numerics/format.hpp"
#include "quantize/cuda/dequantise.hpp"
#include "quantize/cuda/expand_nvfp4.hpp"
#include "quantize/cuda/gradient.hpp"
#include "quantize/cuda/int8.hpp"
#include "quantize/cuda/quantise.hpp"
#include "schedule/cuda/clear.hpp"

namespace {

using namespace flamia;
using quantize::gpu::Group;
using quantize::gpu::Prefix;
using quantize::gpu::QuantiseParams;

constexpr int kHeads = 16;
constexpr int kDim = 128;
constexpr int kHeadroom = 2;  // of the exact recipes

void ok(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}
void ok(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

template <class T>
T* allocate(std::int64_t count) {
  void* data = nullptr;
  ok(cudaMalloc(&data, static_cast<std::size_t>(count) * sizeof(T)));
  return static_cast<T*>(data);
}

int batches = 15, per_batch = 4;

/// Median milliseconds of one call.
double time_ms(const std::function<void()>& call) {
  cudaEvent_t begin, end;
  ok(cudaEventCreate(&begin));
  ok(cudaEventCreate(&end));
  for (int i = 0; i < 3; ++i) call();
  std::vector<double> times;
  for (int b = 0; b < batches; ++b) {
    ok(cudaEventRecord(begin));
    for (int i = 0; i < per_batch; ++i) call();
    ok(cudaEventRecord(end));
    ok(cudaEventSynchronize(end));
    float ms = 0;
    ok(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(ms / per_batch);
  }
  ok(cudaEventDestroy(begin));
  ok(cudaEventDestroy(end));
  std::nth_element(times.begin(), times.begin() + batches / 2, times.end());
  return times[static_cast<std::size_t>(batches / 2)];
}

double copy_gbps = 0;

void row(const std::string& workload, const std::string& part, double ms, double bytes) {
  const double gbps = bytes / ms * 1e-6;
  std::printf("%s,%s,%.4f,%.1f,%.0f,%.3f\n", workload.c_str(), part.c_str(), ms, bytes * 1e-6, gbps, gbps / copy_gbps);
}

struct Workload {
  std::string name;
  std::vector<std::int32_t> cu_seqlens{0};
};
Workload workload(const std::string& name, const std::vector<std::pair<int, int>>& documents) {
  Workload w{name};
  for (const auto& [count, length] : documents)
    for (int i = 0; i < count; ++i) w.cu_seqlens.push_back(w.cu_seqlens.back() + length);
  return w;
}

/// The schedule of a workload on the device.
struct Row {
  explicit Row(const Workload& w) {
    shape.tokens = w.cu_seqlens.back();
    shape.documents = static_cast<std::int64_t>(w.cu_seqlens.size()) - 1;
    shape.reach = schedule::reach_of(true, -1, -1);
    shape.forward_tile = 192;
    shape.backward_tile = 128;
    lengths = allocate<std::int32_t>(shape.documents + 1);
    ok(cudaMemcpy(lengths, w.cu_seqlens.data(), w.cu_seqlens.size() * 4, cudaMemcpyHostToDevice));
    memory = allocate<char>(static_cast<std::int64_t>(schedule::gpu::workspace_bytes(shape)));
    run();
    view = schedule::gpu::view(shape, memory);
  }
  ~Row() {
    cudaFree(lengths);
    cudaFree(memory);
  }
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;
  void run() const { ok(schedule::gpu::launch(shape, lengths, memory, nullptr)); }
  schedule::gpu::Shape shape;
  std::int32_t* lengths;
  char* memory;
  schedule::gpu::View view{};
};

struct Buffers {
  std::int64_t elements, slots;
  std::uint16_t *input, *other, *rotated, *growing;  // growing: magnitudes from 2^-12 to 1 over the row
  std::uint8_t *rows, *transposed, *exponents, *prefix;
  std::uint16_t *rows16, *halves;
  std::uint8_t *nvfp4_exponents, *nvfp4_codes, *nvfp4_scales;
  float *row_sum, *d_prime;
  std::int16_t* z;
  std::uint16_t* accumulator;
  std::uint32_t* scratch;
};

/// What the quantiser writes of one operand.
void allocate_outputs(Buffers& b) {
  const std::int64_t codes = b.slots * kHeads * kDim, bytes = b.slots * kHeads;
  b.rows = allocate<std::uint8_t>(codes);
  b.transposed = allocate<std::uint8_t>(codes);
  b.halves = allocate<std::uint16_t>(codes);
  b.nvfp4_exponents = allocate<std::uint8_t>(bytes);
  b.nvfp4_codes = allocate<std::uint8_t>(codes / 2);
  b.nvfp4_scales = allocate<std::uint8_t>(codes / 16);
  b.exponents = allocate<std::uint8_t>(bytes);
  b.prefix = allocate<std::uint8_t>(bytes);
}

Buffers make_buffers(std::int64_t tokens, std::int64_t documents) {
  Buffers b{};
  b.elements = tokens * kHeads * kDim;
  b.slots = sm90::slot_capacity(tokens, documents);
  const std::int64_t codes = b.slots * kHeads * kDim, bytes = b.slots * kHeads;
  allocate_outputs(b);
  b.input = allocate<std::uint16_t>(b.elements);
  b.other = allocate<std::uint16_t>(b.elements);
  b.rotated = allocate<std::uint16_t>(b.elements);
  b.growing = allocate<std::uint16_t>(b.elements);
  b.rows16 = allocate<std::uint16_t>(codes);
  b.row_sum = allocate<float>(bytes);
  b.d_prime = allocate<float>(bytes);
  b.z = allocate<std::int16_t>(bytes);
  b.accumulator = allocate<std::uint16_t>(codes);
  QuantiseParams scratch[3];
  for (QuantiseParams& p : scratch) p.heads = kHeads, p.prefix = Prefix::sticky, p.slots = b.slots;
  b.scratch = allocate<std::uint32_t>(static_cast<std::int64_t>(quantize::gpu::scratch_bytes(scratch) / sizeof(std::uint32_t)));
  std::vector<std::uint16_t> random(static_cast<std::size_t>(b.elements));
  std::uint64_t state = 88172645463325252ull;
  for (std::uint16_t& x : random) {  // sum of four uniforms: bell-shaped enough
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    float sum = -2.f;
    for (int i = 0; i < 4; ++i) sum += static_cast<float>(state >> (16 * i) & 0xffff) / 65536.f;
    x = numerics::encode_bf16(sum * 1.7f);
  }
  ok(cudaMemcpy(b.input, random.data(), random.size() * 2, cudaMemcpyHostToDevice));
  std::vector<std::uint16_t> growing = random;
  for (std::size_t i = 0; i < growing.size(); ++i)
    growing[i] = numerics::encode_bf16(std::ldexp(numerics::decode_bf16(random[i]), static_cast<int>(i * 12 / random.size()) - 12));
  ok(cudaMemcpy(b.growing, growing.data(), growing.size() * 2, cudaMemcpyHostToDevice));
  std::reverse(random.begin(), random.end());
  ok(cudaMemcpy(b.other, random.data(), random.size() * 2, cudaMemcpyHostToDevice));
  std::vector<float> sums(static_cast<std::size_t>(bytes));
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = 1.f + static_cast<float>(i % 977) * 0.37f;
  ok(cudaMemcpy(b.row_sum, sums.data(), sums.size() * 4, cudaMemcpyHostToDevice));
  return b;
}

/// What a launch writes beside exponents.
struct Layouts {
  bool rows, transposed;
  int bytes() const { return int{rows} + int{transposed}; }  // of one element
};
constexpr Layouts kRows{true, false}, kTransposed{false, true}, kBoth{true, true};

QuantiseParams params_of(const Buffers& b, const Row& r, bool rotate, Group group, Prefix prefix, const Layouts& layouts) {
  QuantiseParams p;
  p.input = {b.input, DType::bf16, 0, 0};
  p.heads = kHeads;
  p.head_dim = kDim;
  p.rotate = rotate;
  p.group = group;
  p.prefix = prefix;
  p.headroom = prefix == Prefix::sticky ? kHeadroom : 0;
  p.rows = layouts.rows ? b.rows : nullptr;
  p.transposed = layouts.transposed ? b.transposed : nullptr;
  p.exponents = b.exponents;
  p.prefix_exponents = prefix == Prefix::none ? nullptr : b.prefix;
  p.slots = b.slots;
  p.blocks = r.view.blocks;
  p.block_capacity = r.view.block_capacity;
  p.scratch = b.scratch;
  return p;
}

void quantiser(const Buffers& b, const Row& r, const std::string& name) {
  const auto n = static_cast<double>(b.elements), bytes = static_cast<double>(b.slots * kHeads);
  const auto run = [&](const char* part, bool rotate, Group group, Prefix prefix, const Layouts& layouts, bool growing = false) {
    QuantiseParams p = params_of(b, r, rotate, group, prefix, layouts);
    if (growing) p.input.data = b.growing;
    const int reads = group == Group::tensor ? 2 : 1;  // its exponent is known only when all has been read
    const double moved = n * (2 * reads + layouts.bytes()) + bytes * (prefix == Prefix::none ? 1 : 2);
    row(name, part, time_ms([&] { ok(quantize::gpu::launch_quantise(p, nullptr)); }), moved);
  };
  run("Q mxfp8 inference", true, Group::block, Prefix::none, kRows);
  run("V mxfp8 inference", false, Group::block, Prefix::none, kTransposed);
  run("Q mxfp8 training", true, Group::block, Prefix::none, kBoth);
  run("K mxfp8 training", true, Group::block, Prefix::record, kBoth);
  run("V mxfp8 training", false, Group::block, Prefix::record, kBoth);
  run("K mxfp8 training with dS in BF16", true, Group::block, Prefix::record, kRows);
  run("Q exact inference", true, Group::token, Prefix::none, kRows);
  run("K exact inference", true, Group::token, Prefix::sticky, kRows);
  run("V exact inference", false, Group::token, Prefix::sticky, kTransposed);
  run("Q exact training", true, Group::token, Prefix::none, kBoth);
  run("K exact training", true, Group::token, Prefix::sticky, kBoth);
  run("V exact training", false, Group::token, Prefix::sticky, kBoth);
  run("K tensor inference", true, Group::tensor, Prefix::none, kRows);
  run("K exact inference of growing magnitudes", true, Group::token, Prefix::sticky, kRows, true);
  for (const Group group : {Group::block, Group::token})
    for (const int accumulator_bytes : {2, 0}) {
      quantize::gpu::GradientParams g;
      g.d_o = {b.input, DType::bf16, 0, 0};
      g.o = {b.other, DType::bf16, 0, 0};
      g.heads = g.key_heads = kHeads;
      g.head_dim = kDim;
      g.group = group;
      g.row_sum = b.row_sum;
      g.reach = r.shape.reach;
      g.rows = b.rows;
      g.transposed = b.transposed;
      g.exponents = b.exponents;
      g.d_prime = b.d_prime;
      g.key_prefix = g.value_prefix = b.prefix;
      g.dq_exponent = b.z;
      g.dq_accumulator = accumulator_bytes ? b.accumulator : nullptr;
      g.slots = b.slots;
      g.blocks = r.view.blocks;
      g.block_capacity = r.view.block_capacity;
      const double moved = n * (2 + 2 + 2 + accumulator_bytes) + bytes * (1 + 4 + 4 + 2 + 2);
      const std::string part =
          std::string(group == Group::block ? "dO mxfp8" : "dO exact") + (accumulator_bytes ? "" : " without clearing dQ");
      row(name, part, time_ms([&] { ok(quantize::gpu::launch_gradient(g, nullptr)); }), moved);
    }
}

/// Q, K and V of one call as the backend asks for them, Q and K in rows alone; `b[i]`: the operands' outputs.
void calls(const Buffers (&b)[3], const Row& r, const std::string& name) {
  const auto n = static_cast<double>(b[0].elements), bytes = static_cast<double>(b[0].slots * kHeads);
  const auto run = [&](const std::string& part, Group group, bool training, bool nvfp4) {
    const Prefix prefix = group == Group::token ? Prefix::sticky : training ? Prefix::record : Prefix::none;
    const Layouts scores{!nvfp4 || training, false};
    QuantiseParams p[3] = {params_of(b[0], r, true, group, Prefix::none, scores), params_of(b[1], r, true, group, prefix, scores),
                           params_of(b[2], r, false, group, prefix, {training, true})};
    p[1].input.data = b[0].other;
    for (int i = 0; i < 2 && nvfp4; ++i)
      p[i].nvfp4 = {b[i].halves, b[i].nvfp4_exponents, training ? b[i].nvfp4_codes : nullptr,
                    training ? b[i].nvfp4_scales : nullptr};
    const double written = !nvfp4 ? 1 : training ? 2 + 1 + 0.5 + 1. / 16 : 2;
    const double moved = n * (3 * 2 + 2 * written + (training ? 2 : 1)) + bytes * (prefix == Prefix::none ? 3 : 5);
    row(name, "Q K V of one call " + part, time_ms([&] { ok(quantize::gpu::launch_quantise(p, nullptr)); }), moved);
    row(name, "Q K V one by one " + part, time_ms([&] {
          for (const QuantiseParams& operand : p) ok(quantize::gpu::launch_quantise(operand, nullptr));
        }),
        moved);
  };
  run("mxfp8 inference", Group::block, false, false);
  run("mxfp8 training", Group::block, true, false);
  run("exact inference", Group::token, false, false);
  run("exact training", Group::token, true, false);
  run("nvfp4-exact inference", Group::token, false, true);
  run("nvfp4-exact training", Group::token, true, true);
}

/// Q and K as values again, in one launch.
void values(const Buffers& b, const Row& r, const std::string& name) {
  quantize::gpu::DequantiseParams p;
  p.operands[0] = p.operands[1] = {b.rows, b.exponents, b.rows16, kHeads};
  p.head_dim = kDim;
  p.slots = b.slots;
  p.used_slots = &r.view.totals->slots;
  row(name, "Q and K in BF16", time_ms([&] { ok(quantize::gpu::launch_dequantise(p, nullptr)); }),
      2. * (3. * static_cast<double>(b.elements) + static_cast<double>(b.slots * kHeads)));
}

/// NVFP4 in FP16 alone (inference), then with its codes and scales and the E4M3 codes of dQ and dK; the FP16 values from codes again.
void nvfp4(const Buffers& b, const Row& r, const std::string& name) {
  const auto n = static_cast<double>(b.elements), bytes = static_cast<double>(b.slots * kHeads);
  const auto run = [&](const char* part, Group group, Prefix prefix, bool training) {
    QuantiseParams p = params_of(b, r, true, group, prefix, {training, false});
    p.nvfp4 = {b.halves, b.nvfp4_exponents, training ? b.nvfp4_codes : nullptr, training ? b.nvfp4_scales : nullptr};
    const double written = training ? 2 + 1 + 0.5 + 1. / 16 : 2;
    row(name, part, time_ms([&] { ok(quantize::gpu::launch_quantise(p, nullptr)); }),
        n * (2 + written) + bytes * (prefix == Prefix::none ? 2 : 3));
  };
  run("Q nvfp4 inference", Group::block, Prefix::none, false);
  run("Q nvfp4-exact inference", Group::token, Prefix::none, false);
  run("Q nvfp4 training", Group::block, Prefix::none, true);
  run("Q nvfp4-exact training", Group::token, Prefix::none, true);
  run("K nvfp4-exact training", Group::token, Prefix::sticky, true);
  quantize::gpu::ExpandNvfp4Params p;
  p.codes = b.nvfp4_codes, p.scales = b.nvfp4_scales, p.halves = b.halves, p.heads = kHeads;
  p.head_dim = kDim;
  p.slots = b.slots;
  p.used_slots = &r.view.totals->slots;
  row(name, "K in FP16 from nvfp4", time_ms([&] { ok(quantize::gpu::launch_expand_nvfp4(p, nullptr)); }), n * (0.5 + 1. / 16 + 2));
}

/// INT8 of a training call, K less its mean.
void int8(const Buffers& b, const Row& r, const std::string& name) {
  const auto n = static_cast<double>(b.elements);
  quantize::gpu::MeanParams m;
  m.input = {b.input, DType::bf16, 0, 0};
  m.heads = kHeads;
  m.head_dim = kDim;
  m.slots = b.slots;
  m.documents = r.view.documents;
  m.document_capacity = r.shape.documents;
  auto* const means = reinterpret_cast<float*>(b.accumulator);
  m.means = means;
  row(name, "means of K int8", time_ms([&] { ok(quantize::gpu::launch_means(m, nullptr)); }), 2 * n);
  quantize::gpu::Int8Params common;
  common.input = m.input;
  common.heads = common.key_heads = kHeads;
  common.head_dim = kDim;
  common.scales = reinterpret_cast<float*>(b.scratch);
  common.transposed = b.transposed;
  common.slots = b.slots;
  common.blocks = r.view.blocks;
  common.block_capacity = r.view.block_capacity;
  const auto run = [&](const char* part, double bytes, const auto& change) {
    quantize::gpu::Int8Params p = common;
    change(p);
    row(name, part, time_ms([&] { ok(quantize::gpu::launch_int8(p, nullptr)); }), bytes);
  };
  using Params = quantize::gpu::Int8Params;
  run("Q int8 training", 4 * n, [&](Params& p) { p.rows = b.rows, p.key_means = means, p.key_mean_score = b.d_prime; });
  run("K int8 training", 4 * n, [&](Params& p) { p.rows = b.rows, p.means = means; });
  run("V int8 training", 5 * n, [&](Params& p) { p.rows16 = b.rows16; });
  run("dO int8", 7 * n, [&](Params& p) {
    p.rows16 = b.rows16, p.output = {b.other, DType::bf16, 0, 0};
    p.row_reference = p.row_sum = b.row_sum, p.row_d = b.halves, p.row_lse = b.d_prime;
  });
}

void unfused(const Buffers& b, const Row& r, const std::string& name) {
  const auto n = static_cast<double>(b.elements);
  const auto run = [&](const char* part, bool rotate, bool transposed, double bytes) {
    const QuantiseParams p = params_of(b, r, rotate, Group::block, Prefix::none, {true, transposed});
    row(name, part, time_ms([&] { ok(bench::launch_unfused(p, b.rotated, nullptr)); }), bytes);
  };
  run("Q unfused inference", true, false, n * (4 + 2 + 3));
  run("Q unfused training", true, true, n * (4 + 2 + 3 + 2));
  run("V unfused training", false, true, n * (2 + 3 + 2));
}

}  // namespace

int main(int argc, char** argv) try {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  if (quick) batches = 3, per_batch = 1;
  std::vector<Workload> workloads = {workload("16x4096", {{16, 4096}}),
                                     workload("8x8192", {{8, 8192}}),
                                     workload("2x32768", {{2, 32768}}),
                                     workload("256x256", {{256, 256}}),
                                     workload("8192+224x256", {{1, 8192}, {224, 256}}),
                                     workload("655x100", {{655, 100}})};
  if (quick) workloads = {workload("4x150", {{4, 150}}), workload("1x700", {{1, 700}})};
  std::int64_t tokens = 0, documents = 0;
  for (const Workload& w : workloads) {
    tokens = std::max<std::int64_t>(tokens, w.cu_seqlens.back());
    documents = std::max<std::int64_t>(documents, static_cast<std::int64_t>(w.cu_seqlens.size()));
  }
  Buffers b = make_buffers(tokens, documents), of_call[3] = {b, b, b};
  allocate_outputs(of_call[1]);
  allocate_outputs(of_call[2]);
  const double copied = 2.0 * static_cast<double>(b.elements) * 2;
  const auto copy = [&] {
    ok(cudaMemcpyAsync(b.rotated, b.input, static_cast<std::size_t>(b.elements) * 2, cudaMemcpyDeviceToDevice));
  };
  cudaDeviceProp properties;
  ok(cudaGetDeviceProperties(&properties, 0));
  copy_gbps = copied / time_ms(copy) * 1e-6;
  std::printf("# %s\nworkload,part,ms,mb,gb_per_s,share_of_copy\n", properties.name);
  row("-", "copy", copied / copy_gbps * 1e-6, copied);
  for (const Workload& w : workloads) {
    const Row r(w);
    b.elements = std::int64_t{w.cu_seqlens.back()} * kHeads * kDim;
    b.slots = sm90::slot_capacity(r.shape.tokens, r.shape.documents);
    quantiser(b, r, w.name);
    for (Buffers& operand : of_call) operand.elements = b.elements, operand.slots = b.slots;
    calls(of_call, r, w.name);
    values(b, r, w.name);
    nvfp4(b, r, w.name);
    int8(b, r, w.name);
    if (w.name != workloads[0].name) continue;
    unfused(b, r, w.name);
    bench::time_full(b.input, b.row_sum, r.shape.tokens / 128 * 128, kHeads, time_ms,
                     [&](const std::string& part, double ms, double bytes) { row(w.name, part, ms, bytes); });
  }
  row("-", "copy again", time_ms(copy), copied);
  std::vector<Workload> schedules = workloads;
  if (!quick) schedules.push_back(workload("131072x1", {{131072, 1}}));
  for (const Workload& w : schedules) {
    const Row r(w);
    row(w.name, "schedule", time_ms([&] { r.run(); }), 0);
    schedule::gpu::ClearParams clear;
    clear.tensors[0] = {{b.rotated, DType::bf16, 0, 0}, kHeads};
    clear.head_dim = kDim;
    clear.tokens = r.shape.tokens;
    row(w.name, "clear with nothing to do",
        time_ms([&] { ok(schedule::gpu::launch_clear_uncovered(clear, r.view.totals, nullptr)); }), 0);
  }
  ok(cudaDeviceSynchronize());
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "kernel_quantise_bench: %s\n", error.what());
  return 1;
}
