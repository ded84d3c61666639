// SPDX-License-Identifier: Apache-2.0
// What may not reach a gradient on the GPU: later tokens, earlier queries, other documents, NaN. Bit by bit, with leaking recipes as controls.
#include <functional>

#include "support/training.hpp"

namespace flamia::test {
namespace {

class GpuGradientsExact : public GpuTest {};

const Shape kThreeDocuments{{150, 400, 90}, 4, 2, 128, {true, -1, -1}, 0};
constexpr std::int64_t kStart = 150, kEnd = 550;  // of the second document

void multiply(Input& in, std::int64_t begin, std::int64_t end, float factor, bool keys_too) {
  const auto scale = [&](std::vector<float>& x, int heads) {
    for (std::int64_t i = begin * heads * in.problem.head_dim; i < end * heads * in.problem.head_dim; ++i)
      x[static_cast<std::size_t>(i)] = numerics::round_bf16(x[static_cast<std::size_t>(i)] * factor);
  };
  scale(in.q, in.problem.query_heads), scale(in.d_o, in.problem.query_heads);
  if (keys_too) scale(in.k, in.problem.key_heads), scale(in.v, in.problem.key_heads);
}

enum class Promise { exact, block, none };
struct Named {
  const char* name;
  Promise promise;
};
constexpr Named kRecipes[] = {{"mxfp8-exact", Promise::exact},         {"mxfp8-exact headroom=0 dq=f32", Promise::exact},
                              {"mxfp8-exact ds=e4m3", Promise::exact}, {"mxfp8", Promise::block},
                              {"mxfp8 ds=e4m3", Promise::block},       {"fp8-tensor", Promise::none},
                              {"nvfp4-exact", Promise::exact},         {"nvfp4", Promise::block}};

/// Every recipe with both sets of kernels.
struct Call {
  const char* name;
  Promise promise;
  bool deterministic;
};
std::vector<Call> all_calls() {
  std::vector<Call> calls;
  for (const auto& [name, promise] : kRecipes)
    for (const bool deterministic : {false, true}) calls.push_back({name, promise, deterministic});
  return calls;
}

/// Later tokens times 2^4, 2^10, 10^4: no bit of O or dQ of an earlier row moves, and nothing of other documents.
/// With sums of dQ in any order too: rows before the cut, and the other documents, see two tiles of keys at most, whose sum has no order.
TEST_F(GpuGradientsExact, LaterTokensReachNobody) {
  for (const auto& [name, promise, deterministic] : all_calls())
    for (const float factor : {16.f, 1024.f, 1e4f}) {
      SCOPED_TRACE(std::string(name) + " x" + std::to_string(factor));
      const Input in = normal_input(kThreeDocuments, fresh_seed());
      const std::int64_t cut = kStart + 201;  // inside a token-block, which begins at 192
      Input loud = in;
      multiply(loud, cut, kEnd, factor, true);
      const TrainingOptions options{deterministic, DType::f32};
      const Result quiet = gpu_training(in, recipe(name), options), changed = gpu_training(loud, recipe(name), options);
      const auto count = [&](std::int64_t begin, std::int64_t end, Which which) {
        return different_rows(quiet, changed, in.problem, begin, end, which);
      };
      EXPECT_GT(count(cut, kEnd, kAll), 0u);  // the change was seen
      if (promise == Promise::none) {
        EXPECT_GT(count(kStart, cut, kEarlierSide), 0u);
        continue;
      }
      const std::int64_t safe = promise == Promise::exact ? cut : kStart + 192;
      EXPECT_EQ(count(kStart, safe, kEarlierSide), 0u);
      EXPECT_EQ(count(0, kStart, kAll) + count(kEnd, in.problem.tokens, kAll), 0u);
      if (promise == Promise::block && factor > 1000.f) {
        EXPECT_GT(count(safe, cut, kEarlierSide), 0u);  // control: its own block
      }
    }
}

/// Earlier queries and their dO amplified: no bit of dK or dV of a key that they cannot see moves, with sums of dQ in any order too.
TEST_F(GpuGradientsExact, EarlierQueriesReachNoLaterKey) {
  for (const auto& [name, promise, deterministic] : all_calls())
    for (const float factor : {16.f, 1024.f, 1e4f}) {
      SCOPED_TRACE(std::string(name) + " x" + std::to_string(factor));
      const Input in = normal_input(kThreeDocuments, fresh_seed());
      const std::int64_t cut = kStart + 201;
      Input loud = in;
      multiply(loud, kStart, cut, factor, false);
      const Result quiet = gpu_training(in, recipe(name), {deterministic, DType::f32});
      const Result changed = gpu_training(loud, recipe(name), {deterministic, DType::f32});
      const auto count = [&](std::int64_t begin, std::int64_t end, Which which) {
        return different_rows(quiet, changed, in.problem, begin, end, which);
      };
      EXPECT_GT(count(kStart, cut, kLaterSide), 0u);
      if (promise == Promise::none) {
        EXPECT_GT(count(cut, kEnd, kLaterSide), 0u);
        continue;
      }
      const std::int64_t safe = promise == Promise::exact ? cut : kStart + 224;
      EXPECT_EQ(count(safe, kEnd, kLaterSide), 0u);
      EXPECT_EQ(count(0, kStart, kLaterSide) + count(kEnd, in.problem.tokens, kLaterSide), 0u);
    }
}

/// Sliding window with a right side: what lies beyond the window's right edge is later, and queries to the left do not reach keys beyond it.
TEST_F(GpuGradientsExact, Windows) {
  Shape shape = kThreeDocuments;
  shape.mask = {false, 100, 40};
  const Input in = normal_input(shape, fresh_seed());
  const std::int64_t cut = kStart + 201;
  Input loud = in;
  multiply(loud, cut, kEnd, 1e4f, true);
  const Result quiet = gpu_training(in, recipe("mxfp8-exact")), changed = gpu_training(loud, recipe("mxfp8-exact"));
  EXPECT_EQ(different_rows(quiet, changed, in.problem, kStart, cut - 40, kEarlierSide), 0u);
  EXPECT_GT(different_rows(quiet, changed, in.problem, cut - 40, cut, kEarlierSide), 0u);
  Input early = in;
  multiply(early, kStart, cut, 1e4f, false);
  const Result before = gpu_training(early, recipe("mxfp8-exact"));
  EXPECT_EQ(different_rows(quiet, before, in.problem, cut + 40, kEnd, kLaterSide), 0u);
  EXPECT_GT(different_rows(quiet, before, in.problem, cut, cut + 40, kLaterSide), 0u);
}

/// The document of interest gives the same bits alone in a row, and among others, at any place.
TEST_F(GpuGradientsExact, PackedOrAlone) {
  for (const char* name : {"mxfp8", "mxfp8-exact", "nvfp4", "nvfp4-exact"}) {
    const Input in = normal_input(kThreeDocuments, fresh_seed());
    Input alone = normal_input({{400}, 4, 2, 128, {true, -1, -1}, 0}, 1);
    const auto part = [&](const std::vector<float>& x, int heads) {
      const std::int64_t row = std::int64_t{heads} * 128;
      return std::vector<float>(x.begin() + kStart * row, x.begin() + kEnd * row);
    };
    alone.q = part(in.q, 4), alone.k = part(in.k, 2), alone.v = part(in.v, 2), alone.d_o = part(in.d_o, 4);
    const Result packed = gpu_training(in, recipe(name)), single = gpu_training(alone, recipe(name));
    EXPECT_EQ(different_bits(part(packed.d_q, 4), single.d_q) + different_bits(part(packed.d_k, 2), single.d_k) +
                  different_bits(part(packed.d_v, 2), single.d_v),
              0u)
        << name;
    alone.d_o = alone.q;  // control: another gradient is told apart
    EXPECT_GT(different_bits(part(packed.d_q, 4), gpu_training(alone, recipe(name)).d_q), 0u);
  }
}

/// One element that is no number, in each operand: who sees it is NaN, everyone else keeps every bit (docs/numerics.md, section 10).
class GpuGradientsNan : public GpuTest, public testing::WithParamInterface<const char*> {};

TEST_P(GpuGradientsNan, ReachesExactlyWhoSeesIt) {
  const char* const name = GetParam();
  constexpr std::int64_t length = kEnd - kStart;
  const Input in = normal_input(kThreeDocuments, fresh_seed());
  const Problem& p = in.problem;
  const Result clean = gpu_training(in, recipe(name));
  const int group = p.query_heads / p.key_heads;
  enum Operand { kQ, kK, kV, kDo };
  const float odd[] = {numerics::quiet_nan(), numerics::infinity(), -numerics::infinity()};
  int n = 0;
  for (const Operand operand : {kQ, kK, kV, kDo})
    for (const std::int64_t at : {std::int64_t{0}, std::int64_t{64}, std::int64_t{127}, std::int64_t{128}, length - 1}) {
      SCOPED_TRACE("operand " + std::to_string(operand) + " at " + std::to_string(at));
      Input bad = in;
      const int head = 1;  // of keys for K and V: query heads 2 and 3
      float* const row = operand == kQ   ? bad.q_row(kStart + at, head)
                         : operand == kK ? bad.k_row(kStart + at, head)
                         : operand == kV ? bad.v_row(kStart + at, head)
                                         : bad.d_o_row(kStart + at, head);
      row[17] = odd[n++ % 3];
      const Result dirty = gpu_training(bad, recipe(name));
      const bool of_key = operand == kK || operand == kV;
      const auto output_reached = [&](std::int64_t i, int h) {
        return of_key ? h / group == head && i >= at : operand == kQ && h == head && i == at;
      };
      const auto row_reached = [&](std::int64_t i, int h) {
        return output_reached(i, h) || (operand == kDo && h == head && i == at);
      };
      std::int64_t wrong = 0;
      const auto compare = [&](const std::vector<float>& before, const std::vector<float>& after, int heads, auto reached) {
        for (std::int64_t t = 0; t < p.tokens; ++t)
          for (int h = 0; h < heads; ++h) {
            const bool hit = t >= kStart && t < kStart + length && reached(t - kStart, h);
            for (int c = 0; c < p.head_dim; ++c) {
              const auto x = static_cast<std::size_t>((t * heads + h) * p.head_dim + c);
              wrong += hit ? !std::isnan(after[x]) : numerics::bits_of(after[x]) != numerics::bits_of(before[x]);
            }
          }
      };
      const auto key_reached = [&](std::int64_t j, int h) {  // some row that sees key j is reached
        for (int q = h * group; q < (h + 1) * group; ++q)
          for (std::int64_t i = j; i < length; ++i)
            if (row_reached(i, q)) return true;
        return false;
      };
      compare(clean.o, dirty.o, p.query_heads, output_reached);
      compare(clean.d_q, dirty.d_q, p.query_heads, row_reached);
      compare(clean.d_k, dirty.d_k, p.key_heads, key_reached);
      compare(clean.d_v, dirty.d_v, p.key_heads, key_reached);
      EXPECT_EQ(wrong, 0);
      EXPECT_GT(different_rows(clean, dirty, p, kStart, kStart + length, kAll), 0u);  // control: the NaN arrived
    }
}
INSTANTIATE_TEST_SUITE_P(Recipes, GpuGradientsNan, testing::Values("mxfp8-exact", "mxfp8-exact ds=e4m3", "nvfp4-exact"));

}  // namespace
}  // namespace flamia::test
