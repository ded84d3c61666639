// SPDX-License-Identifier: Apache-2.0
// Inputs that the program makes itself: normal ones, and normal ones with the features that trained models show.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "inputs.hpp"

namespace flamia::cli {

struct MadeInput {
  std::string name;
  Inputs inputs;
};

struct MadeShape {
  std::int64_t tokens = 512;  // two documents: three quarters, and the rest
  int heads = 2, head_dim = 128;
  std::uint32_t seed = 1;
};

/// q, k, v, dout ~ N(0, 1) rounded to BF16, then
///   normal           as they are
///   sink-first       each document's first key takes about half of every query's attention, its value is small
///   sink-last        the same with the last key
///   outlier-channel  channel 5 of q and k is 16 times as large
///   key-bias         a constant vector of size 4 on every fifth channel of all keys
///   small-v          values of 2^-12
/// Made from the seed alone.
std::vector<MadeInput> make_inputs(const MadeShape& shape);

}  // namespace flamia::cli
