// SPDX-License-Identifier: Apache-2.0
// P of a 64 x 128 tile in NVFP4 with two levels: a row's blocks of 16 keys have an E4M3 scale below the row's first level.
//
// Fragment of a thread (lane = 4 g + c of its warp): score register i belongs to row g + 8 * (i / 2 % 2) of the warp's 16 rows and to key
// 8 * (i / 4) + 2 c + i % 2. So registers 8 b ... 8 b + 7 are the thread's share of block b, four for each of its two rows ("halves"), and
// packed in pairs they are the A operand of the product that contracts the block.
#pragma once
#include <cuda_fp8.h>

#include "kernels/cuda/ptx/arithmetic.cuh"
#include "kernels/cuda/ptx/convert.cuh"
#include "numerics/exponent.hpp"
#include "quantize/cuda/block_scale.cuh"
#include "quantize/scale.hpp"

namespace flamia::sm90::sage3 {

using quantize::gpu::nearest_inverse;
using quantize::gpu::round_e2m1;

inline constexpr unsigned kFullWarp = 0xFFFFFFFFu;
inline constexpr int kBlocks = 8;  // of 16 keys

/// Over the four threads that share a row.
__device__ __forceinline__ float quad_maximum(float value) {
  value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, 1));
  return fmaxf(value, __shfl_xor_sync(kFullWarp, value, 2));
}
__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(kFullWarp, value, 1);
  return value + __shfl_xor_sync(kFullWarp, value, 2);
}

/// What stays outside the product, of a thread's two rows, and their sums of values.
struct RoundedRows {
  float first_level[2], sum[2];
};

/// p: exp2 of the tile's scores, 0 for masked pairs and NaN. `constant`: the first level of every row, or 0.
__device__ __forceinline__ RoundedRows round_rows(const float (&p)[8 * kBlocks], std::uint32_t (&words)[4 * kBlocks],
                                                  float constant) {
  RoundedRows rows{};
  float greatest[kBlocks][2], top[2] = {0.f, 0.f}, divisor[2], per_divisor[2];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 8 * b + 2 * half;
      greatest[b][half] = quad_maximum(fmaxf(fmaxf(p[i], p[i + 1]), fmaxf(p[i + 4], p[i + 5])));
      top[half] = fmaxf(top[half], greatest[b][half]);
    }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows.first_level[half] = constant != 0.f ? constant : quantize::first_level(top[half], 6.f);
    divisor[half] = __fmul_rn(6.f, rows.first_level[half]);
    per_divisor[half] = nearest_inverse(divisor[half]);
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    float quotient[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // greatest / divisor, rounded to nearest
      const float near = __fmul_rn(greatest[b][half], per_divisor[half]);
      quotient[half] = __fmaf_rn(__fmaf_rn(-near, divisor[half], greatest[b][half]), per_divisor[half], near);
    }
    const __half2_raw scales = __nv_cvt_fp8x2_to_halfraw2(ptx::pack_e4m3x2(quotient[0], quotient[1]), __NV_E4M3);
    const std::uint32_t both = scales.x | static_cast<std::uint32_t>(scales.y) << 16;
    float scale[2];
    ptx::unpack_f16x2(both, scale[0], scale[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // A scale of 0 has codes 0: what is below it is at most 2^-10 of its divisor, which rounds to 0 below the least scale, 2^-9
      const float y = scale[half] == 0.f ? 0.f : nearest_inverse(__fmul_rn(scale[half], rows.first_level[half]));
      float value[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        value[k] = __fmul_rn(round_e2m1(__fmul_rn(p[8 * b + 2 * half + k % 2 + 4 * (k / 2)], y)), scale[half]);
        rows.sum[half] = __fadd_rn(rows.sum[half], value[k]);
      }
      words[4 * b + half] = ptx::pack_f16x2(value[0], value[1]);
      words[4 * b + half + 2] = ptx::pack_f16x2(value[2], value[3]);
    }
  }
  return rows;
}

}  // namespace flamia::sm90::sage3
