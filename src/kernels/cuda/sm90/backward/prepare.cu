// SPDX-License-Identifier: Apache-2.0
// The prepare kernel: row and key records from exponents, m, D' and z.
#include "instances.hpp"
#include "numerics/exponent.hpp"
#include "power.cuh"
#include "tile_scan.cuh"

namespace flamia::sm90::backward {
namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kGreatestOffset = 0x1p110f;

/// Exponent that D' asks of FP16: |D'| 2^(-eG - kUnit) < 2^(14 + exponent).
__device__ int offset_reach(float d_prime, int gradient_exponent) {
  const std::uint32_t bits = numerics::bits_of(d_prime) & 0x7FFFFFFF;
  if (bits == 0 || bits >= 0x7F800000) return kLeastReach;
  return clamp(static_cast<int>(bits >> 23) - kExponentBias + 1 - gradient_exponent - (14 + kUnit), kLeastReach, 300);
}

/// Greatest over the thread's 64-query step. Ends with a barrier.
__device__ int step_maximum(int value, int* totals) {
  const int of_warp = __reduce_max_sync(kFullWarp, value);
  if (threadIdx.x % 32 == 0) totals[threadIdx.x / 32] = of_warp;
  __syncthreads();
  const int first_warp = threadIdx.x / kQueryStep * (kQueryStep / 32);
  const int of_step = max(totals[first_warp], totals[first_warp + 1]);
  __syncthreads();
  return of_step;
}

constexpr int kNoWeight = -1000;

__device__ void write_row(const BackwardParams& params, const ScanTile& tile, int head, bool scaled_partials, int* totals) {
  const std::int64_t at = head * params.slots + tile.slot;
  const RowInputs row = read_row(params, tile, at, scaled_partials);
  const auto [query, gradient, dq_exponent, reference, d_prime, flagged, counts] = row;
  const auto [from_here, of_tile] = gradient_reach(row, totals);
  const int reach = counts ? offset_reach(d_prime, gradient) : kLeastReach;
  const int of_step = step_maximum(reach, totals);
  const int weight = gradient + query + kUnit, greatest = step_maximum(counts ? weight : kNoWeight, totals);
  const int lift = greatest == kNoWeight ? 0 : step_lift(greatest);
  if (!tile.written) return;

  const float offset = numerics::scale_pow2(d_prime, -gradient - kCodeShift - kUnit);
  std::uint8_t* const record = static_cast<std::uint8_t*>(params.row_records) + row_field_offset(params.slots, head, tile.slot, 0);
  const auto put = [&](int field, int word) { *reinterpret_cast<int*>(record + field * kFieldBytes) = word; };
  const auto put_float = [&](int field, float value) { put(field, __float_as_int(value)); };
  put_float(kBias, flagged ? numerics::quiet_nan() : numerics::add(static_cast<float>(kCodeShift), -reference));
  put_float(kOffset, counts ? fminf(fmaxf(offset, -kGreatestOffset), kGreatestOffset) : 0.0f);
  put_float(kRho, counts ? numerics::mul(numerics::mul(params.softmax_scale, kLog2E), numerics::pow2(query)) : 0.0f);
  put_float(kFold, counts ? power_of_two(clamp(gradient - of_tile, -126, 0)) : 0.0f);
  put_float(kWeight, counts ? numerics::pow2(weight - 2 * lift) : 0.0f);
  put(kDqUnit, gradient + kUnit + dq_exponent);
  put(kReach, pack_halves(reach, of_step));
  put(kFoldMax, pack_fold(from_here, lift, of_tile));
}

__device__ void write_key(const BackwardParams& params, const ScanTile& tile, int head, int* totals) {
  const std::int64_t at = head * params.slots + tile.slot;
  int key = 0, value = 0;
  bool flagged = false;
  if (tile.valid) {
    const int key_byte = params.key_exponents[at], value_byte = params.value_exponents[at];
    flagged = key_byte == kFlaggedByte || value_byte == kFlaggedByte;
    key = key_byte - kExponentBias;
    value = value_byte - kExponentBias;
  }
  const bool counts = tile.valid && !flagged;
  const int key_reach = prefix_maximum(counts ? key : kLeastExponent, totals);
  const int value_reach = prefix_maximum(counts ? value : kLeastExponent, totals);
  if (threadIdx.x == kScanThreads - 1) totals[0] = key_reach, totals[1] = value_reach;
  __syncthreads();
  const int tile_key = totals[0], tile_value = totals[1];
  const bool uniform = __syncthreads_and(!tile.valid || (counts && key == tile_key && value == tile_value));
  if (!tile.written) return;
  KeyRecord record;
  record.slope = flagged ? numerics::quiet_nan() : counts ? numerics::pow2(key) : 0.0f;
  record.value = flagged ? numerics::quiet_nan() : counts ? power_of_two(clamp(value - kCodeShift - kUnit, -126, 127)) : 0.0f;
  record.share = (counts ? power_of_two(clamp(key - tile_key, -126, 0)) : 1.0f) * power_of_two(tile_shift(tile_value));
  record.reach = static_cast<std::uint32_t>(key_reach + kExponentBias) |
                 static_cast<std::uint32_t>(value_reach + kExponentBias) << 8 |
                 (uniform ? static_cast<std::uint32_t>(kUniform) : 0u);
  static_cast<KeyRecord*>(params.key_records)[at] = record;
}

__global__ void __launch_bounds__(kScanThreads)
    prepare_kernel(const __grid_constant__ BackwardParams params, bool scaled_partials) {
  __shared__ int totals[kScanWarps];
  const int heads = params.query_heads + params.key_heads;
  const std::int64_t jobs = static_cast<std::int64_t>(*params.item_count) * heads;
  for (std::int64_t job = blockIdx.x; job < jobs; job += gridDim.x) {
    const int head = static_cast<int>(job % heads);
    const ScanTile tile = scan_tile(params, static_cast<int>(job / heads));
    if (head < params.query_heads) {
      write_row(params, tile, head, scaled_partials, totals);
    } else {
      write_key(params, tile, head - params.query_heads, totals);
    }
  }
}

}  // namespace

cudaError_t launch_prepare(const BackwardParams& params, bool scaled_partials, int multiprocessors, cudaStream_t stream) {
  constexpr int blocks_per_multiprocessor = 16;
  prepare_kernel<<<multiprocessors * blocks_per_multiprocessor, kScanThreads, 0, stream>>>(params, scaled_partials);
  return cudaGetLastError();
}

}  // namespace flamia::sm90::backward
