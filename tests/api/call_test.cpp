// SPDX-License-Identifier: Apache-2.0
// Calls: bad tensors are refused with nothing written; strides, views and threads change no bit of the result.
#include "call.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <cmath>
#include <thread>

#include "numerics/format.hpp"

namespace flamia::test {
namespace {

using testing::HasSubstr;

template <class Bend>
void forward_refused(Bend bend, const std::vector<std::string>& words) {
  Call call;
  bend(call);
  const Status s = call.run_forward();
  EXPECT_EQ(s.code(), StatusCode::invalid_argument);
  for (const std::string& word : words) EXPECT_THAT(s.message(), HasSubstr(word));
  EXPECT_TRUE(call.untouched()) << s.message();
}

template <class Bend>
void backward_refused(Bend bend, const std::vector<std::string>& words) {
  Call call;
  bend(call);
  const Status s = call.run_backward();
  EXPECT_EQ(s.code(), StatusCode::invalid_argument);
  for (const std::string& word : words) EXPECT_THAT(s.message(), HasSubstr(word));
  EXPECT_TRUE(call.untouched()) << s.message();
}

TEST(Call, TheControlRuns) {
  Call call;
  ASSERT_TRUE(call.run_forward().ok());
  ASSERT_TRUE(call.run_backward().ok());
  for (const std::vector<float>* out : {&call.o, &call.d_q, &call.d_k, &call.d_v, &call.lse})
    EXPECT_EQ(std::count(out->begin(), out->end(), kPoison), 0);
}

TEST(Call, ForwardRefuses) {
  forward_refused([](Call& c) { c.plan = Plan(); }, {"plan is empty"});
  forward_refused([](Call& c) { c.forward.q.data = nullptr; }, {"q is null"});
  forward_refused([](Call& c) { c.forward.v.data = nullptr; }, {"v is null"});
  forward_refused([](Call& c) { c.forward.o.data = nullptr; }, {"o is null"});
  forward_refused([](Call& c) { c.forward.lse = nullptr; }, {"lse is null"});
  forward_refused([](Call& c) { c.forward.cu_seqlens = nullptr; }, {"cu_seqlens is null"});
  forward_refused([](Call& c) { c.forward.k.dtype = DType::bf16; }, {"k.dtype", "q.dtype"});
  forward_refused([](Call& c) { c.forward.q.dtype = static_cast<DType>(9); }, {"q.dtype = 9"});
  forward_refused([](Call& c) { c.forward.o.dtype = DType::f16; }, {"o.dtype = f16"});
  forward_refused([](Call& c) { c.forward.k.data = reinterpret_cast<const char*>(c.k.data()) + 2; },
                  {"k is not aligned to 4 bytes"});
  forward_refused([](Call& c) { c.forward.q.token_stride = -1; }, {"q has token_stride -1"});
  forward_refused([](Call& c) { c.forward.q.token_stride = std::int64_t{1} << 60; }, {"q with token_stride"});
  forward_refused([](Call& c) { c.forward.o.head_stride = 16; }, {"o with token_stride 0 and head_stride 16", "twice"});
  forward_refused([](Call& c) { c.forward.o.token_stride = 64; }, {"o with token_stride 64", "twice"});
  forward_refused([](Call& c) { c.forward.q.data = c.o.data(); }, {"q and o share memory"});
  forward_refused([](Call& c) { c.forward.lse = c.o.data() + 100; }, {"o and lse share memory"});
}

TEST(Call, ForwardRefusesBuffersAndDocuments) {
  const auto with = [](Call& c, void* saved, void* workspace) { return attention_forward(c.plan, c.forward, saved, workspace); };
  Call call;
  char* saved = static_cast<char*>(call.saved->get());
  char* workspace = static_cast<char*>(call.workspace->get());
  EXPECT_THAT(with(call, nullptr, workspace).message(), HasSubstr("saved is null"));
  EXPECT_THAT(with(call, saved, nullptr).message(), HasSubstr("workspace is null"));
  EXPECT_THAT(with(call, saved + 16, workspace).message(), HasSubstr("saved is not aligned to 256"));
  EXPECT_THAT(with(call, saved, workspace + 64).message(), HasSubstr("workspace is not aligned to 256"));
  EXPECT_THAT(with(call, workspace, workspace).message(), HasSubstr("saved and workspace share memory"));
  EXPECT_TRUE(call.untouched());
  forward_refused([](Call& c) { c.offsets[0] = 1; }, {"cu_seqlens[0] = 1"});
  forward_refused([](Call& c) { c.offsets[2] = 5; }, {"cu_seqlens[2] = 5"});
  forward_refused([](Call& c) { c.offsets[3] = 141; }, {"cu_seqlens[3] = 141", "140"});
  forward_refused([](Call& c) { c.offsets[1] = -70; }, {"cu_seqlens[1] = -70"});
}

TEST(Call, BackwardRefuses) {
  backward_refused([](Call& c) { c.backward.d_o.data = nullptr; }, {"d_o is null"});
  backward_refused([](Call& c) { c.backward.o.data = nullptr; }, {"o is null"});
  backward_refused([](Call& c) { c.backward.d_k.data = nullptr; }, {"d_k is null"});
  backward_refused([](Call& c) { c.backward.d_v.dtype = DType::f16; }, {"d_v.dtype = f16"});
  backward_refused([](Call& c) { c.backward.d_q.data = c.d_o.data(); }, {"d_o and d_q share memory"});
  backward_refused([](Call& c) { c.backward.d_v.data = c.d_k.data(); }, {"d_k and d_v share memory"});
  backward_refused([](Call& c) { c.backward.d_v.data = c.saved->get(); }, {"d_v and saved share memory"});
  backward_refused([](Call& c) { c.offsets[3] = 0; }, {"cu_seqlens[3] = 0"});
  Call call;
  PlanOptions inference;
  inference.training = false;
  ASSERT_TRUE(Plan::create(call.problem, call.plan.recipe(), inference, &call.plan).ok());
  EXPECT_THAT(call.run_backward().message(), HasSubstr("training = false"));
}

TEST(Call, InferenceGivesTheSameOutput) {
  Call training, inference;
  PlanOptions options;
  options.training = false;
  ASSERT_TRUE(Plan::create(inference.problem, inference.plan.recipe(), options, &inference.plan).ok());
  const Memory workspace(inference.plan.workspace_bytes(Pass::forward));
  ASSERT_TRUE(training.run_forward().ok());
  ASSERT_TRUE(attention_forward(inference.plan, inference.forward, nullptr, workspace.get()).ok());
  EXPECT_TRUE(same_bits(training.o, inference.o));
  EXPECT_TRUE(same_bits(training.lse, inference.lse));
}

/// q, k and v as views of one [tokens, heads, 3, dim] tensor, and gradients as views of another: they interleave and share nothing.
TEST(Call, InterleavedViews) {
  Problem problem = small_problem();
  problem.key_heads = problem.query_heads;
  Call dense("mxfp8", problem), packed("mxfp8", problem);
  ASSERT_TRUE(dense.run_forward().ok());
  ASSERT_TRUE(dense.run_backward().ok());
  const std::size_t dim = 32, rows = dense.q.size() / dim;
  std::vector<float> in(3 * dense.q.size()), out(3 * dense.q.size(), kPoison);
  for (std::size_t row = 0; row < rows; ++row)
    for (std::size_t part = 0; part < 3; ++part)
      std::copy_n((part == 0   ? dense.q
                   : part == 1 ? dense.k
                               : dense.v)
                          .begin() +
                      static_cast<std::ptrdiff_t>(row * dim),
                  dim, in.begin() + static_cast<std::ptrdiff_t>((3 * row + part) * dim));
  const std::int64_t token = 4 * 3 * 32, head = 3 * 32;
  packed.forward.q = {in.data(), DType::f32, token, head};
  packed.forward.k = {in.data() + dim, DType::f32, token, head};
  packed.forward.v = {in.data() + 2 * dim, DType::f32, token, head};
  packed.backward.d_q = {out.data(), DType::f32, token, head};
  packed.backward.d_k = {out.data() + dim, DType::f32, token, head};
  packed.backward.d_v = {out.data() + 2 * dim, DType::f32, token, head};
  ASSERT_TRUE(packed.run_forward().ok());
  const Status s = packed.run_backward();
  ASSERT_TRUE(s.ok()) << s.message();
  EXPECT_TRUE(same_bits(dense.o, packed.o));
  for (std::size_t row = 0; row < rows; ++row)
    for (std::size_t part = 0; part < 3; ++part)
      ASSERT_EQ(std::memcmp((part == 0   ? dense.d_q
                             : part == 1 ? dense.d_k
                                         : dense.d_v)
                                    .data() +
                                row * dim,
                            out.data() + (3 * row + part) * dim, dim * sizeof(float)),
                0)
          << row << " " << part;
  packed.backward.d_v.data = out.data() + dim + 16;  // half a head off: now they do share elements
  EXPECT_THAT(packed.run_backward().message(), HasSubstr("d_k and d_v share memory"));
}

/// [heads, tokens, dim] in memory.
TEST(Call, HeadMajor) {
  Call dense, moved;
  ASSERT_TRUE(dense.run_forward().ok());
  const std::int64_t tokens = 140, dim = 32;
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t h = 0; h < 4; ++h)
      std::copy_n(dense.q.begin() + (t * 4 + h) * dim, dim, moved.q.begin() + (h * tokens + t) * dim);
  moved.forward.q.token_stride = moved.forward.o.token_stride = dim;
  moved.forward.q.head_stride = moved.forward.o.head_stride = tokens * dim;
  const Status s = moved.run_forward();
  ASSERT_TRUE(s.ok()) << s.message();
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t h = 0; h < 4; ++h)
      ASSERT_EQ(std::memcmp(&dense.o[static_cast<std::size_t>((t * 4 + h) * dim)],
                            &moved.o[static_cast<std::size_t>((h * tokens + t) * dim)], 128),
                0);
}

TEST(Call, OneDtypeIsAsGoodAsAnother) {
  Call wide, narrow;
  std::vector<std::uint16_t> q, k, v, d_o;
  const auto round = [](std::vector<float>* from, std::vector<std::uint16_t>* to) {
    for (float& x : *from) to->push_back(numerics::encode_bf16(x)), x = numerics::decode_bf16(to->back());
  };
  round(&wide.q, &q), round(&wide.k, &k), round(&wide.v, &v), round(&wide.d_o, &d_o);
  narrow.forward.q = {q.data(), DType::bf16}, narrow.forward.k = {k.data(), DType::bf16},
  narrow.forward.v = {v.data(), DType::bf16};
  narrow.backward.d_o = {d_o.data(), DType::bf16};
  for (Call* call : {&wide, &narrow}) {
    ASSERT_TRUE(call->run_forward().ok());
    ASSERT_TRUE(call->run_backward().ok());
  }
  EXPECT_TRUE(same_bits(wide.o, narrow.o) && same_bits(wide.d_q, narrow.d_q) && same_bits(wide.d_k, narrow.d_k));
}

TEST(Call, NoTokensAndNoDocuments) {
  Problem problem = small_problem();
  problem.tokens = 0;
  Call none("mxfp8", problem);
  none.offsets = {0, 0, 0, 0};
  none.forward.cu_seqlens = none.backward.cu_seqlens = none.offsets.data();
  EXPECT_TRUE(none.run_forward().ok());
  EXPECT_TRUE(none.run_backward().ok());
  problem = small_problem();
  problem.documents = 0;
  Call outside("mxfp8", problem);  // all tokens lie after the last document
  ASSERT_TRUE(outside.run_forward().ok());
  ASSERT_TRUE(outside.run_backward().ok());
  for (const std::vector<float>* out : {&outside.o, &outside.d_q, &outside.d_k, &outside.d_v})
    EXPECT_EQ(std::count(out->begin(), out->end(), 0.f), static_cast<std::ptrdiff_t>(out->size()));
  for (const float x : outside.lse) EXPECT_EQ(x, INFINITY);
}

TEST(Call, PlansAreSharedByThreads) {
  Call first;
  ASSERT_TRUE(first.run_forward().ok());
  ASSERT_TRUE(first.run_backward().ok());
  constexpr int kThreads = 6;
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < kThreads; ++i) {
    calls.push_back(std::make_unique<Call>());
    calls.back()->plan = first.plan;
  }
  std::vector<std::thread> threads;
  for (auto& call : calls)
    threads.emplace_back([&call] {
      for (int n = 0; n < 3; ++n) {
        EXPECT_TRUE(call->run_forward().ok());
        EXPECT_TRUE(call->run_backward().ok());
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const auto& call : calls)
    EXPECT_TRUE(same_bits(call->o, first.o) && same_bits(call->lse, first.lse) && same_bits(call->d_q, first.d_q) &&
                same_bits(call->d_k, first.d_k) && same_bits(call->d_v, first.d_v));
}

/// A plan for all cores that is made where one core may be used, and run where more may: its sizes must still hold.
TEST(Call, ThreadsAreFixedWhenThePlanIsMade) {
  cpu_set_t all, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof all, &all), 0);
  if (CPU_COUNT(&all) < 2) GTEST_SKIP() << "needs two cores";
  CPU_ZERO(&one);
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &all)) {
      CPU_SET(core, &one);
      break;
    }
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  Plan narrow, wide;
  EXPECT_TRUE(Plan::create(small_problem(), recipe_named("mxfp8"), {}, &narrow).ok());
  ASSERT_EQ(sched_setaffinity(0, sizeof all, &all), 0);
  EXPECT_TRUE(Plan::create(small_problem(), recipe_named("mxfp8"), {}, &wide).ok());
  EXPECT_EQ(narrow.options().threads, 1);
  EXPECT_GT(wide.options().threads, 1);
  EXPECT_LT(narrow.workspace_bytes(Pass::forward),
            wide.workspace_bytes(Pass::forward));  // control: the number of threads does matter
}

}  // namespace
}  // namespace flamia::test
