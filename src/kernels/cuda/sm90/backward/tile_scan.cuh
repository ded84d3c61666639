// SPDX-License-Identifier: Apache-2.0
// What the prepare kernels of the backward passes have in common: a block makes 128 positions of one head at a time, a thread a position.
#pragma once
#include "backward.hpp"
#include "numerics/exponent.hpp"
#include "power.cuh"
#include "work.hpp"

namespace flamia::sm90::backward {

inline constexpr int kScanThreads = kKeyTile;
inline constexpr int kScanWarps = kScanThreads / 32;

/// Scans of one integer per thread over the block; `totals` has room for one word a warp. Both end with a barrier.
__device__ inline int suffix_maximum(int value, int* totals) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int after = __shfl_down_sync(kFullWarp, value, step);
    if (lane + step < 32) value = max(value, after);
  }
  if (lane == 0) totals[warp] = value;
  __syncthreads();
  for (int w = warp + 1; w < kScanWarps; ++w) value = max(value, totals[w]);
  __syncthreads();
  return value;
}
__device__ inline int prefix_maximum(int value, int* totals) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(kFullWarp, value, step);
    if (lane >= step) value = max(value, before);
  }
  if (lane == 31) totals[warp] = value;
  __syncthreads();
  for (int w = 0; w < warp; ++w) value = max(value, totals[w]);
  __syncthreads();
  return value;
}

struct ScanTile {
  Document document;
  int first, position;
  std::int64_t slot;
  bool valid;    // the position is a token
  bool written;  // this block owns the slot's record, or nobody does (behind the last document)
};

__device__ inline ScanTile scan_tile(const BackwardParams& params, int item) {
  const WorkItem work = params.items[item];
  const Document document = params.documents[work.document];
  ScanTile tile{document, work.first, work.first + static_cast<int>(threadIdx.x), 0, false, false};
  tile.slot = static_cast<std::int64_t>(document.slot_start) + tile.position;
  tile.valid = tile.position < document.length;
  const int own = (document.length + kGroup - 1) / kGroup * kGroup;
  tile.written = tile.position < own || (tile.slot >= *params.used_slots && tile.slot < params.slots);
  return tile;
}

/// What a row's records are made of; zeros behind the document's end.
struct RowInputs {
  int query = 0, gradient = 0, dq_exponent = 0;  // exponents, 0 of a flagged operand
  float reference = 0.0f, d_prime = 0.0f;
  bool flagged = false;
  bool counts = false;  // a token, not flagged
};
__device__ inline RowInputs read_row(const BackwardParams& params, const ScanTile& tile, std::int64_t at, bool scaled_partials) {
  RowInputs row;
  if (tile.valid) {
    const int query_byte = params.query_exponents[at], gradient_byte = params.gradient_exponents[at];
    row.reference = params.row_reference[at];
    row.d_prime = params.d_prime[at];
    if (scaled_partials) row.dq_exponent = params.dq_exponent[at];
    row.flagged = query_byte == kFlaggedByte || gradient_byte == kFlaggedByte || numerics::is_nan(row.reference) ||
                  numerics::is_nan(row.d_prime);
    row.query = query_byte == kFlaggedByte ? 0 : query_byte - kExponentBias;
    row.gradient = gradient_byte == kFlaggedByte ? 0 : gradient_byte - kExponentBias;
  }
  row.counts = tile.valid && !row.flagged;
  return row;
}

/// Greatest exponent of dO': from the thread's row to the tile's end, and of the whole tile. Ends with a barrier.
struct GradientReach {
  int from_here, of_tile;
};
__device__ inline GradientReach gradient_reach(const RowInputs& row, int* totals) {
  const int from_here = suffix_maximum(row.counts ? row.gradient : kLeastExponent, totals);
  if (threadIdx.x == 0) totals[0] = from_here;
  __syncthreads();
  const int of_tile = totals[0];
  __syncthreads();
  return {from_here, of_tile};
}

}  // namespace flamia::sm90::backward
