// SPDX-License-Identifier: Apache-2.0
// NaN and infinity in one element: which rows become NaN, and that nothing else changes in any bit (numerics.md §10).
#include "kernels/attention_case.hpp"

namespace flamia::test {
namespace {

enum class State { equal, all_nan };

/// Row (token, head) of a [tokens, heads, dim] result against the undisturbed one.
testing::AssertionResult row_is(State state, const std::vector<float>& before, const std::vector<float>& after, std::int64_t token,
                                int head, int heads, int dim) {
  for (int c = 0; c < dim; ++c) {
    const auto i = static_cast<std::size_t>((token * heads + head) * dim + c);
    const bool fine = state == State::all_nan ? std::isnan(after[i]) : numerics::bits_of(before[i]) == numerics::bits_of(after[i]);
    if (!fine)
      return testing::AssertionFailure() << "token " << token << " head " << head << " channel " << c << ": " << before[i]
                                         << " became " << after[i];
  }
  return testing::AssertionSuccess();
}

/// Two documents, three query heads... of which group 1 of two is disturbed, in document 1, which starts at token 40.
constexpr std::int64_t kStart = 40, kLength = 300;
constexpr int kDim = 32;

Input clean(std::uint32_t seed, Mask mask) {
  return normal_input({.lengths = {kStart, kLength, 30}, .query_heads = 4, .key_heads = 2, .head_dim = kDim, .mask = mask}, seed);
}

struct Case {
  const char* recipe;
  int block;  // tokens that a flag covers
};

constexpr int kQueryHead = 2, kKeyHead = 1;  // query heads 2 and 3 share key head 1

float* row_of(Input& in, char operand, std::int64_t position) {
  return operand == 'q'   ? in.q_row(kStart + position, kQueryHead)
         : operand == 'k' ? in.k_row(kStart + position, kKeyHead)
         : operand == 'v' ? in.v_row(kStart + position, kKeyHead)
                          : in.d_o_row(kStart + position, kQueryHead);
}

/// What comes out while nothing is disturbed yet. A sticky exponent remembers keys that have left the window (docs/numerics.md), and a
/// flagged one raises none: the tokens that will be disturbed must be too small to have raised any.
struct Undisturbed {
  Undisturbed(const Case& which, Mask mask, std::initializer_list<std::int64_t> positions, std::uint32_t seed)
      : input(clean(seed, mask)) {
    for (const char operand : {'q', 'k', 'v', 'g'})
      for (const std::int64_t position : positions)
        for (int c = 0; c < kDim; ++c) row_of(input, operand, position)[c] *= 0x1p-8f;
    result = run(input, recipe(which.recipe));
  }
  Input input;
  Result result;
};

void disturb(const Case& which, const Undisturbed& undisturbed, char operand, std::int64_t position, float value) {
  const Result& before = undisturbed.result;
  Input input = undisturbed.input;
  const Mask mask = input.problem.mask;
  row_of(input, operand, position)[5] = value;
  const Result after = run(input, recipe(which.recipe));
  const schedule::MaskReach reach = schedule::reach_of(mask.causal, mask.left, mask.right);
  const auto block_of = [&](std::int64_t i) { return i / which.block; };

  // who is reached: O of a row; then, through dO / l, dQ of the row's block and dK, dV of the keys that rows of that block see
  std::vector<bool> o_nan(kLength * 4), d_q_nan(kLength * 4), key_nan(kLength * 2);
  for (int h = 0; h < 4; ++h)
    for (std::int64_t i = 0; i < kLength; ++i) {
      const schedule::Interval keys = schedule::visible_keys(reach, i, kLength);
      bool reached = false;
      if (operand == 'q') reached = h == kQueryHead && block_of(i) == block_of(position);
      if (operand == 'k' || operand == 'v')
        for (std::int64_t j = keys.begin; j < keys.end && h / 2 == kKeyHead; ++j)
          reached = reached || block_of(j) == block_of(position);
      o_nan[static_cast<std::size_t>(i * 4 + h)] = reached;
    }
  const bool bf16 = std::string(which.recipe) == "bf16";
  for (int h = 0; h < 4; ++h)
    for (std::int64_t i = 0; i < kLength; ++i) {
      bool flagged = operand == 'g' && h == kQueryHead && block_of(i) == block_of(position);
      if (bf16)
        flagged = flagged || o_nan[static_cast<std::size_t>(i * 4 + h)];
      else
        for (std::int64_t x = block_of(i) * which.block; x < std::min<std::int64_t>((block_of(i) + 1) * which.block, kLength); ++x)
          flagged = flagged || o_nan[static_cast<std::size_t>(x * 4 + h)];
      d_q_nan[static_cast<std::size_t>(i * 4 + h)] = flagged;
      const schedule::Interval keys = schedule::visible_keys(reach, i, kLength);
      for (std::int64_t j = keys.begin; j < keys.end && flagged; ++j) key_nan[static_cast<std::size_t>(j * 2 + h / 2)] = true;
    }
  const std::string what =
      std::string(which.recipe) + " " + operand + " at " + std::to_string(position) + " = " + std::to_string(value);
  for (std::int64_t token = 0; token < input.problem.tokens; ++token) {
    const std::int64_t i = token - kStart;
    const bool inside = i >= 0 && i < kLength;
    for (int h = 0; h < 4; ++h) {
      const State o = inside && o_nan[static_cast<std::size_t>(i * 4 + h)] ? State::all_nan : State::equal;
      const State d_q = inside && d_q_nan[static_cast<std::size_t>(i * 4 + h)] ? State::all_nan : State::equal;
      ASSERT_TRUE(row_is(o, before.o, after.o, token, h, 4, kDim)) << what << " O";
      ASSERT_EQ(std::isnan(after.lse[static_cast<std::size_t>(h * input.problem.tokens + token)]), o == State::all_nan)
          << what << " LSE " << token;
      ASSERT_TRUE(row_is(d_q, before.d_q, after.d_q, token, h, 4, kDim)) << what << " dQ";
    }
    for (int h = 0; h < 2; ++h) {
      const bool reached = inside && key_nan[static_cast<std::size_t>(i * 2 + h)];
      ASSERT_TRUE(row_is(reached ? State::all_nan : State::equal, before.d_k, after.d_k, token, h, 2, kDim)) << what << " dK";
      ASSERT_TRUE(row_is(reached ? State::all_nan : State::equal, before.d_v, after.d_v, token, h, 2, kDim)) << what << " dV";
    }
  }
}

TEST(NonFinite, ReachesWhoSeesItAndNobodyElse) {
  const std::uint32_t seed = fresh_seed() + 70;
  for (const Case& which : {Case{"mxfp8-exact", 1}, Case{"mxfp8", 32}, Case{"nvfp4-exact", 1}, Case{"bf16", 1}}) {
    const Undisturbed before(which, {true, -1, -1}, {128, 200, 255}, seed);
    for (const char operand : {'q', 'k', 'v', 'g'})
      for (const std::int64_t position : {128, 200, 255})  // first, middle and last token of a tile
        for (const float value : {static_cast<float>(NAN), INFINITY, -INFINITY}) {
          if (std::isinf(value) && position != 200) continue;  // the flag is the same
          disturb(which, before, operand, position, value);
        }
  }
}

TEST(NonFinite, Windows) {
  const std::uint32_t seed = fresh_seed() + 71;
  const Case which{"mxfp8-exact", 1};
  for (const Mask mask : {Mask{true, 50, -1}, Mask{false, -1, -1}}) {
    const Undisturbed before(which, mask, {0, 127, 299}, seed);
    for (const char operand : {'q', 'k', 'v', 'g'})
      for (const std::int64_t position : {0, 127, 299}) disturb(which, before, operand, position, NAN);
  }
}

/// Scores that leave FP32 make NaN of their own rows.
TEST(NonFinite, OverflowingScoresStayInTheirRow) {
  Input in = normal_input({.lengths = {40, 40}, .head_dim = 64}, fresh_seed() + 72);
  const Result before = run(in, recipe("mxfp8-exact"));
  for (int c = 0; c < 64; ++c) in.q_row(60, 0)[c] = 3e38f;
  const Result after = run(in, recipe("mxfp8-exact"));
  for (std::int64_t i = 0; i < 80; ++i)
    EXPECT_TRUE(row_is(i == 60 ? State::all_nan : State::equal, before.o, after.o, i, 0, 1, 64));
  for (std::int64_t i = 0; i < 80; ++i)
    EXPECT_TRUE(row_is(i == 60 ? State::all_nan : State::equal, before.d_q, after.d_q, i, 0, 1, 64));
}

/// A flagged token at a tile's start leaves the tile's first level to the others.
TEST(NonFinite, FlaggedTokensLeaveTheFirstLevelToTheirTile) {
  const Input before_input = clean(fresh_seed() + 74, {true, -1, -1});
  Input input = before_input;
  input.d_o_row(kStart + 128, 2)[5] = NAN;
  const Result before = run(before_input, recipe("nvfp4-full")), after = run(input, recipe("nvfp4-full"));
  const auto begin = static_cast<std::ptrdiff_t>((kStart + 160) * 2 * kDim),
             end = static_cast<std::ptrdiff_t>((kStart + 256) * 2 * kDim);
  const std::vector<float> a(after.d_v.begin() + begin, after.d_v.begin() + end),
      b(before.d_v.begin() + begin, before.d_v.begin() + end);
  EXPECT_LT(relative_l2(a, b), 0.05) << "keys that the flagged query does not see";
}

/// Recipes whose scales or means reach over tokens: rows that see the token are NaN, rows before its tile are numbers (their bits may
/// change: a flagged token counts in no statistic), other documents keep every bit.
TEST(NonFinite, RecipesWithSharedStatistics) {
  const std::uint32_t seed = fresh_seed() + 73;
  const Input before_input = clean(seed, {true, -1, -1});
  constexpr std::int64_t kPosition = 200, kTileStart = 128;
  for (const char* text :
       {"nvfp4", "nvfp4-full", "sagebwd", "sagebwd smooth-q=on", "sage3", "sage3-exact", "hwfp4-direct", "sage3 exp2=mitchell"})
    for (const char operand : {'k', 'v'}) {
      Input input = before_input;
      (operand == 'k' ? input.k_row(kStart + kPosition, 1) : input.v_row(kStart + kPosition, 1))[5] = NAN;
      const Result before = run(before_input, recipe(text)), after = run(input, recipe(text));
      for (std::int64_t token = 0; token < input.problem.tokens; ++token)
        for (int head = 0; head < 4; ++head) {
          const bool inside = token >= kStart && token < kStart + kLength && head >= 2;
          const std::int64_t i = token - kStart;
          const auto at = static_cast<std::size_t>((token * 4 + head) * kDim);
          if (!inside) {
            ASSERT_TRUE(row_is(State::equal, before.o, after.o, token, head, 4, kDim)) << text;
          } else if (i >= kPosition) {
            ASSERT_TRUE(row_is(State::all_nan, before.o, after.o, token, head, 4, kDim)) << text << " " << operand;
          } else if (i < kTileStart) {
            ASSERT_FALSE(std::isnan(after.o[at])) << text << " " << operand << " row " << i;
          }
          if (inside || before.d_q.empty()) continue;
          ASSERT_TRUE(row_is(State::equal, before.d_q, after.d_q, token, head, 4, kDim)) << text;
        }
    }
}

}  // namespace
}  // namespace flamia::test
