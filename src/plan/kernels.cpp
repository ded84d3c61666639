// SPDX-License-Identifier: Apache-2.0
#include "plan/kernels.hpp"

#include <algorithm>
#include <cmath>
#include <string_view>

namespace flamia::plan {
namespace {

constexpr KernelFacts kKernels[] = {
#include "plan/kernels.inc"
};

/// H200: multiprocessors and boost clock.
constexpr double kMultiprocessors = 132, kClock = 1.98e9;
/// Cycles of a multiprocessor for 64 x 128 scores: one FP8 product with a head dim of 128, and exp2 on the special-function unit, which is
/// slower beside products than alone (688, not 512: measured, docs/hopper.md).
constexpr int kProductCycles = 256, kExp2Cycles = 688;

bool per_token(const Recipe& recipe) {
  const auto one = [](const OperandPolicy& policy) {
    return policy.first.group.kind == Group::Kind::blocks && policy.first.group.rows == 1;
  };
  return one(recipe.q) || one(recipe.k) || one(recipe.v);
}

}  // namespace

const KernelFacts* forward_kernel(const Recipe& recipe, Architecture architecture, int head_dim) {
  if (architecture != Architecture::sm_90 || recipe.q.first.element == Element::int8) return nullptr;
  const std::string_view scales = recipe.smoothing.q                        ? "sage3"
                                  : recipe.q.first.element == Element::e2m1 ? "nvfp4"
                                  : per_token(recipe)                       ? "token"
                                                                            : "block";
  const std::string_view reference = recipe.softmax.reference == RowReferenceRule::phase32 ? "phase32" : "tilesum";
  const KernelFacts* const found = std::find_if(std::begin(kKernels), std::end(kKernels), [&](const KernelFacts& kernel) {
    return std::string_view(kernel.pass) == "forward" && kernel.head_dim == head_dim && kernel.scales == scales &&
           kernel.reference == reference;
  });
  return found == std::end(kKernels) ? nullptr : found;
}

std::string describe(const KernelFacts& kernel) {
  const auto number = [](auto n) { return std::to_string(n); };
  const std::string_view scales = kernel.scales;
  const int both = scales == "sage3" ? 4 : scales == "nvfp4" ? 3 : 2;  // products in FP16 take twice the time of FP8
  const int products = both * kProductCycles * kernel.head_dim / 128, slowest = std::max(products, kExp2Cycles);
  const double flops = 4. * 64 * 128 * kernel.head_dim * kMultiprocessors * kClock / slowest;
  std::string text = "  " + std::string(kernel.pass) + ": tiles of " + number(kernel.query_tile) + " queries x " +
                     number(kernel.key_tile) + " keys, " + number(kernel.stages) + " stages, " + number(kernel.threads) +
                     " threads\n    registers: " + number(kernel.consumer_warpgroups) + " warpgroups that compute with " +
                     number(kernel.consumer_registers) + ", one that loads with " + number(kernel.other_registers) + "; " +
                     number(kernel.spill_bytes) + " bytes of spills a thread; shared memory " +
                     number((kernel.shared_bytes + 512) / 1024) + " KiB\n";
  text += "    bound by " + std::string(products >= kExp2Cycles ? "products" : "exp2") +
          ": 64 x 128 scores take a multiprocessor " + number(products) + " cycles of products and " + number(kExp2Cycles) +
          " of exp2 beside them, so an H200 does at most " + number(std::lround(flops * 1e-12)) +
          " TFLOP/s at 1.98 GHz; its 700 W allow less (docs/log/forward.md)\n";
  return text;
}

}  // namespace flamia::plan
