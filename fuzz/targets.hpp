// SPDX-License-Identifier: Apache-2.0
// What is fuzzed. Each function takes any bytes, checks what must hold whatever they are, and aborts if it does not.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace flamia::fuzz {

enum class Verdict { accepted, rejected };

/// The bytes of a safetensors file, read as the program's input.
Verdict loader(const std::uint8_t* bytes, std::size_t size);

/// Byte 0: tokens; then int32 cu_seqlens. A small forward and backward call.
Verdict cu_seqlens(const std::uint8_t* bytes, std::size_t size);

}  // namespace flamia::fuzz

#define FLAMIA_FUZZ_REQUIRE(condition)                                                                  \
  do {                                                                                                  \
    if (!(condition)) {                                                                                 \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition), std::abort(); \
    }                                                                                                   \
  } while (false)
