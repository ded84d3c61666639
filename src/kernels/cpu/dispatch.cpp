// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/buffers.hpp"
#include "kernels/cpu/call.hpp"

namespace flamia::cpu {

namespace baseline {
extern const TileCode kTileCode;
}
#if defined(FLAMIA_AVX2_TILE_CODE)
namespace avx2 {
extern const TileCode kTileCode;
}
#endif
#if defined(FLAMIA_AVX512_TILE_CODE)
namespace avx512 {
extern const TileCode kTileCode;
}
#endif

const TileCode* tile_code(Isa isa) {
  const TileCode* fast = nullptr;
  const TileCode* faster = nullptr;
#if defined(FLAMIA_AVX2_TILE_CODE)
  // every processor with AVX2 has F16C, which the code is compiled with too
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) fast = &avx2::kTileCode;
#endif
#if defined(FLAMIA_AVX512_TILE_CODE)
  if (fast && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    faster = &avx512::kTileCode;
#endif
  switch (isa) {
    case Isa::best:
      return faster ? faster : fast ? fast : &baseline::kTileCode;
    case Isa::baseline:
      return &baseline::kTileCode;
    case Isa::avx2:
      return fast;
    case Isa::avx512:
      return faster;
  }
  return nullptr;
}

std::int64_t scratch_floats(int head_dim) {
  return kRowFloats + std::int64_t{kPanels} * kTile * head_dim + std::int64_t{kSquares} * kTile * kTile;
}

}  // namespace flamia::cpu
