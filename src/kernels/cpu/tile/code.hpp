// SPDX-License-Identifier: Apache-2.0
// The tile code of one instruction set as a table (call.hpp).
#pragma once
#include "kernels/cpu/tile/backward.hpp"
#include "kernels/cpu/tile/block_scaled.hpp"
#include "kernels/cpu/tile/forward.hpp"

namespace flamia::cpu::FLAMIA_ISA {

/// For hosts that lack the instruction set this must not be called, not even to look at the table: it is constant data.
extern const TileCode kTileCode;
// NOLINTNEXTLINE(misc-definitions-in-headers): included once per instruction set, each in a namespace of its own
const TileCode kTileCode{FLAMIA_ISA_NAME,      forward_tile,        bound_exponents_of_document,
                         prepare_rows_of_tile, greatest_ds_of_tile, d_q_tile,
                         d_k_d_v_tile,         block_scaled_tile};

}  // namespace flamia::cpu::FLAMIA_ISA
