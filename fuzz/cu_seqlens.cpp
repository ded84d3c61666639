// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "flamia/attention.hpp"
#include "targets.hpp"

namespace flamia::fuzz {
namespace {

constexpr int kDim = 16;
constexpr float kPoison = -12345.f;

/// The rule, written again: starts at 0, never decreases, ends inside the row.
bool valid(const std::vector<std::int32_t>& offsets, std::int64_t tokens) {
  return offsets[0] == 0 && std::is_sorted(offsets.begin(), offsets.end()) && offsets.back() <= tokens;
}

struct Call {
  std::vector<float> in, o, lse, d_q, d_k, d_v;
  explicit Call(std::int64_t tokens)
      : in(static_cast<std::size_t>(tokens * kDim)),
        o(in.size(), kPoison),
        lse(static_cast<std::size_t>(tokens), kPoison),
        d_q(o),
        d_k(o),
        d_v(o) {
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i * 37 % 11) / 4.f - 1.f;
  }
  bool untouched() const {
    const auto poison = [](float x) { return x == kPoison; };
    return std::all_of(o.begin(), o.end(), poison) && std::all_of(lse.begin(), lse.end(), poison) &&
           std::all_of(d_q.begin(), d_q.end(), poison) && std::all_of(d_k.begin(), d_k.end(), poison) &&
           std::all_of(d_v.begin(), d_v.end(), poison);
  }
};

class Memory {
 public:
  explicit Memory(std::size_t bytes) : memory_(std::aligned_alloc(256, (bytes + 511) / 256 * 256)) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { std::free(memory_); }
  void* get() const { return memory_; }

 private:
  void* memory_;
};

/// A plan serves any number of calls; making one (it names its recipe) takes longer than attention over 32 tokens.
const Plan& plan_for(std::int64_t tokens, std::int64_t documents) {
  static std::map<std::pair<std::int64_t, std::int64_t>, Plan> plans;
  const auto [place, added] = plans.try_emplace({tokens, documents});
  if (added) {
    Recipe recipe;
    FLAMIA_FUZZ_REQUIRE(Recipe::parse("mxfp8-exact", &recipe).ok());
    Problem problem;
    problem.tokens = tokens;
    problem.documents = documents;
    problem.query_heads = problem.key_heads = 1;
    problem.head_dim = kDim;
    PlanOptions options;
    options.threads = 1;
    FLAMIA_FUZZ_REQUIRE(Plan::create(problem, recipe, options, &place->second).ok());
  }
  return place->second;
}

}  // namespace

Verdict cu_seqlens(const std::uint8_t* bytes, std::size_t size) {
  if (size < 5) return Verdict::rejected;
  const std::int64_t tokens = bytes[0] % 33;
  std::vector<std::int32_t> offsets(std::min<std::size_t>((size - 1) / 4, 40));
  std::memcpy(offsets.data(), bytes + 1, 4 * offsets.size());

  const Plan& plan = plan_for(tokens, static_cast<std::int64_t>(offsets.size()) - 1);
  const Memory saved(plan.saved_bytes());
  const Memory workspace(std::max(plan.workspace_bytes(Pass::forward), plan.workspace_bytes(Pass::backward)));
  Call call(tokens);

  const TensorView in{call.in.data(), DType::f32};
  const ForwardTensors forward{in, in, in, offsets.data(), {call.o.data(), DType::f32}, call.lse.data()};
  const Status done = attention_forward(plan, forward, saved.get(), workspace.get());
  FLAMIA_FUZZ_REQUIRE(done.ok() == valid(offsets, tokens));
  const BackwardTensors backward{
      {call.o.data(), DType::f32},  in, offsets.data(), {call.d_q.data(), DType::f32}, {call.d_k.data(), DType::f32},
      {call.d_v.data(), DType::f32}};
  const Status back = attention_backward(plan, backward, saved.get(), workspace.get());
  FLAMIA_FUZZ_REQUIRE(back.ok() == done.ok());
  if (!done.ok()) {
    FLAMIA_FUZZ_REQUIRE(done.code() == StatusCode::invalid_argument && done.message().find("cu_seqlens[") != std::string::npos);
    FLAMIA_FUZZ_REQUIRE(call.untouched());
    return Verdict::rejected;
  }
  for (std::int64_t t = 0; t < tokens; ++t) {  // every row is written; those of no document say so
    const bool inside = t < offsets.back();
    FLAMIA_FUZZ_REQUIRE(std::isfinite(call.lse[static_cast<std::size_t>(t)]) == inside);
    for (int c = 0; c < kDim; ++c) {
      const auto at = static_cast<std::size_t>(t * kDim + c);
      for (const std::vector<float>* out : {&call.o, &call.d_q, &call.d_k, &call.d_v}) {
        FLAMIA_FUZZ_REQUIRE(std::isfinite((*out)[at]) && (*out)[at] != kPoison);
        FLAMIA_FUZZ_REQUIRE(inside || (*out)[at] == 0.f);
      }
    }
  }
  return Verdict::accepted;
}

}  // namespace flamia::fuzz
