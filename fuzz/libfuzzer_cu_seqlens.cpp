// SPDX-License-Identifier: Apache-2.0
#include "targets.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  flamia::fuzz::cu_seqlens(bytes, size);
  return 0;
}
