// SPDX-License-Identifier: Apache-2.0
// Products of one warp (m16n8k16, FP32 accumulation, d += a b), for sums beside the warpgroups' products.
//
// Lane 4 g + c: a[0], a[2] hold row g, columns 2 c, 2 c + 1 and 8 on; a[1], a[3] row g + 8. b[0], b[1]: rows 2 c, 2 c + 1 and 8 on of
// column g. d[0], d[1]: row g, columns 2 c, 2 c + 1; d[2], d[3]: row g + 8.
#pragma once
#include <cstdint>

namespace flamia::ptx {

__device__ __forceinline__ void warp_product_f16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void warp_product_bf16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// All of it must be there at this point of the program: loads of several are under way together where the first is waited for.
__device__ __forceinline__ void hold(uint4& words) {
  asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
}

}  // namespace flamia::ptx
