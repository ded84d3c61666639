// SPDX-License-Identifier: Apache-2.0
// The compiled GPU kernels as data, true on machines without a GPU or a CUDA compiler: kernels.inc is written by `scripts/registers
// --update` from the kernels' own constants and from what ptxas reports, and `scripts/registers` fails when it no longer fits.
#pragma once
#include <string>

#include "flamia/recipe.hpp"
#include "plan/architecture.hpp"

namespace flamia::plan {

struct KernelFacts {
  const char* pass;  // "forward"
  int head_dim;
  const char* scales;     // "block", "token": what shares an exponent at the finest; "nvfp4", "sage3"
  const char* reference;  // "phase32", "tilesum"
  int query_tile, key_tile, stages;
  int threads, consumer_warpgroups, consumer_registers, other_registers;
  int shared_bytes;
  int spill_bytes;  // loads, in the whole kernel
};

/// The forward kernel that computes the recipe on the machine; null where there is none.
const KernelFacts* forward_kernel(const Recipe& recipe, Architecture architecture, int head_dim);

/// Tiles, registers, shared memory, and the bound that the instruction rates set. Lines end with a newline.
std::string describe(const KernelFacts& kernel);

}  // namespace flamia::plan
