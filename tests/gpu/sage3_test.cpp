// SPDX-License-Identifier: Apache-2.0
// `sage3` on the GPU through the public API (inference): parity with the CPU backend, both first levels of P, what leaks and what does not,
// NaN, repetition, graphs.
#include <random>

#include "kernels/recipe_accuracy.hpp"
#include "support/attention.hpp"

namespace flamia::test {
namespace {

class GpuSage3 : public GpuTest {};

constexpr const char* kByRow = "sage3";
constexpr const char* kByConstant = "sage3 p1=e2m1/1x16/e4m3/amax/x0.00037202382";  // 1 / 2688

Result on_cpu(const Input& in, const char* name) {
  RunOptions options;
  options.backward = false;
  return run(in, recipe(name), options);
}

/// What differs: sums in another order, which may put a row's maximum on another step of the grid (then all of its codes are rounded anew), exp2's
/// last bit, O in BF16.
constexpr double kParity = 8e-3;
constexpr float kTwoRoundings = 0.1213f;  // 2 ln(17/16): a scale of P, rounded twice

void agrees(const Input& in, const GpuForward& gpu, const Result& cpu) {
  EXPECT_LT(relative_l2(gpu.o, cpu.o), kParity);
  EXPECT_LT(worst_row(gpu.o, cpu.o, in.problem.head_dim), 0.25);
  for (std::size_t i = 0; i < gpu.lse.size(); ++i) {
    if (std::isinf(cpu.lse[i]))
      ASSERT_EQ(gpu.lse[i], cpu.lse[i]) << i;
    else
      ASSERT_NEAR(gpu.lse[i], cpu.lse[i], kTwoRoundings) << i;
  }
}

TEST_F(GpuSage3, AgreesWithTheCpu) {
  const std::vector<Shape> shapes{{{300}, 2, 2, 128, {true, -1, -1}, 0},       {{1, 0, 129, 64, 257}, 4, 2, 128, {true, -1, -1}, 5},
                                  {{200, 131}, 2, 1, 128, {false, -1, -1}, 0}, {{200, 131}, 2, 1, 128, {false, -1, 0}, 0},
                                  {{300, 17}, 2, 1, 64, {true, -1, -1}, 1},    {{260, 600}, 2, 2, 64, {false, -1, -1}, 0}};
  for (const char* name : {kByRow, kByConstant})
    for (const Shape& shape : shapes) {
      SCOPED_TRACE(std::string(name) + ", first length " + std::to_string(shape.lengths[0]));
      Input in = normal_input(shape, fresh_seed());
      for (std::size_t i = 0; i < in.k.size(); i += 5) in.k[i] = numerics::round_bf16(in.k[i] + 6.f);  // means worth subtracting
      for (std::size_t i = 0; i < in.q.size(); i += 7) in.q[i] = numerics::round_bf16(in.q[i] - 2.f);
      const Result cpu = on_cpu(in, name);
      const GpuForward gpu = gpu_forward(in, recipe(name));
      agrees(in, gpu, cpu);
      // controls: another mask, and means over other tokens
      Input other = in;
      other.problem.mask = {!(shape.mask.causal || shape.mask.right == 0), -1, -1};
      EXPECT_GT(relative_l2(gpu_forward(other, recipe(name)).o, cpu.o), 5e-2);
      EXPECT_GT(relative_l2(gpu.o, on_cpu(in, "sage3 smooth-q=off").o), 1.5 * kParity);
    }
}

TEST_F(GpuSage3, FuzzedPackings) {
  std::mt19937 random(fresh_seed());
  int beyond = 0;
  for (int i = 0; i < 30 && !HasFailure(); ++i) {
    Shape shape;
    shape.head_dim = random() % 3 == 0 ? 64 : 128;
    shape.query_heads = 2;
    shape.key_heads = 1 + static_cast<int>(random() % 2);
    shape.tail = static_cast<std::int64_t>(random() % 40);
    shape.mask = {random() % 2 == 0, -1, -1};
    for (std::size_t b = 0, n = 1 + random() % 5; b < n; ++b)
      shape.lengths.push_back(random() % 5 == 0 ? random() % 2 : random() % 400);
    const Input in = normal_input(shape, static_cast<std::uint32_t>(random()));
    if (in.problem.tokens == 0) continue;
    SCOPED_TRACE("packing " + std::to_string(i));
    const char* const name = i % 2 == 0 ? kByRow : kByConstant;
    const Result cpu = on_cpu(in, name);
    agrees(in, gpu_forward(in, recipe(name)), cpu);
    if (i % 10 != 0) continue;  // control: queries a tenth larger
    Input other = in;
    for (float& value : other.q) value = numerics::round_bf16(value * 1.1f);
    const GpuForward louder = gpu_forward(other, recipe(name));
    for (std::size_t x = 0; x < louder.lse.size(); ++x)
      if (!std::isinf(cpu.lse[x])) beyond += std::fabs(louder.lse[x] - cpu.lse[x]) > kTwoRoundings;
  }
  EXPECT_GT(beyond, 20);
}

TEST_F(GpuSage3, AccurateAgainstTheOracle) {
  for (const bool causal : {true, false}) {
    const Input in = normal_input({{1024, 1024}, 2, 2, 128, {causal, -1, -1}, 0}, fresh_seed());
    const double reached = cosine(gpu_forward(in, recipe(kByRow)).o, truth(in, false).o);
    EXPECT_GT(reached, .98) << causal;
    EXPECT_LT(reached, .995) << causal;  // control: 8 bits reach .9988
  }
}

/// The mean of K is one over the document: later tokens reach earlier rows, as documented. Other documents never move.
TEST_F(GpuSage3, OtherDocumentsKeepEveryBit) {
  const Input in = normal_input({{150, 400, 90}, 2, 2, 128, {true, -1, -1}, 0}, fresh_seed());
  Input loud = in;
  for (std::int64_t t = 350; t < 550; ++t)
    for (int head = 0; head < 2; ++head)
      for (int c = 0; c < 128; ++c)
        for (float* x : {loud.q_row(t, head), loud.k_row(t, head), loud.v_row(t, head)}) x[c] = numerics::round_bf16(x[c] * 1e4f);
  const GpuForward quiet = gpu_forward(in, recipe(kByRow)), changed = gpu_forward(loud, recipe(kByRow));
  EXPECT_EQ(elements_that_differ(quiet, changed, in.problem, 0, 150), 0u);
  EXPECT_EQ(elements_that_differ(quiet, changed, in.problem, 550, 640), 0u);
  EXPECT_GT(elements_that_differ(quiet, changed, in.problem, 150, 350), 0u);
}

/// A flagged key reaches the rows that see it, a flagged value those that see its block of 16: as on the CPU.
TEST_F(GpuSage3, NanReachesTheSameRowsAsOnTheCpu) {
  const Input in = normal_input({{100, 300}, 2, 2, 128, {true, -1, -1}, 0}, fresh_seed());
  for (int operand = 0; operand < 3; ++operand)
    for (const std::int64_t at : {std::int64_t{0}, std::int64_t{127}, std::int64_t{200}, std::int64_t{299}}) {
      SCOPED_TRACE(testing::Message() << "operand " << operand << " at " << at);
      Input bad = in;
      (operand == 0   ? bad.q_row(100 + at, 1)
       : operand == 1 ? bad.k_row(100 + at, 1)
                      : bad.v_row(100 + at, 1))[17] = at == 127 ? numerics::infinity() : numerics::quiet_nan();
      const GpuForward gpu = gpu_forward(bad, recipe(kByRow));
      const Result cpu = on_cpu(bad, kByRow);
      std::size_t wrong = 0, nans = 0;
      for (std::size_t i = 0; i < gpu.o.size(); ++i)
        wrong += std::isnan(gpu.o[i]) != std::isnan(cpu.o[i]), nans += std::isnan(gpu.o[i]);
      for (std::size_t i = 0; i < gpu.lse.size(); ++i) wrong += std::isnan(gpu.lse[i]) != std::isnan(cpu.lse[i]);
      EXPECT_EQ(wrong, 0u);
      EXPECT_GT(nans, 0u);
      EXPECT_LT(nans, gpu.o.size() / 2);
    }
}

TEST_F(GpuSage3, RepeatsAndReplaysWithOtherLengths) {
  const Input in = normal_input({{300, 200, 100}, 4, 2, 128, {true, -1, -1}, 0}, fresh_seed());
  Input other = in;
  other.cu_seqlens = {0, 40, 40, 555};
  GpuCall call(in.problem, recipe(kByRow));
  DeviceOperands operands(in);
  call.poison();
  ASSERT_TRUE(call.enqueue(operands).ok());
  cuda_ok(cudaDeviceSynchronize());
  Graph graph([&](cudaStream_t stream) { EXPECT_TRUE(call.enqueue(operands, stream).ok()); });
  const GpuForward expected[] = {gpu_forward(in, recipe(kByRow)), gpu_forward(other, recipe(kByRow))};
  EXPECT_GT(elements_that_differ(expected[0], expected[1], in.problem, 0, in.problem.tokens), 0u);
  for (int i = 0; i < 50; ++i) {
    operands.cu_seqlens.upload(i % 2 == 0 ? in.cu_seqlens : other.cu_seqlens);
    call.poison();
    graph.replay();
    ASSERT_EQ(elements_that_differ(call.result(), expected[i % 2], in.problem, 0, in.problem.tokens), 0u) << i;
  }
}

TEST_F(GpuSage3, RefusesWhatItCannotDo) {
  Plan plan;
  PlanOptions options;
  options.device = Device::cuda;
  options.training = false;
  Problem problem;
  problem.tokens = 64;
  problem.query_heads = problem.key_heads = 1;
  problem.head_dim = 128;
  EXPECT_TRUE(Plan::create(problem, recipe(kByRow), options, &plan).ok());
  for (const char* name : {"sage3-exact", "sage3 smooth-q=off", "sage3 rotate=on", "sage3 p1=e2m1/1x32/ue8m0/floor"})
    EXPECT_EQ(Plan::create(problem, recipe(name), options, &plan).code(), StatusCode::unsupported) << name;
  problem.mask.left = 16;
  EXPECT_FALSE(Plan::create(problem, recipe(kByRow), options, &plan).ok());
  problem.mask.left = -1;
  options.training = true;
  EXPECT_FALSE(Plan::create(problem, recipe(kByRow), options, &plan).ok());
}

}  // namespace
}  // namespace flamia::test
