// SPDX-License-Identifier: Apache-2.0
// One result: whatever the number of threads and the instruction set.
#include "kernels/attention_case.hpp"

namespace flamia::test {
namespace {

void expect_equal(const Result& a, const Result& b, const std::string& what) {
  EXPECT_EQ(different_bits(a.o, b.o), 0u) << what;
  EXPECT_EQ(different_bits(a.lse, b.lse), 0u) << what;
  EXPECT_EQ(different_bits(a.d_q, b.d_q), 0u) << what;
  EXPECT_EQ(different_bits(a.d_k, b.d_k), 0u) << what;
  EXPECT_EQ(different_bits(a.d_v, b.d_v), 0u) << what;
}

const char* const kRecipes[] = {"bf16",
                                "mxfp8",
                                "mxfp8-exact",
                                "fp8-tensor",
                                "mxfp8-floor",
                                "nvfp4",
                                "nvfp4-exact",
                                "nvfp4-full",
                                "sage3",
                                "sage3-exact",
                                "sagebwd",
                                "hwfp4-direct",
                                "fp8-head",
                                "mxfp8 ds=32x32",
                                "mxfp8-exact ds=e4m3",
                                "mxfp8-exact ref=phase32",
                                "mxfp8 ref=phase32 l=unrounded",
                                "mxfp8 dq=f32",
                                "sagebwd d=scores",
                                "sagebwd smooth-q=on"};

TEST(Determinism, Threads) {
  const Input in = normal_input({.lengths = {200, 3, 131}, .query_heads = 4, .key_heads = 2, .head_dim = 64}, fresh_seed() + 40);
  for (const char* text : kRecipes) {
    cpu::Probe one_probe;
    const Result one = run(in, recipe(text), {.threads = 1, .probe = &one_probe});
    for (const int threads : {2, 3, 5}) {
      cpu::Probe probe;
      expect_equal(one, run(in, recipe(text), {.threads = threads, .probe = &probe}),
                   std::string(text) + " threads " + std::to_string(threads));
      EXPECT_EQ(one_probe.counts.ds_mass, probe.counts.ds_mass);
      EXPECT_EQ(one_probe.counts.ds_lost_k, probe.counts.ds_lost_k);
    }
  }
}

TEST(Determinism, InstructionSets) {
  for (const int dim : {48, 64}) {
    Input in = normal_input({.lengths = {150, 5}, .query_heads = 2, .key_heads = 1, .head_dim = dim, .tail = 1}, fresh_seed() + 41);
    in.v_row(7, 0)[3] = 3e5f;  // exponents that fold
    in.q_row(9, 1)[0] = NAN;   // flagged rows
    in.d_o_row(20, 0)[1] = 1e-30f;
    for (const char* text : kRecipes) {
      const Result best = run(in, recipe(text));
      int compared = 0;
      for (const cpu::Isa isa : {cpu::Isa::baseline, cpu::Isa::avx2, cpu::Isa::avx512})
        if (const cpu::TileCode* code = cpu::tile_code(isa)) {
          expect_equal(best, run(in, recipe(text), {.isa = isa}), std::string(text) + " " + code->name);
          ++compared;
        }
      EXPECT_GE(compared, 1);
    }
  }
}

TEST(Determinism, ControlAnotherRecipeDiffers) {
  const Input in = normal_input({.lengths = {150}, .head_dim = 64}, fresh_seed() + 42);
  EXPECT_GT(different_bits(run(in, recipe("mxfp8")).o, run(in, recipe("mxfp8-floor")).o), 0u);
}

}  // namespace
}  // namespace flamia::test
