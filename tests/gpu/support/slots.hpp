// SPDX-License-Identifier: Apache-2.0
// Slots of documents, as sm90/layout.hpp has them.
#pragma once
#include <cstdint>

#include "kernels/cuda/sm90/layout.hpp"

namespace flamia::test {

/// Slots of a document of `length` tokens, up to where the next one starts.
constexpr std::int64_t padded_slots(std::int64_t length) {
  return (length + sm90::kSlotAlign - 1) / sm90::kSlotAlign * sm90::kSlotAlign;
}

}  // namespace flamia::test
