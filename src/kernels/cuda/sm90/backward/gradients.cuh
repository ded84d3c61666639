// SPDX-License-Identifier: Apache-2.0
// Second half of a step in a consumer warpgroup: dS leaves for the dQ warpgroup, dV and dK take the step in.
#pragma once
#include <cstdint>

#include "../../ptx/barrier.cuh"
#include "../../ptx/half.cuh"
#include "scores.cuh"

namespace flamia::sm90::backward {

/// The rare step whose rows need shifts of their own: D' outgrows the tile's V, or the diagonal cuts a tile of several exponents. The
/// warpgroup's first 64 threads find them, one row each; `shifts` is the warpgroup's own.
__device__ __forceinline__ void find_shifts(float* shifts, const std::uint8_t* records, const KeyRecord* keys, Window window,
                                            const StepInfo& info, int first_key, int length) {
  const std::uint32_t barrier = 2 + threadIdx.x / 128;  // named barriers 2 and 3; 1 is the dQ warpgroup's
  const int row = static_cast<int>(threadIdx.x) % 128;
  ptx::named_barrier_sync(barrier, 128);  // the shifts of a step before have been read
  if (row < kQueryStep) {
    const int word = *reinterpret_cast<const int*>(records + row_field_offset(kQueryStep, 0, row, kReach));
    const std::uint32_t tile_reach = keys[info.last_key].reach;
    const std::uint32_t reach =
        (info.flags & kCut) != 0 ? keys[last_key_of_tile(window, info.query + row, first_key, length)].reach : tile_reach;
    shifts[row / kGroup * kGroup + pi_column(row % kGroup)] =
        power_of_two(fp16_shift(value_reach(reach), low_half(word), key_reach(reach), key_reach(tile_reach)));
  }
  ptx::named_barrier_sync(barrier, 128);
}

/// dS times a shift per row. `shifts` = shared address of the thread's first four, order pi.
__device__ __forceinline__ void send_shifted(const float (&y)[kScores], const float (&share)[2], std::uint32_t line,
                                             std::uint32_t shifts) {
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const float4 shift = ptx::load_shared_float4(shifts + u * kFieldBytes);
    const int i = 8 * u;
    ptx::store_matrices_transposed(line + u * exchange_offset(16, 0),
                                   ptx::pack_f16x2(y[i] * (share[0] * shift.x), y[i + 1] * (share[0] * shift.y)),
                                   ptx::pack_f16x2(y[i + 2] * (share[1] * shift.x), y[i + 3] * (share[1] * shift.y)),
                                   ptx::pack_f16x2(y[i + 4] * (share[0] * shift.z), y[i + 5] * (share[0] * shift.w)),
                                   ptx::pack_f16x2(y[i + 6] * (share[1] * shift.z), y[i + 7] * (share[1] * shift.w)));
  }
}

/// What D' of a step's rows asks of FP16.
__device__ __forceinline__ int step_reach(std::uint32_t records) {
  return high_half(ptx::load_shared_int(records + kReach * kFieldBytes));
}
/// Whether all rows of a step may travel in the unit of the tile. `reach` = that of the item's last key.
__device__ __forceinline__ bool shift_is_uniform(int flags, std::uint32_t reach, std::uint32_t records) {
  return ((flags & kCut) == 0 || (reach & kUniform) != 0) && step_reach(records) <= value_reach(reach);
}

/// Sends the step's dS into a slot of the exchange, whatever its rows need.
template <class Config>
__device__ __forceinline__ void send_gradient_of_scores(const float (&y)[kScores], float (&share)[2], std::uint32_t line,
                                                        StepCounter<Config> now, const Place& place, Storage<Config>& storage,
                                                        const Work& work, Window window) {
  const StepInfo info = storage.info(now);
  const std::uint8_t* const records = storage.stage[now.stage()].records;
  const std::uint32_t tile_reach = storage.key_records[info.last_key].reach;
  if (shift_is_uniform(info.flags, tile_reach, ptx::shared_address(records))) {
#pragma unroll
    for (int u = 0; u < 4; ++u) send_scaled(y, u, share, line);
    return;
  }
  float* const shifts = storage.shifts[threadIdx.x / 128];
  find_shifts(shifts, records, storage.key_records, window, info, work.first_key, work.length);
  share[0] *= power_of_two(-tile_shift(value_reach(tile_reach)));
  share[1] *= power_of_two(-tile_shift(value_reach(tile_reach)));
  send_shifted(y, share, line, ptx::shared_address(shifts) + place.quad());
}

/// Weights that turn Y into the units of dK's payload: 2^(eG + eQ + 11) of queries 16 u ...; `kept` carries a token-block's over two u.
template <class Config>
__device__ __forceinline__ float4 weights(std::uint32_t records, int u, const Place& place, float& kept) {
  if constexpr (Config::kScaleGroup == ScaleGroup::token) return query_field(records, kWeight, u, place);
  if (u % 2 == 0) kept = block_field(records, kWeight, u / 2);
  return {kept, kept, kept, kept};
}

/// Greatest dS 2^(eG + eQ) of the thread's two keys over its queries of the step, as bits.
template <class Config>
__device__ __forceinline__ void find_maxima(std::uint32_t (&greatest)[2], const float (&y)[kScores], std::uint32_t records,
                                            const Place& place) {
  greatest[0] = greatest[1] = 0;
  float kept = 0.0f;
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const float4 weight = weights<Config>(records, u, place, kept);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = first_of_word(u, half);
      greatest[half] =
          __vimax3_u32(greatest[half], __float_as_uint(fabsf(y[i]) * weight.x), __float_as_uint(fabsf(y[i + 1]) * weight.y));
      greatest[half] =
          __vimax3_u32(greatest[half], __float_as_uint(fabsf(y[i + 4]) * weight.z), __float_as_uint(fabsf(y[i + 5]) * weight.w));
    }
  }
}
/// 2^exponent of dK's payload: one a key. A key lies in the four lanes of a quad.
__device__ __forceinline__ void find_key_scale(float (&scale)[2], const std::uint32_t (&greatest)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) scale[half] = payload_scale(greatest_of_quad(greatest[half]));
}

/// dK's payload. Elements of an all but vanished key may meet a factor beyond FP32's range: it stays finite, so that 0 stays 0.
template <class Config>
__device__ __forceinline__ void round_key_payload(std::uint32_t (&codes)[kCodeWords], const float (&y)[kScores],
                                                  const float (&scale)[2], std::uint32_t records, const Place& place) {
  constexpr float greatest = 0x1p127f;
  const float inverse[2] = {inverse_power(scale[0]), inverse_power(scale[1])};
  float factor[2] = {0.0f, 0.0f}, kept = 0.0f;
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const float4 weight = weights<Config>(records, u, place, kept);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = first_of_word(u, half);
      if constexpr (Config::kScaleGroup == ScaleGroup::block) {
        if (u % 2 == 0) factor[half] = fminf(weight.x * inverse[half], greatest);
        codes[2 * u + half] =
            ptx::pack_e4m3x4(y[i] * factor[half], y[i + 1] * factor[half], y[i + 4] * factor[half], y[i + 5] * factor[half]);
      } else {
        codes[2 * u + half] = ptx::pack_e4m3x4(y[i] * weight.x * inverse[half], y[i + 1] * weight.y * inverse[half],
                                               y[i + 4] * weight.z * inverse[half], y[i + 5] * weight.w * inverse[half]);
      }
    }
  }
}

}  // namespace flamia::sm90::backward
