// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

#include "api/check.hpp"

namespace flamia::api {
namespace {

std::string text_of(float x) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", static_cast<double>(x));
  return text;
}

// Largest tensor: 2^58 bytes, so that sums of several of them, and what a backend adds, stay inside 64 bits.
constexpr std::int64_t kMostBytes = std::int64_t{1} << 58;
constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;  // positions stay below MaskReach::kUnlimited
constexpr int kMostThreads = 4096;
// log2(e) * scale * 2^exponent must be a normal FP32 number for ordinary exponents
constexpr float kLeastScale = 0x1p-100f, kMostScale = 0x1p100f;

std::string is(const char* name, std::int64_t value) { return std::string(name) + " = " + std::to_string(value); }

bool fits(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t bytes) {
  std::int64_t product = a;
  for (std::int64_t factor : {b, c, bytes})
    if (__builtin_mul_overflow(product, factor, &product)) return false;
  return product <= kMostBytes;
}

Status check_mask(const Mask& mask) {
  if (mask.left < -1)
    return Status::invalid(is("mask.left", mask.left) +
                           " but must be -1 (unlimited) or the number of earlier keys that a query sees");
  if (mask.right < -1)
    return Status::invalid(is("mask.right", mask.right) +
                           " but must be -1 (unlimited) or the number of later keys that a query sees");
  return {};
}

}  // namespace

Status check_problem(const Problem& problem, const PlanOptions& options) {
  if (problem.tokens < 0 || problem.tokens > kMostTokens)
    return Status::invalid(is("tokens", problem.tokens) + " but must be 0 ... 2^40: the number of rows of q");
  if (problem.documents < 0 || problem.documents > kMostTokens)
    return Status::invalid(is("documents", problem.documents) + " but must be 0 ... 2^40: one less than the entries of cu_seqlens");
  if (problem.query_heads < 1)
    return Status::invalid(is("query_heads", problem.query_heads) + " but must be at least 1: the heads of q and o");
  if (problem.key_heads < 1)
    return Status::invalid(is("key_heads", problem.key_heads) + " but must be at least 1: the heads of k and v");
  if (problem.query_heads % problem.key_heads != 0)
    return Status::invalid(is("query_heads", problem.query_heads) + " is no multiple of " + is("key_heads", problem.key_heads) +
                           "; every key head serves the same number of query heads, so repeat k and v or drop heads of q");
  if (problem.head_dim < 1)
    return Status::invalid(is("head_dim", problem.head_dim) + " but must be at least 16: the channels of a head");
  if (Status s = check_mask(problem.mask); !s.ok()) return s;
  if (!std::isfinite(problem.scale) || (problem.scale != 0.f && !(problem.scale >= kLeastScale && problem.scale <= kMostScale)))
    return Status::invalid(
        "scale = " + text_of(problem.scale) +
        " but must be 0 (for 1 / sqrt(head_dim)) or a number from 2^-100 to 2^100 that the scores are multiplied by");
  if (options.threads < 0 || options.threads > kMostThreads)
    return Status::invalid(is("threads", options.threads) + " but must be 0 (all cores) to " + std::to_string(kMostThreads));
  if (!fits(problem.tokens, problem.query_heads, problem.head_dim, sizeof(float)))
    return Status::invalid("tokens * query_heads * head_dim = " + std::to_string(problem.tokens) + " * " +
                           std::to_string(problem.query_heads) + " * " + std::to_string(problem.head_dim) +
                           " elements exceed 2^58 bytes; attend fewer tokens or heads per call");
  return {};
}

}  // namespace flamia::api
