// SPDX-License-Identifier: Apache-2.0
// Launch interface of the split Hopper backward pass: the same gradients as ../backward/backward.hpp from two kernels that share nothing. One
// makes dQ, a tile of queries against all its keys; the other dK and dV, a tile of keys against all its queries. Seven products instead of
// five, but no partial sums in memory: nothing to clear, no pass at the end, and every gradient is bit-repeatable.
//
// With dS in BF16 the kernels are those of ../backward_ds16: dQ by one of its own, dK and dV by the fused one without dQ.
// It is what launch_backward() runs in deterministic mode. Parameters and recipe fields are those of the fused pass. Not used, and may be null:
// dq_exponent, dq_partials; `partials` of the configuration does not count.
#pragma once
#include "../backward/backward.hpp"

namespace flamia::sm90 {

/// Prepare, dQ, dK and dV, in this order; nothing else (no allocation, no synchronisation). The other two need the records of *prepare*.
/// cudaErrorInvalidValue: a parameter is missing or out of range.
cudaError_t launch_split_prepare(const BackwardParams& params, const BackwardConfig& config, cudaStream_t stream);
cudaError_t launch_split_query_gradient(const BackwardParams& params, const BackwardConfig& config, cudaStream_t stream);
cudaError_t launch_split_key_gradients(const BackwardParams& params, const BackwardConfig& config, cudaStream_t stream);

}  // namespace flamia::sm90
