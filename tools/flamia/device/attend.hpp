// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "call.hpp"

namespace flamia::cli {

/// As attend(), with the tensors copied to the GPU and back. q, k and v must be BF16 or F16. O is computed in BF16 there and widened where
/// the caller asked for F32. `seconds` covers the calls alone, not the copies.
Status attend_on_device(const Inputs& inputs, const Plan& plan, const CallOptions& options, CallResult* result);

}  // namespace flamia::cli
