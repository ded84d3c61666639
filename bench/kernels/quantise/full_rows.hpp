// SPDX-License-Identifier: Apache-2.0
// Rows of the table for `nvfp4-full`'s copies: their times, once codes and scales equal those of the host quantiser.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

namespace flamia::bench {

/// Adds a row (part, milliseconds, bytes that must move).
using AddRow = std::function<void(const std::string& part, double ms, double bytes)>;
using TimeMs = std::function<double(const std::function<void()>& call)>;

/// input: BF16 [tokens][heads][128] on the device, divisor [heads][tokens]. Returns the milliseconds of all four operands.
double time_full(const std::uint16_t* input, const float* divisor, std::int64_t tokens, int heads, const TimeMs& time,
                 const AddRow& row);

}  // namespace flamia::bench
