// SPDX-License-Identifier: Apache-2.0
// What the backend refuses, and what it says.
#include <gmock/gmock.h>

#include "kernels/attention_case.hpp"

namespace flamia::test {
namespace {

using testing::HasSubstr;

Problem small() {
  Problem p;
  p.tokens = 64, p.query_heads = 2, p.key_heads = 1, p.head_dim = 64;
  return p;
}

TEST(Support, HeadDimAndHeads) {
  Problem p = small();
  for (const int dim : {0, 24, 272, -16}) {
    p.head_dim = dim;
    EXPECT_THAT(cpu::check(p, recipe("mxfp8")).message(), HasSubstr("multiples of 16 up to 256")) << dim;
  }
  p = small();
  p.key_heads = 3;
  EXPECT_THAT(cpu::check(p, recipe("mxfp8")).message(), HasSubstr("multiple of key_heads"));
}

TEST(Support, FieldsThatContradictTheOperands) {
  EXPECT_TRUE(cpu::check(small(), recipe("mxfp8")).ok());
  Recipe r = recipe("bf16");
  r.accumulation.dq_f16 = true;
  EXPECT_THAT(cpu::check(small(), r).message(), HasSubstr("dq=f32"));
  r = recipe("mxfp8-floor");
  r.accumulation.model = AccumulatorModel::hopper13;
  EXPECT_EQ(cpu::check(small(), r).code(), StatusCode::unsupported);
  r = recipe("mxfp8");
  r.accumulation.promote_keys = 48;
  EXPECT_THAT(cpu::check(small(), r).message(), HasSubstr("0 (never), 32, 64 and 128"));
  r = recipe("sagebwd");
  r.accumulation.promote_keys = 0;
  EXPECT_THAT(cpu::check(small(), r).message(), HasSubstr("promote=0 is for forms without"));
  r = recipe("sagebwd");
  r.k.first.group.columns = 16;
  EXPECT_THAT(cpu::check(small(), r).message(), HasSubstr("FP32 scales per group of channels"));
  r = recipe("mxfp8 ds=e4m3");
  r.d_s.first.group.columns = 48;
  EXPECT_THAT(cpu::check(small(), r).message(), HasSubstr("does not divide"));
}

TEST(Support, NamedRecipesOfThisBackend) {
  for (const std::string& name : recipe_names())
    EXPECT_TRUE(cpu::check(small(), recipe(name)).ok()) << cpu::check(small(), recipe(name)).message();
}

TEST(Support, SavedIsCodesAndRowStatistics) {
  Problem p = small();
  p.tokens = 4096;
  const std::size_t elements = 4096 * 64;
  const std::size_t rows = 2 * 4096 * 2 * sizeof(float);
  // q twice the elements of k and of v: 4 bytes of codes a channel in E4M3, 8 in BF16
  EXPECT_LE(cpu::saved_bytes(p, recipe("mxfp8"), true), 4 * elements + rows + 8192);
  EXPECT_GE(cpu::saved_bytes(p, recipe("mxfp8"), true), 4 * elements + rows);
  EXPECT_GE(cpu::saved_bytes(p, recipe("bf16"), true), 8 * elements + rows);
  EXPECT_EQ(cpu::saved_bytes(p, recipe("mxfp8"), false), 0u);
}

TEST(Support, DocumentsMustFitThePlan) {
  Shape shape{.lengths = {10, 10}, .head_dim = 16};
  Input in = normal_input(shape, fresh_seed() + 60);
  in.problem.documents = 1;
  std::vector<float> o(in.q.size()), lse(20);
  AlignedBytes workspace(cpu::workspace_bytes(in.problem, recipe("mxfp8"), Pass::forward, 1));
  ForwardTensors tensors{view(in.q), view(in.k), view(in.v), in.cu_seqlens.data(), writable(o), lse.data()};
  EXPECT_THAT(cpu::forward(in.problem, recipe("mxfp8"), in.documents(), tensors, nullptr, workspace.memory.get(), 1).message(),
              HasSubstr("at most 1"));
}

}  // namespace
}  // namespace flamia::test
