// SPDX-License-Identifier: Apache-2.0
// The folding warps (token-blocks). V's exponent varies along the contraction of P V where a tile has several. In a tile that the rows of
// a warpgroup see as a whole, the codes of every token-block with a lower exponent than the tile's greatest are multiplied by
// 2^(its exponent - greatest) in shared memory, once for all rows; the tile then is one of a single value exponent. (Where the right edge
// of a mask cuts the tile, each row has a greatest exponent of its own, and the consumers fold into P: tile_output.cuh.)
#pragma once
#include <cstdint>

#include "../../ptx/barrier.cuh"
#include "../../ptx/code_pairs.cuh"
#include "../../ptx/half.cuh"
#include "../../ptx/matrix.cuh"
#include "exponents.cuh"
#include "storage.hpp"

namespace flamia::sm90::forward {

/// E4M3 codes times 2^-shift, rounded to nearest even. Beside products the pipe for conversions is slow and short of time, so nearly all
/// codes take the way of integers: where no result is subnormal the exponent field falls by `shift`.
class CodeScale {
 public:
  __device__ explicit CodeScale(int shift)
      : step_(static_cast<std::uint32_t>(shift) * 0x08080808u),
        least_(static_cast<std::uint32_t>(min(8 * (shift + 1), 128)) * 0x01010101u),
        factor_(ptx::pack_f16x2(power_of_two(-min(shift, 24)), power_of_two(-min(shift, 24)))) {}

  /// 16 codes. The whole warp.
  __device__ __forceinline__ int4 scaled(const int4& codes) const {
    const std::uint32_t normal = stay_normal(codes.x) & stay_normal(codes.y) & stay_normal(codes.z) & stay_normal(codes.w);
    if (__all_sync(kFullWarp, (normal & kGuard) == kGuard))
      return {static_cast<int>(codes.x - step_), static_cast<int>(codes.y - step_), static_cast<int>(codes.z - step_),
              static_cast<int>(codes.w - step_)};
    return {rounded(codes.x), rounded(codes.y), rounded(codes.z), rounded(codes.w)};
  }

 private:
  static constexpr std::uint32_t kGuard = 0x80808080u;

  /// The guard bits of the codes whose exponent field exceeds the shift.
  __device__ __forceinline__ std::uint32_t stay_normal(std::uint32_t codes) const {
    return ((codes & 0x78787878u) | kGuard) - least_;
  }

  /// By way of FP16: exact down to 2^-24 before the last rounding, and what is less than 2^-10 becomes zero anyway.
  __device__ __forceinline__ int rounded(std::uint32_t codes) const {
    std::uint32_t low, high;
    ptx::unpack_e4m3x4_f16(codes, low, high);
    return static_cast<int>(ptx::pack_e4m3x4_f16(ptx::multiply_f16x2(low, factor_), ptx::multiply_f16x2(high, factor_)));
  }

  std::uint32_t step_, least_, factor_;
};

/// A folding warp's half of a token-block: 16 tokens, one group of V's layout.
template <class Config>
__device__ __forceinline__ void fold_group(std::uint8_t* values, int group, int shift, int lane) {
  const CodeScale scale(shift);
  const std::uint32_t first = ptx::shared_address(values) + group * Config::kValueGroupStride + lane * 16;
#pragma unroll 2
  for (std::uint32_t at = first; at < first + Config::kValueGroupBytes; at += 32 * 16) {
    const int4 codes = scale.scaled(ptx::load_shared_int4(at));
    ptx::store_shared_x4(at, codes.x, codes.y, codes.z, codes.w);
  }
}

/// A request is not written over before both warps have read it: as many later ones take a stage each, and this one's stage is not free
/// before it is done.
template <class Config>
__device__ __forceinline__ void fold_values(Storage<Config>& storage, int half, int lane) {
  static_assert(kBlock / 16 == Config::kFoldingWarps);
  Ring<Config::kStages> request;
  while (true) {
    ptx::barrier_wait(&storage.fold_ready[request.slot], request.parity);
    const FoldRequest fold = storage.folds[request.slot];
    if (fold.blocks == 0) return;
    const TileExponents<Config::kScaleEntries>& tile = storage.exponents[fold.stage];
    for (int block = 0; block < kKeyTile / kBlock; ++block) {
      if ((fold.blocks >> block & 1) != 0)
        fold_group<Config>(storage.value[fold.stage], 2 * block + half, tile.value_exponent - tile.value[block], lane);
    }
    ptx::fence_async_reads();
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(&storage.tile_ready[fold.stage]);
    request.advance();
  }
}

}  // namespace flamia::sm90::forward
