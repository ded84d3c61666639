// SPDX-License-Identifier: Apache-2.0
// K of an item as the scores of NVFP4 take it in, code times scale in FP16: made in the block, no such copy exists in memory.
#pragma once
#include <cstdint>

#include "../../ptx/barrier.cuh"
#include "../../ptx/matrix.cuh"
#include "../nvfp4_values.cuh"
#include "config.hpp"

namespace flamia::sm90::ds16 {

/// A warpgroup's own 64 keys; its 128 threads. Nobody else reads these, and no product does at present.
template <class Config>
__device__ __forceinline__ void make_key_scores(Storage<Config>& storage, std::uint32_t thread, std::uint32_t group) {
  constexpr std::uint32_t kOctets = Config::kHeadDim / 8, kKeysAtOnce = 128 / kOctets;
  const std::uint32_t in_group = thread % 128, row = in_group % 8, octet = in_group / 8 % kOctets;
  const std::uint32_t key = Config::kKeysPerConsumer * group + in_group / (8 * kOctets) * 8 + row;
  const std::uint32_t codes = ptx::shared_address(storage.key_codes.nvfp4) + key * (Config::kHeadDim / 2) + octet * 4;
  const std::uint8_t* const scales = storage.key_codes.scales + key * (Config::kHeadDim / 16) + octet / 2;
  constexpr std::uint32_t kNans = 0x7fff7fff;
  const std::uint32_t slopes = ptx::shared_address(&storage.key_factors[key].slope);
  const std::uint32_t to = ptx::shared_address(storage.key) + (key - row) * (2 * Config::kHeadDim) + octet * 128 + row * 16;
#pragma unroll
  for (std::uint32_t i = 0; i < Config::kKeysPerConsumer; i += kKeysAtOnce) {
    const int word = ptx::load_shared_int(codes + i * (Config::kHeadDim / 2));
    uint4 values = nvfp4_values(static_cast<std::uint32_t>(word), scales[i * (Config::kHeadDim / 16)]);
    const float slope = ptx::load_shared_float(slopes + i * sizeof(KeyFactors));
    if (slope != slope) values = {kNans, kNans, kNans, kNans};  // flagged
    ptx::store_shared_x4(to + i * (2 * Config::kHeadDim), values.x, values.y, values.z, values.w);
  }
  ptx::fence_async_reads();
  ptx::named_barrier_sync(3 + group, 128);
}

}  // namespace flamia::sm90::ds16
