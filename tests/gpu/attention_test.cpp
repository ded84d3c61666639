// SPDX-License-Identifier: Apache-2.0
// The forward pass on the GPU through the public API: parity with the CPU backend, exactness, isolation, repetition, graphs.
#include <random>

#include "support/attention.hpp"

namespace flamia::test {
namespace {

class GpuAttention : public GpuTest {};

const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all{
      {{300}, 2, 2, 128, {true, -1, -1}, 0},       {{1, 0, 129, 64, 257}, 4, 2, 128, {true, -1, -1}, 5},
      {{200, 131}, 2, 1, 128, {false, -1, -1}, 0}, {{333, 40}, 2, 2, 128, {true, 70, 0}, 3},
      {{333, 40}, 2, 2, 128, {false, 50, 90}, 0},  {{300, 17}, 2, 1, 64, {true, -1, -1}, 1},
  };
  return all;
}

bool has_nvfp4_scores(const std::string& name) { return name.rfind("nvfp4", 0) == 0; }

/// The CPU's numbers with the tensor core's accumulator: what is left is exp2's last bit, sums in another order and O in BF16. Scores in FP16
/// are summed in FP32 by both; so then is P V on the CPU, and O differs by what the accumulator loses.
TEST_F(GpuAttention, AgreesWithTheCpu) {
  for (const char* name : {"mxfp8", "mxfp8-exact", "fp8-tensor", "mxfp8 ref=phase32", "mxfp8-exact headroom=0 ref=phase32", "nvfp4",
                           "nvfp4-exact", "nvfp4-exact headroom=0 ref=phase32"})
    for (const Shape& shape : shapes()) {
      SCOPED_TRACE(std::string(name) + ", first length " + std::to_string(shape.lengths[0]));
      const Input in = normal_input(shape, fresh_seed());
      const GpuForward gpu = gpu_forward(in, recipe(name));
      RunOptions options;
      options.backward = false;
      const Result cpu = run(in, recipe(has_nvfp4_scores(name) ? name : std::string(name) + " acc=hopper13"), options);
      EXPECT_LT(relative_l2(gpu.o, cpu.o), has_nvfp4_scores(name) ? 8e-3 : 5e-3);
      EXPECT_LT(worst_row(gpu.o, cpu.o, shape.head_dim), 0.1);
      for (std::size_t i = 0; i < gpu.lse.size(); ++i) {
        if (std::isinf(cpu.lse[i]))
          EXPECT_EQ(gpu.lse[i], cpu.lse[i]) << i;
        else
          EXPECT_NEAR(gpu.lse[i], cpu.lse[i], 2e-2) << i;
      }
      // control: the same comparison must notice a neighbouring key head or a mask off by one
      Input other = in;
      other.problem.mask = {!shape.mask.causal, shape.mask.left, shape.mask.causal ? -1 : shape.mask.right};
      EXPECT_GT(relative_l2(gpu_forward(other, recipe(name)).o, cpu.o), 5e-2);
    }
}

TEST_F(GpuAttention, AccurateAgainstTheOracle) {
  for (const bool causal : {true, false}) {
    const Input in = normal_input({{1024, 1024}, 2, 2, 128, {causal, -1, -1}, 0}, fresh_seed());
    const cpu::OracleResult exact = truth(in, false);
    for (const char* name : {"mxfp8", "mxfp8-exact"}) {
      const GpuForward gpu = gpu_forward(in, recipe(name));
      EXPECT_GT(cosine(gpu.o, exact.o), causal ? .9985 : .9980) << name;
      EXPECT_LT(worst_row(gpu.o, exact.o, 128), 0.5) << name;
    }
  }
}

/// Later tokens times 2^4, 2^10, 10^4: no bit of an earlier row moves. Other documents never move.
TEST_F(GpuAttention, LaterTokensReachNobody) {
  for (const char* name :
       {"mxfp8-exact", "mxfp8-exact ref=phase32", "mxfp8", "nvfp4-exact", "nvfp4-exact ref=phase32", "nvfp4", "fp8-tensor"})
    for (const float factor : {16.f, 1024.f, 1e4f}) {
      const Shape shape{{150, 400, 90}, 2, 2, 128, {true, -1, -1}, 0};
      const Input in = normal_input(shape, fresh_seed());
      const std::int64_t cut = 150 + 201;  // in the second document, inside a token-block
      Input loud = in;
      for (std::int64_t t = cut; t < 550; ++t)
        for (int head = 0; head < 2; ++head)
          for (int c = 0; c < 128; ++c)
            for (float* x : {loud.q_row(t, head), loud.k_row(t, head), loud.v_row(t, head)})
              x[c] = numerics::round_bf16(x[c] * factor);
      const GpuForward quiet = gpu_forward(in, recipe(name)), changed = gpu_forward(loud, recipe(name));
      const std::string text = recipe(name).name();
      const bool leaks = text == "fp8-tensor";
      const std::int64_t safe =
          text.find("-exact") != std::string::npos ? cut : 150 + 192;  // else the token-block of the cut starts there
      if (leaks) {
        EXPECT_GT(elements_that_differ(quiet, changed, in.problem, 150, cut), 0u) << text;
      } else {
        EXPECT_EQ(elements_that_differ(quiet, changed, in.problem, 150, safe), 0u) << text << " x" << factor;
        EXPECT_EQ(elements_that_differ(quiet, changed, in.problem, 0, 150), 0u) << text;
        EXPECT_EQ(elements_that_differ(quiet, changed, in.problem, 550, 640), 0u) << text;
      }
      EXPECT_GT(elements_that_differ(quiet, changed, in.problem, cut, 550), 0u) << text;  // control: the change was seen
    }
}

TEST_F(GpuAttention, RepeatsBitForBit) {
  const Input in = normal_input({{700, 33, 1, 512, 90}, 4, 2, 128, {true, -1, -1}, 0}, fresh_seed());
  for (const char* name : {"mxfp8", "mxfp8-exact", "nvfp4-exact"}) {
    GpuCall call(in.problem, recipe(name));
    const DeviceOperands operands(in);
    GpuForward first;
    for (int i = 0; i < 100; ++i) {
      call.poison();
      ASSERT_TRUE(call.enqueue(operands).ok());
      cuda_ok(cudaDeviceSynchronize());
      const GpuForward now = call.result();
      if (i == 0) first = now;
      ASSERT_EQ(elements_that_differ(first, now, in.problem, 0, in.problem.tokens), 0u) << name << " run " << i;
    }
  }
}

/// The CPU's accumulator is FP32 here, the tensor core's has 13 bits: a row's maximum may land on another step of the grid, and the codes of
/// P, whose sum l is, are then rounded twice, each by 1/17 of itself at most.
constexpr float kTwoRoundings = 0.1213f;  // 2 ln(17/16)

/// Random packings against the CPU; poisoned output everywhere, tokens left over included.
TEST_F(GpuAttention, FuzzedPackings) {
  std::mt19937 random(fresh_seed());
  int beyond = 0;
  for (int i = 0; i < 60; ++i) {
    Shape shape;
    shape.head_dim = random() % 4 == 0 ? 64 : 128;
    shape.query_heads = 2;
    shape.key_heads = 1 + static_cast<int>(random() % 2);
    shape.tail = static_cast<std::int64_t>(random() % 40);
    for (std::size_t b = 0, n = 1 + random() % 5; b < n; ++b)
      shape.lengths.push_back(random() % 5 == 0 ? random() % 2 : random() % 400);
    switch (random() % 3) {
      case 0:
        shape.mask = {true, -1, -1};
        break;
      case 1:
        shape.mask = {false, -1, -1};
        break;
      default:
        shape.mask = {random() % 2 == 0, static_cast<std::int64_t>(random() % 200), static_cast<std::int64_t>(random() % 200)};
    }
    const Input in = normal_input(shape, static_cast<std::uint32_t>(random()));
    if (in.problem.tokens == 0) continue;
    const char* const names[] = {"mxfp8",       "mxfp8-exact",           "mxfp8-exact headroom=0", "nvfp4",
                                 "nvfp4-exact", "nvfp4-exact headroom=0"};  // without headroom a document's first tile is mixed
    const char* const name = names[i % 6];
    RunOptions options;
    options.backward = false;
    const Result cpu = run(in, recipe(name), options);
    const GpuForward gpu = gpu_forward(in, recipe(name));
    ASSERT_LT(relative_l2(gpu.o, cpu.o), 8e-3) << "packing " << i << " " << name;
    float worst = 0;
    for (std::size_t x = 0; x < gpu.lse.size(); ++x)
      if (std::isinf(cpu.lse[x]))
        ASSERT_EQ(gpu.lse[x], cpu.lse[x]) << "packing " << i;
      else
        worst = std::max(worst, std::fabs(gpu.lse[x] - cpu.lse[x]));
    ASSERT_LT(worst, kTwoRoundings) << "packing " << i;
    if (i % 10 != 0 || in.cu_seqlens.back() < 2) continue;  // control: queries a tenth larger
    Input other = in;
    for (float& value : other.q) value = numerics::round_bf16(value * 1.1f);
    const GpuForward louder = gpu_forward(other, recipe(name));
    for (std::size_t x = 0; x < gpu.lse.size(); ++x)
      if (!std::isinf(cpu.lse[x])) beyond += std::fabs(louder.lse[x] - cpu.lse[x]) > kTwoRoundings;
  }
  EXPECT_GT(beyond, 100);
}

/// The lengths change between two replays of one graph.
TEST_F(GpuAttention, GraphReplaysWithOtherLengths) {
  const Input in = normal_input({{300, 200, 100}, 2, 2, 128, {true, -1, -1}, 0}, fresh_seed());
  Input other = in;
  other.cu_seqlens = {0, 40, 40, 555};
  GpuCall call(in.problem, recipe("mxfp8-exact"));
  DeviceOperands operands(in);
  call.poison();
  ASSERT_TRUE(call.enqueue(operands).ok());
  cuda_ok(cudaDeviceSynchronize());
  Graph graph([&](cudaStream_t stream) { EXPECT_TRUE(call.enqueue(operands, stream).ok()); });
  const Input* const order[] = {&in, &other, &in};
  for (const Input* lengths : order) {
    operands.cu_seqlens.upload(lengths->cu_seqlens);
    call.poison();
    graph.replay();
    const GpuForward expected = gpu_forward(*lengths, recipe("mxfp8-exact"));
    EXPECT_EQ(elements_that_differ(call.result(), expected, in.problem, 0, in.problem.tokens), 0u);
  }
}

/// NaN in a later key: rows before it and other documents keep every bit, rows that see it are NaN.
TEST_F(GpuAttention, NanStaysWithTheRowsThatSeeIt) {
  const Input in = normal_input({{100, 300}, 2, 2, 128, {true, -1, -1}, 0}, fresh_seed());
  for (const char* name : {"mxfp8-exact", "nvfp4-exact"}) {
    const GpuForward clean = gpu_forward(in, recipe(name));
    for (const bool of_key : {false, true})
      for (const std::int64_t at : {std::int64_t{0}, std::int64_t{127}, std::int64_t{128}, std::int64_t{200}, std::int64_t{299}}) {
        Input bad = in;
        (of_key ? bad.k_row(100 + at, 1) : bad.v_row(100 + at, 1))[17] = numerics::quiet_nan();
        const GpuForward dirty = gpu_forward(bad, recipe(name));
        EXPECT_EQ(elements_that_differ(clean, dirty, in.problem, 0, 100 + at), 0u) << name << " " << at;
        for (std::int64_t t = 100 + at; t < 400; ++t) {
          EXPECT_TRUE(std::isnan(dirty.o[static_cast<std::size_t>((t * 2 + 1) * 128)])) << name << " " << at << " " << t;
          EXPECT_FALSE(std::isnan(dirty.o[static_cast<std::size_t>((t * 2) * 128)])) << name << " " << at << " " << t;
        }
      }
  }
}

TEST_F(GpuAttention, RefusesWhatItCannotDo) {
  Plan plan;
  PlanOptions options;
  options.device = Device::cuda;
  options.training = false;
  Problem problem;
  problem.tokens = 64;
  problem.query_heads = problem.key_heads = 1;
  problem.head_dim = 96;
  EXPECT_EQ(Plan::create(problem, recipe("mxfp8"), options, &plan).code(), StatusCode::unsupported);
  problem.head_dim = 128;
  EXPECT_EQ(Plan::create(problem, recipe("bf16"), options, &plan).code(), StatusCode::unsupported);
  EXPECT_EQ(Plan::create(problem, recipe("nvfp4 rotate=off"), options, &plan).code(), StatusCode::unsupported);
  EXPECT_EQ(Plan::create(problem, recipe("nvfp4 nvfp4=amax"), options, &plan).code(), StatusCode::unsupported);
  options.training =
      true;  // forward alone runs; the backward kernel has one grouping of dK, and scores of NVFP4 with dS in BF16 alone
  EXPECT_EQ(Plan::create(problem, recipe("mxfp8 dk=64x32"), options, &plan).code(), StatusCode::unsupported);
  EXPECT_EQ(Plan::create(problem, recipe("nvfp4 ds=e4m3"), options, &plan).code(), StatusCode::unsupported);
  EXPECT_TRUE(Plan::create(problem, recipe("nvfp4"), options, &plan).ok());
  EXPECT_TRUE(Plan::create(problem, recipe("mxfp8"), options, &plan).ok());
}

}  // namespace
}  // namespace flamia::test
