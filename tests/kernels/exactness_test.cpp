// SPDX-License-Identifier: Apache-2.0
// Who can change whom. Exact means: no bit.
#include "kernels/attention_case.hpp"
#include "recipe/guarantee.hpp"

namespace flamia::test {
namespace {

constexpr float kFactors[] = {16.f, 1024.f, 1e4f, NAN};

/// Elements of [tokens, heads, dim] arrays that differ on tokens [begin, end).
std::size_t changed(const std::vector<float>& a, const std::vector<float>& b, std::int64_t begin, std::int64_t end,
                    std::int64_t tokens) {
  const auto row = static_cast<std::int64_t>(a.size()) / tokens;
  std::size_t count = 0;
  for (std::int64_t i = begin * row; i < end * row; ++i)
    count += numerics::bits_of(a[static_cast<std::size_t>(i)]) != numerics::bits_of(b[static_cast<std::size_t>(i)]);
  return count;
}

void multiply(std::vector<float>& x, std::int64_t begin, std::int64_t end, std::int64_t tokens, float factor) {
  const auto row = static_cast<std::int64_t>(x.size()) / tokens;
  for (std::int64_t i = begin * row; i < end * row; ++i)
    x[static_cast<std::size_t>(i)] = numerics::round_bf16(x[static_cast<std::size_t>(i)] * factor);
}

struct Changes {
  std::size_t o = 0, d_q = 0, d_k = 0, d_v = 0, elsewhere = 0;
  std::size_t inside() const { return o + d_q; }
  std::size_t back() const { return d_k + d_v; }
};

/// An input and a recipe with what comes out of them undisturbed.
struct Undisturbed {
  Undisturbed(const Input& input, const std::string& name) : in(input), r(recipe(name)), before(run(in, r)) {}
  Input in;
  Recipe r;
  Result before;
};

/// Document 1 of three. Its tokens after `cut` are multiplied in q, k, v, dO; O and dQ are compared up to position `up_to`. Then q and dO
/// before `cut` are; dK and dV are compared from `from` on. Other documents are always compared as a whole.
Changes amplify(const Undisturbed& with, std::int64_t cut, std::int64_t up_to, std::int64_t from, float factor) {
  const Input& in = with.in;
  const Recipe& r = with.r;
  const Result& before = with.before;
  const std::int64_t tokens = in.problem.tokens, start = in.cu_seqlens[1], end = in.cu_seqlens[2];
  Changes c;
  const auto others = [&](const Result& after) {
    for (const auto& [x, y] :
         {std::pair{&before.o, &after.o}, {&before.d_q, &after.d_q}, {&before.d_k, &after.d_k}, {&before.d_v, &after.d_v}})
      c.elsewhere += changed(*x, *y, 0, start, tokens) + changed(*x, *y, end, tokens, tokens);
  };
  Input later = in;
  for (std::vector<float>* x : {&later.q, &later.k, &later.v, &later.d_o}) multiply(*x, start + cut + 1, end, tokens, factor);
  const Result after = run(later, r);
  c.o = changed(before.o, after.o, start, start + up_to, tokens);
  c.d_q = changed(before.d_q, after.d_q, start, start + up_to, tokens);
  others(after);
  Input earlier = in;
  for (std::vector<float>* x : {&earlier.q, &earlier.d_o}) multiply(*x, start, start + cut, tokens, factor);
  const Result behind = run(earlier, r);
  c.d_k = changed(before.d_k, behind.d_k, start + from, end, tokens);
  c.d_v = changed(before.d_v, behind.d_v, start + from, end, tokens);
  others(behind);
  return c;
}

Input packed(std::uint32_t seed, Mask mask = {}, int group = 1) {
  Shape shape{.lengths = {45, 300, 20}, .query_heads = 2 * group, .key_heads = 2, .head_dim = 64, .mask = mask, .tail = 2};
  Input in = normal_input(shape, seed);
  // a sink and an outlier among the values: scales that matter
  for (int c = 0; c < 64; ++c) in.k_row(45, 0)[c] = 3.f, in.v_row(45, 0)[c] *= 1.f / 1024, in.v_row(50, 1)[c] *= 1024.f;
  return in;
}

TEST(Exactness, ExactRecipesChangeNoBit) {
  const std::uint32_t seed = fresh_seed() + 20;
  for (const char* text :
       {"mxfp8-exact", "mxfp8-exact headroom=0 ref=phase32", "mxfp8-exact headroom=4 ds=row32", "mxfp8-exact dk=64x32",
        "mxfp8-exact ds=e4m3", "mxfp8-exact ds=e4m3 dq=f32", "mxfp8-exact dq=f32", "mxfp8-exact sticky=off", "nvfp4-exact",
        "nvfp4-exact ds=e4m3", "sage3-exact", "bf16", "mxfp8-exact d=scores", "nvfp4-exact ds=e4m3 d=scores", "bf16 d=scores"}) {
    const Undisturbed with(packed(seed), text);
    for (const std::int64_t cut : {70, 200})
      for (const float factor : kFactors) {
        const Changes c = amplify(with, cut, cut + 1, cut, factor);
        EXPECT_EQ(c.o, 0u) << text << " O, cut " << cut << " factor " << factor;
        EXPECT_EQ(c.d_q, 0u) << text << " dQ, cut " << cut << " factor " << factor;
        EXPECT_EQ(c.d_k, 0u) << text << " dK, cut " << cut << " factor " << factor;
        EXPECT_EQ(c.d_v, 0u) << text << " dV, cut " << cut << " factor " << factor;
        EXPECT_EQ(c.elsewhere, 0u) << text;
      }
  }
}

TEST(Exactness, HoldsForWindowsAndGroupedHeads) {
  const std::uint32_t seed = fresh_seed() + 21;
  for (const Mask mask : {Mask{true, 40, -1}, Mask{true, 150, -1}, Mask{false, 60, 0}, Mask{false, 60, 20}, Mask{false, -1, 130}})
    for (const int group : {1, 3}) {
      const Undisturbed with(packed(seed, mask, group), group == 1 ? "nvfp4-exact d=scores" : "mxfp8-exact ds=e4m3");
      const std::int64_t reach = mask.causal ? 0 : mask.right;
      for (const std::int64_t cut : {70, 200})
        for (const float factor : {1024.f, static_cast<float>(NAN)}) {
          const Changes c = amplify(with, cut, std::max<std::int64_t>(0, cut + 1 - reach), cut + reach, factor);
          EXPECT_EQ(c.inside() + c.back() + c.elsewhere, 0u)
              << "window " << mask.left << "," << mask.right << " group " << group << " cut " << cut << " factor " << factor;
        }
    }
}

TEST(Exactness, TokenBlocksChangeNothingBeyondThemselves) {
  const Input in = packed(fresh_seed() + 22);
  for (const auto& [name, size] : {std::pair{"mxfp8", 32},
                                   {"mxfp8 ds=e4m3", 32},
                                   {"nvfp4 d=scores", 32},
                                   {"bf16 smooth-q=on", 128},
                                   {"sagebwd smooth-k=off smooth-q=on", 128}}) {
    const Undisturbed with(in, name);
    for (const std::int64_t cut : {70, 200}) {
      std::uint64_t leaked =
          0;  // over the finite factors: a small one moves the block's exponent, which only codes below the normal ones notice
      for (const float factor : kFactors) {
        const std::int64_t block = (cut + 1) / size * size;  // the first changed token's block starts here
        const Changes c = amplify(with, cut, block, (cut + size - 1) / size * size, factor);
        EXPECT_EQ(c.inside() + c.back() + c.elsewhere, 0u) << name << " cut " << cut << " factor " << factor;
        if (!std::isnan(factor)) leaked += amplify(with, cut, cut + 1, cut, factor).inside();
      }
      EXPECT_GT(leaked, 0u) << name << ", the block itself does leak: cut " << cut;
    }
  }
}

/// What guarantee() says of a recipe holds and is no more than needed: NaN in a form that dQ does not use, blocks that do not nest, one
/// first level of a whole tile.
TEST(Exactness, GuaranteesOfVariantsHold) {
  const Input in = packed(fresh_seed() + 25);
  for (const auto& [text, needed] :
       {std::pair{"mxfp8-exact q2=e4m3/32xall/ue8m0/ceil", 32},
        {"mxfp8-exact do2=e4m3/32xall/ue8m0/ceil", 32},
        {"mxfp8 k1=e4m3/48xall/ue8m0/ceil", 96},
        {"nvfp4-full do1=e2m1/1x16/e4m3/amax do2=e2m1/16x1/e4m3/amax ds1=e2m1/16x16/e4m3/two_level", 128}}) {
    const Undisturbed with(in, text);
    const recipe::Guarantee promise = recipe::guarantee(with.r);
    const int size = farther(promise.outputs, promise.d_q).tokens;
    EXPECT_EQ(size, needed) << text;
    std::size_t within_half = 0;
    for (const std::int64_t cut : {36, 70, 200, 250})
      for (const float factor : kFactors) {
        const std::int64_t first = (cut + 1) / size * size;
        const Changes c = amplify(with, cut, first, (cut + size - 1) / size * size, factor);
        EXPECT_EQ(c.inside() + c.back() + c.elsewhere, 0u) << text << " cut " << cut << " factor " << factor;
        const std::int64_t half = size == 96 ? 32 : size / 2;  // a promise of less is broken
        within_half += amplify(with, cut, (cut + 1) / half * half, cut, factor).inside();
      }
    EXPECT_GT(within_half, 0u) << text;
  }
}

TEST(Exactness, ComparisonRecipesLeak) {
  const Input in = packed(fresh_seed() + 23);
  for (const char* text :
       {"fp8-tensor", "mxfp8-floor", "mxfp8-exact prescale=sequence", "mxfp8-exact block=32", "mxfp8-exact ds=32x32", "nvfp4-full",
        "sage3", "sage3-exact fold-v=off", "nvfp4-exact k1=e2m1/1x16/e4m3/two_level", "sage3-exact smooth-k=on", "sagebwd",
        "fp8-tensor ds=bf16", "mxfp8-exact ds=e4m3 prescale=sequence"}) {
    const Undisturbed with(in, text);
    std::size_t leaked = 0;
    for (const std::int64_t cut : {70, 200})
      for (const float factor : {16.f, 1e4f}) leaked += amplify(with, cut, cut + 1, cut, factor).inside();
    EXPECT_GT(leaked, 0u) << text;
  }
  EXPECT_GT(amplify({in, "fp8-tensor"}, 70, 71, 70, 1e4f).elsewhere, 0u) << "one scale per tensor crosses documents";
  EXPECT_EQ(amplify({in, "mxfp8-floor"}, 70, 71, 70, 1e4f).elsewhere, 0u);
}

/// Whether a token follows changes nothing either: the last row of a document is computed as where there are more. 129 and 257 leave a
/// single key on the diagonal tile, which no mask cuts.
TEST(Exactness, ADocumentsEndChangesNoBit) {
  Shape shape{.lengths = {300}, .query_heads = 2, .key_heads = 2, .head_dim = 64};
  Input whole = normal_input(shape, fresh_seed() + 26);
  for (int c = 0; c < 64; ++c) whole.v_row(5, 1)[c] *= 1024.f, whole.v_row(299, 0)[c] *= 1e4f;
  const auto differs = [&](const std::string& name, std::int64_t n) {
    shape.lengths = {n};
    Input part = normal_input(shape, 0);
    for (const auto member : {&Input::q, &Input::k, &Input::v, &Input::d_o})
      std::copy_n((whole.*member).begin(), (part.*member).size(), (part.*member).begin());
    const Result all = run(whole, recipe(name)), few = run(part, recipe(name));
    EXPECT_EQ(few.o.size() * 300, all.o.size() * static_cast<std::size_t>(n));
    EXPECT_EQ(few.d_q.size() * 300, all.d_q.size() * static_cast<std::size_t>(n));
    std::size_t count = changed(few.o, all.o, 0, n, n) + changed(few.d_q, all.d_q, 0, n, n);
    for (int head = 0; head < 2; ++head)
      for (std::int64_t i = 0; i < n; ++i)
        count += numerics::bits_of(all.lse[static_cast<std::size_t>(head * 300 + i)]) !=
                 numerics::bits_of(few.lse[static_cast<std::size_t>(head * n + i)]);
    return count;
  };
  for (const char* name : {"bf16", "mxfp8-exact", "mxfp8-exact fold-v=on fold-k=on", "nvfp4-exact", "sage3-exact"})
    for (const std::int64_t n : {1, 2, 17, 128, 129, 130, 257}) EXPECT_EQ(differs(name, n), 0u) << name << ", the first " << n;
  EXPECT_GT(differs("fp8-tensor", 129), 0u);
}

TEST(Exactness, DocumentsAreComputedApart) {
  const Input in = packed(fresh_seed() + 24, {false, -1, -1});
  for (const char* text : {"mxfp8", "mxfp8-exact", "mxfp8-floor", "nvfp4", "nvfp4-full", "sage3", "sagebwd", "bf16",
                           "mxfp8 ds=32x32", "mxfp8 ds=e4m3", "sagebwd smooth-q=on"}) {
    const Result whole = run(in, recipe(text));
    for (std::size_t b = 0; b + 1 < in.cu_seqlens.size(); ++b) {
      Input one = in;
      const std::int64_t start = in.cu_seqlens[b], length = in.cu_seqlens[b + 1] - start;
      one.problem.tokens = length;
      one.problem.documents = 1;
      one.cu_seqlens = {0, static_cast<std::int32_t>(length)};
      const auto cut = [&](std::vector<float>& x) {
        const auto row = static_cast<std::ptrdiff_t>(x.size()) / in.problem.tokens;
        x = std::vector<float>(x.begin() + start * row, x.begin() + (start + length) * row);
      };
      for (std::vector<float>* x : {&one.q, &one.k, &one.v, &one.d_o}) cut(*x);
      Result part = whole;
      for (std::vector<float>* x : {&part.o, &part.d_q, &part.d_k, &part.d_v}) cut(*x);
      const Result alone = run(one, recipe(text));
      EXPECT_EQ(different_bits(part.o, alone.o) + different_bits(part.d_q, alone.d_q) + different_bits(part.d_k, alone.d_k) +
                    different_bits(part.d_v, alone.d_v),
                0u)
          << text << " document " << b;
    }
  }
}

}  // namespace
}  // namespace flamia::test
