// SPDX-License-Identifier: Apache-2.0
// What rounding did to one operand.
#pragma once
#include "flamia/health.hpp"
#include "quantize/quantize.hpp"

namespace flamia::quantize {

/// `tensor` = `input` quantised, over the same documents.
OperandHealth measure(const QuantiseInput& input, const schedule::Documents& documents, const QuantisedTensor& tensor);

}  // namespace flamia::quantize
