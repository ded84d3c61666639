// SPDX-License-Identifier: Apache-2.0
// The prepare kernel of the backward pass with dS in BF16: row and key records from exponents, m, D' and z.
#include "../../ptx/grid.cuh"
#include "../backward/tile_scan.cuh"
#include "instances.hpp"
#include "numerics/exponent.hpp"
#include "records.hpp"

namespace flamia::sm90::ds16 {
namespace {

using namespace backward;

constexpr float kGreatestOffset = 0x1p110f;

/// A power of two that the rows of a document carry for its keys, whose slopes are without it: sticky exponents are then 0 in nearly all tiles of 128
/// keys. That of a key a third into the document, where half of a causal document's steps are done. It changes no product of a row's
/// factor and a key's, because no factor leaves FP32's range.
template <ScaleGroup kScaleGroup>
__device__ int common_exponent(const BackwardParams& params, const Document& document, int key_head) {
  if constexpr (kScaleGroup != ScaleGroup::token) return 0;
  constexpr int kGreatest = 20;  // 2^-127 over it is still a number
  const int byte = params.key_exponents[key_head * params.slots + document.slot_start + document.length / 3];
  const int exponent = byte - kExponentBias;
  return exponent < -kGreatest || exponent > kGreatest ? 0 : exponent;
}

template <ScaleGroup kScaleGroup>
__device__ void write_row(const BackwardParams& params, const ScanTile& tile, int head, bool scaled_partials, int* totals) {
  using Record = RowRecord<kScaleGroup>;
  const std::int64_t at = head * params.slots + tile.slot;
  const RowInputs row = read_row(params, tile, at, scaled_partials);
  const auto [query, gradient, dq_exponent, reference, d_prime, flagged, counts] = row;
  const int common = common_exponent<kScaleGroup>(params, tile.document, head / (params.query_heads / params.key_heads));
  const auto [from_here, of_tile] = gradient_reach(row, totals);
  // Finite and right for flagged tokens too: a block's first token may be one, by what it sees, when others are not.
  const int score_exponent = kScoreBytes<kScaleGroup> == 1 ? query : 0;
  const float scale = numerics::mul(numerics::mul(params.softmax_scale, kLog2E), numerics::pow2(common));
  const float rho = tile.valid ? numerics::mul(scale, numerics::pow2(score_exponent)) : 0.0f;
  const float fold = tile.valid ? power_of_two(clamp(gradient - of_tile, -126, 0)) : 0.0f;
  const int gain = (Record::kPerToken ? of_tile : gradient) - kCodeShift;
  if (!tile.written) return;
  const RowArrays arrays = row_arrays<kScaleGroup>(params.row_records, params.slots, params.query_heads);
  std::uint8_t* const record = arrays.records + at / kGroup * Record::kBytes;
  const int place = pi_column(static_cast<int>(tile.slot % kGroup)) * 4;
  const auto put = [&](int byte, float value) { *reinterpret_cast<float*>(record + byte) = value; };
  const float offset = numerics::scale_pow2(d_prime, Record::kPerToken ? gain - gradient : -kCodeShift);
  put(Record::kBias + place, flagged ? numerics::quiet_nan() : numerics::add(static_cast<float>(kCodeShift), -reference));
  put(Record::kOffset + place, counts ? fminf(fmaxf(offset, -kGreatestOffset), kGreatestOffset) : 0.0f);
  if constexpr (Record::kPerToken) {
    put(Record::kRho + place, rho);
    put(Record::kFold + place, fold);
  }
  if (tile.slot % kGroup == 0) {
    put(Record::kBlockRho, Record::kPerToken ? numerics::pow2(common) : rho);
    put(Record::kBlockFold, fold);
    put(Record::kGain, tile.valid ? power_of_two(clamp(gain, -126, kGreatestGain)) : 0.0f);
    put(Record::kReference, __int_as_float(of_tile));
  }
  arrays.references[at] = from_here;
  arrays.units[at] = power_of_two(clamp(dq_exponent, -kGreatestUnit, kGreatestUnit));
}

template <ScaleGroup kScaleGroup>
__device__ void write_key(const BackwardParams& params, const ScanTile& tile, int head) {
  if (!tile.written) return;
  const std::int64_t at = head * params.slots + tile.slot;
  KeyFactors factors{0.0f, 0.0f};
  if (tile.valid) {
    const int key_byte = params.key_exponents[at], value_byte = params.value_exponents[at];
    const bool flagged = key_byte == kFlaggedByte || value_byte == kFlaggedByte;
    if (flagged)
      factors.slope = numerics::quiet_nan();
    else
      factors = {kScoreBytes<kScaleGroup> == 1
                     ? numerics::pow2(key_byte - kExponentBias - common_exponent<kScaleGroup>(params, tile.document, head))
                     : 1.0f,
                 power_of_two(clamp(value_byte - kExponentBias, -126, kGreatestValue))};
  }
  static_cast<KeyFactors*>(params.key_records)[at] = factors;
}

template <ScaleGroup kScaleGroup>
__global__ void __launch_bounds__(kScanThreads)
    prepare_kernel(const __grid_constant__ BackwardParams params, bool scaled_partials) {
  __shared__ int totals[kScanWarps];
  ptx::let_next_grid_start();
  const int heads = params.query_heads + params.key_heads;
  const std::int64_t jobs = static_cast<std::int64_t>(*params.item_count) * heads;
  for (std::int64_t job = blockIdx.x; job < jobs; job += gridDim.x) {
    const int head = static_cast<int>(job % heads);
    const ScanTile tile = scan_tile(params, static_cast<int>(job / heads));
    if (head < params.query_heads) {
      write_row<kScaleGroup>(params, tile, head, scaled_partials, totals);
    } else {
      write_key<kScaleGroup>(params, tile, head - params.query_heads);
    }
  }
}

}  // namespace

cudaError_t launch_prepare(const BackwardParams& params, const BackwardConfig& config, int multiprocessors, cudaStream_t stream) {
  // Half of the threads where values of Q or K are made beside this one.
  const int blocks_per_multiprocessor = config.scale_group == ScaleGroup::nvfp4 && !config.deterministic ? 16 : 8;
  const int blocks = multiprocessors * blocks_per_multiprocessor;
  const bool scaled_partials = config.partials == PartialFormat::f16;
  if (config.scale_group == ScaleGroup::block)
    prepare_kernel<ScaleGroup::block><<<blocks, kScanThreads, 0, stream>>>(params, scaled_partials);
  else if (config.scale_group == ScaleGroup::token)
    prepare_kernel<ScaleGroup::token><<<blocks, kScanThreads, 0, stream>>>(params, scaled_partials);
  else
    prepare_kernel<ScaleGroup::nvfp4><<<blocks, kScanThreads, 0, stream>>>(params, scaled_partials);
  return cudaGetLastError();
}

}  // namespace flamia::sm90::ds16
