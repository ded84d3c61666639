// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch: the next kernel of the stream may be placed while this one still runs.
#pragma once

namespace flamia::ptx {

/// Once every thread block of this grid has said so (or left), the next grid's thread blocks may take free places.
__device__ __forceinline__ void let_next_grid_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

/// Until the grid before has ended and what it wrote can be seen.
__device__ __forceinline__ void wait_for_previous_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace flamia::ptx
