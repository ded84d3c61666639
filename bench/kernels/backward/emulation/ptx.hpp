// SPDX-License-Identifier: Apache-2.0
// The functions of src/kernels/cuda/ptx for emulated threads, from the definitions of the PTX ISA: mbarriers, bulk copies, matrix loads and
// stores, FP8 products with their fragments and descriptors. Products happen at once and add in double: neither their asynchrony nor the
// accumulator's 13 bits are emulated.
#pragma once
#include "threads.hpp"

namespace flamia::sm90::backward {
alignas(1024) inline std::uint8_t shared_memory[240 * 1024];  // what the kernel declares extern
}

inline std::uint64_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<std::uint64_t>(static_cast<const std::uint8_t*>(pointer) - flamia::sm90::backward::shared_memory);
}

namespace flamia::ptx {

using Barrier = std::uint64_t;

inline std::uint8_t* at_shared(std::uint32_t address) { return sm90::backward::shared_memory + address; }
[[noreturn]] inline void fail(const char* what) {
  std::printf("emulation: %s\n", what);
  std::exit(3);
}

// ---- barriers and copies -------------------------------------------------------------------------------------------------------

inline void complete_if_due(emulation::BarrierState& state) {
  if (state.pending < 0) fail("more arrivals than a barrier expects");
  if (state.pending != 0 || state.bytes != 0) return;
  state.pending = state.expected;
  ++state.phase;
  ++emulation::progress;
}
inline void barrier_init(Barrier* barrier, std::uint32_t arrivals) { emulation::barriers[barrier] = {arrivals, arrivals, 0, 0}; }
inline void fence_before_async_use() {}
inline void fence_async_reads() {}
inline void barrier_arrive(Barrier* barrier) {
  auto& state = emulation::barriers.at(barrier);
  --state.pending;
  complete_if_due(state);
}
inline void barrier_arrive_expect(Barrier* barrier, std::uint32_t bytes) {
  emulation::barriers.at(barrier).bytes += bytes;
  barrier_arrive(barrier);
}
inline void barrier_wait(Barrier* barrier, std::uint32_t parity) {
  const auto& state = emulation::barriers.at(barrier);
  emulation::wait_until([&] { return (state.phase & 1) != parity; }, "an mbarrier");
}
inline void barrier_wait_patiently(Barrier* barrier, std::uint32_t parity, std::uint32_t) { barrier_wait(barrier, parity); }
inline bool barrier_passed(Barrier* barrier, std::uint32_t parity) { return (emulation::barriers.at(barrier).phase & 1) != parity; }
inline void let_next_grid_start() {}
inline void named_barrier_sync(std::uint32_t name, std::uint32_t threads) { emulation::meet(static_cast<int>(name), threads); }
inline void named_barrier_arrive(std::uint32_t name, std::uint32_t) { emulation::arrive(static_cast<int>(name)); }
inline void bulk_copy(void* shared, const void* global, std::uint32_t bytes, Barrier* landed) {
  if ((reinterpret_cast<std::uintptr_t>(shared) | reinterpret_cast<std::uintptr_t>(global) | bytes) % 16 != 0)
    fail("unaligned bulk copy");
  std::memcpy(shared, global, bytes);
  auto& state = emulation::barriers.at(landed);
  state.bytes -= bytes;
  complete_if_due(state);
}
inline bool elect_lane() { return emulation::current % 32 == 0; }
inline int thread_index() { return static_cast<int>(threadIdx.x); }
inline unsigned kept(unsigned value) { return value; }
inline void need(std::uint32_t) {}
template <int kRegisters>
void take_registers() {}
template <int kRegisters>
void give_registers() {}

// ---- numbers -------------------------------------------------------------------------------------------------------------------

inline float exp2_approximate(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}
inline std::uint8_t to_e4m3(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
inline std::uint16_t pack_e4m3x2(float low, float high) { return static_cast<std::uint16_t>(to_e4m3(low) | to_e4m3(high) << 8); }
inline std::uint32_t pack_e4m3x4(float b0, float b1, float b2, float b3) {
  return pack_e4m3x2(b0, b1) | static_cast<std::uint32_t>(pack_e4m3x2(b2, b3)) << 16;
}
inline void unpack_e4m3x2(std::uint16_t codes, float& low, float& high) {
  low = __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(codes & 0xFF), __NV_E4M3)));
  high = __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(codes >> 8), __NV_E4M3)));
}
inline float half_to_float(std::uint32_t bits) {
  __half_raw raw;
  raw.x = static_cast<std::uint16_t>(bits);
  return __half2float(__half(raw));
}
inline float low_f16(std::uint32_t pair) { return half_to_float(pair & 0xFFFF); }
inline float high_f16(std::uint32_t pair) { return half_to_float(pair >> 16); }
inline std::uint32_t pack_f16x2(float low, float high) {
  const __half_raw a = __float2half_rn(low), b = __float2half_rn(high);
  return a.x | static_cast<std::uint32_t>(b.x) << 16;
}
inline std::uint32_t pack_bf16x2(float low, float high) {
  const __nv_bfloat16_raw a = __float2bfloat16_rn(low), b = __float2bfloat16_rn(high);
  return a.x | static_cast<std::uint32_t>(b.x) << 16;
}
inline std::uint32_t max_magnitude_f16x2(std::uint32_t a, std::uint32_t b) {
  return pack_f16x2(std::fmax(std::fabs(low_f16(a)), std::fabs(low_f16(b))),
                    std::fmax(std::fabs(high_f16(a)), std::fabs(high_f16(b))));
}
inline std::uint32_t multiply_f16x2(std::uint32_t a, std::uint32_t b) {
  return pack_f16x2(low_f16(a) * low_f16(b), high_f16(a) * high_f16(b));
}
inline std::uint32_t pack_e4m3x4_f16(std::uint32_t low, std::uint32_t high) {
  return pack_e4m3x4(low_f16(low), high_f16(low), low_f16(high), high_f16(high));
}

// ---- shared and global memory --------------------------------------------------------------------------------------------------

template <class T>
T load_shared(std::uint32_t address) {
  if (address % sizeof(T) != 0) fail("unaligned load from shared memory");
  T value;
  std::memcpy(&value, at_shared(address), sizeof value);
  return value;
}
inline std::uint32_t shared_address(const void* shared) { return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared)); }
inline float4 load_shared_float4(std::uint32_t address) { return load_shared<float4>(address); }
inline int4 load_shared_int4(std::uint32_t address) { return load_shared<int4>(address); }
inline float2 load_shared_float2(std::uint32_t address) { return load_shared<float2>(address); }
inline float load_shared_float(std::uint32_t address) { return load_shared<float>(address); }
inline int load_shared_int(std::uint32_t address) { return load_shared<int>(address); }

inline void store_shared(std::uint32_t address, std::uint32_t word) { std::memcpy(at_shared(address), &word, 4); }

/// Lane l writes line l % 8 of matrix l / 8: the elements that other lanes hold in column l % 8.
inline void store_matrices_transposed(std::uint32_t shared, std::uint32_t m0, std::uint32_t m1, std::uint32_t m2,
                                      std::uint32_t m3) {
  const std::uint32_t own[4] = {m0, m1, m2, m3};
  std::uint32_t all[4][32];
  for (int m = 0; m < 4; ++m) {
    const std::uint64_t* const values = emulation::share_in_warp(own[m], "a matrix store");
    for (int lane = 0; lane < 32; ++lane) all[m][lane] = static_cast<std::uint32_t>(values[lane]);
  }
  const int lane = emulation::current % 32, matrix = lane / 8, column = lane % 8;
  for (int row = 0; row < 8; ++row) {
    const std::uint32_t pair = all[matrix][row * 4 + column / 2];
    const auto element = static_cast<std::uint16_t>(column % 2 != 0 ? pair >> 16 : pair & 0xFFFF);
    std::memcpy(at_shared(shared) + 2 * row, &element, 2);
  }
  __syncwarp();
}
/// Lane l gives the address of row l % 8 of matrix l / 8; every lane writes its pair into the rows as they lie.
inline void store_matrices(std::uint32_t shared, std::uint32_t m0, std::uint32_t m1, std::uint32_t m2, std::uint32_t m3) {
  const std::uint32_t own[4] = {m0, m1, m2, m3};
  const std::uint64_t* const lines = emulation::share_in_warp(shared, "a matrix store");
  const int lane = emulation::current % 32;
  for (int i = 0; i < 4; ++i)
    std::memcpy(at_shared(static_cast<std::uint32_t>(lines[8 * i + lane / 4]) + 4 * (lane % 4)), &own[i], 4);
  __syncwarp();
}
inline void load_matrices(std::uint32_t (&m)[4], std::uint32_t shared) {
  const std::uint64_t* const lines = emulation::share_in_warp(shared, "a matrix load");
  const int lane = emulation::current % 32;
  for (int i = 0; i < 4; ++i)
    m[i] = load_shared<std::uint32_t>(static_cast<std::uint32_t>(lines[8 * i + lane / 4]) + 4 * (lane % 4));
}
inline void store_shared_x4(std::uint32_t address, std::uint32_t w0, std::uint32_t w1, std::uint32_t w2, std::uint32_t w3) {
  const std::uint32_t words[4] = {w0, w1, w2, w3};
  if (address % 16 != 0) fail("unaligned store to shared memory");
  std::memcpy(at_shared(address), words, sizeof words);
}
inline void add_bulk_f16(void* global, std::uint32_t shared, std::uint32_t bytes) {
  auto* const sums = static_cast<std::uint16_t*>(global);
  for (std::uint32_t i = 0; i < bytes / 2; ++i) {
    std::uint16_t addend;
    std::memcpy(&addend, at_shared(shared + 2 * i), 2);
    sums[i] = static_cast<std::uint16_t>(pack_f16x2(half_to_float(sums[i]) + half_to_float(addend), 0.0f));
  }
}
inline void add_global_f16x8(void* global, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  const std::uint32_t words[4] = {a, b, c, d};
  auto* const sums = static_cast<std::uint16_t*>(global);
  for (int i = 0; i < 8; ++i)
    sums[i] =
        static_cast<std::uint16_t>(pack_f16x2(half_to_float(sums[i]) + half_to_float(words[i / 2] >> 16 * (i % 2) & 0xFFFF), 0.0f));
}
inline void wait_bulk_read() {}
inline void add_global_f32x4(void* global, float a, float b, float c, float d) {
  auto* const sums = static_cast<float*>(global);
  sums[0] += a, sums[1] += b, sums[2] += c, sums[3] += d;
}

// ---- products ------------------------------------------------------------------------------------------------------------------

struct OperandLayout {
  std::uint32_t k_stride, row_stride;
};
inline std::uint32_t descriptor_low(const void* shared, OperandLayout layout) {
  return (shared_address(shared) & 0x3FFFF) >> 4 | layout.k_stride >> 4 << 16;
}
inline std::uint64_t descriptor(std::uint32_t low, OperandLayout layout) {
  return static_cast<std::uint64_t>(layout.row_stride >> 4) << 32 | low;
}
inline void begin_products() {}
inline void commit_products() {}
template <int kPending>
void wait_products() {}
template <int kCount>
void fence_registers(float (&)[kCount]) {}
template <int kCount>
void fresh_registers(float (&d)[kCount]) {
  std::fill_n(d, kCount, std::nanf(""));  // what is there is not to be used
}
template <int kCount>
void hold_operand(std::uint32_t (&)[kCount]) {}

inline float decode_e4m3(std::uint8_t code) {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> table;
    for (int i = 0; i < 256; ++i) table[i] = __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<std::uint8_t>(i), __NV_E4M3)));
    return table;
  }();
  return values[code];
}
/// Element of a K-major operand without swizzle, as the descriptor says.
inline float operand_element(std::uint64_t descriptor, int row, int k) {
  const auto field = [&](int bit) { return static_cast<std::uint32_t>(descriptor >> bit & 0x3FFF) << 4; };
  return decode_e4m3(*at_shared(field(0) + row / 8 * field(32) + k / 16 * field(16) + row % 8 * 16 + k % 16));
}

template <bool kAccumulate, int kCount>
void multiply(float (&d)[kCount], const std::uint64_t* shared_a, const std::uint32_t* register_a, std::uint64_t b) {
  std::uint32_t words[128][4];
  emulation::share_in_warpgroup(register_a, words);
  const int thread = emulation::current % 128, warp = thread / 32, lane = thread % 32;
  float a[2][32];
  for (int half = 0; half < 2; ++half) {
    for (int k = 0; k < 32; ++k) {
      if (shared_a != nullptr) {
        a[half][k] = operand_element(*shared_a, 16 * warp + lane / 4 + 8 * half, k);
      } else {
        const std::uint32_t word = words[32 * warp + lane / 4 * 4 + k % 16 / 4][half + 2 * (k / 16)];
        a[half][k] = decode_e4m3(static_cast<std::uint8_t>(word >> 8 * (k % 4)));
      }
    }
  }
  for (int i = 0; i < kCount; ++i) {
    double sum = kAccumulate ? d[i] : 0.0;
    for (int k = 0; k < 32; ++k)
      sum += static_cast<double>(a[i / 2 % 2][k]) * operand_element(b, 8 * (i / 4) + 2 * (lane % 4) + i % 2, k);
    d[i] = static_cast<float>(sum);
  }
  emulation::share_in_warpgroup(nullptr, words);  // nobody overwrites an operand before all have read it
}
template <bool kAccumulate>
void product_64x64(float (&d)[32], std::uint64_t a, std::uint64_t b) {
  multiply<kAccumulate>(d, &a, nullptr, b);
}
template <bool kAccumulate>
void product_64x64(float (&d)[32], const std::uint32_t* a, std::uint64_t b) {
  multiply<kAccumulate>(d, nullptr, a, b);
}
template <bool kAccumulate>
void product_in_place_64x128(float (&d)[64], std::uint64_t a, std::uint64_t b) {
  multiply<kAccumulate>(d, &a, nullptr, b);
}
template <bool kAccumulate>
void product_in_place_64x128(float (&d)[64], const std::uint32_t* a, std::uint64_t b) {
  multiply<kAccumulate>(d, nullptr, a, b);
}

// Scores in FP16: K-major without swizzle, core matrices of 8 rows x 8 elements.
template <bool kAccumulate>
void product_f16_64x64(float (&d)[32], std::uint64_t a, std::uint64_t b) {
  const auto element = [](std::uint64_t descriptor, int row, int k) {
    const auto field = [&](int bit) { return static_cast<std::uint32_t>(descriptor >> bit & 0x3FFF) << 4; };
    return half_to_float(load_shared<std::uint16_t>(field(0) + row / 8 * field(32) + k / 8 * field(16) + row % 8 * 16 + k % 8 * 2));
  };
  std::uint32_t words[128][4];
  emulation::share_in_warpgroup(nullptr, words);
  const int thread = emulation::current % 128, warp = thread / 32, lane = thread % 32;
  for (int i = 0; i < 32; ++i) {
    double sum = kAccumulate ? d[i] : 0.0;
    for (int k = 0; k < 16; ++k)
      sum += static_cast<double>(element(a, 16 * warp + lane / 4 + 8 * (i / 2 % 2), k)) *
             element(b, 8 * (i / 4) + 2 * (lane % 4) + i % 2, k);
    d[i] = static_cast<float>(sum);
  }
  emulation::share_in_warpgroup(nullptr, words);
}

// Products in BF16: shared operands MN-major, 128-byte swizzle.
struct AtomLayout {
  std::uint32_t k_stride, mn_stride;
};
inline std::uint32_t atom_descriptor_low(std::uint32_t shared, AtomLayout layout) {
  return (shared & 0x3FFFF) >> 4 | layout.mn_stride >> 4 << 16;
}
inline std::uint64_t atom_descriptor(std::uint32_t low, AtomLayout layout) {
  return static_cast<std::uint64_t>(layout.k_stride >> 4) << 32 | low;
}
inline float bf16_to_float(std::uint32_t bits) { return emulation::from_bits<float>(bits << 16); }
inline float atom_element(std::uint64_t descriptor, int mn, int k) {
  const auto field = [&](int bit) { return static_cast<std::uint32_t>(descriptor >> bit & 0x3FFF) << 4; };
  const std::uint32_t linear = field(0) + mn / 64 * field(16) + k / 8 * field(32) + k % 8 * 128 + mn % 64 * 2;
  std::uint16_t bits;
  std::memcpy(&bits, at_shared(linear ^ (linear >> 7 & 7) << 4), 2);
  return bf16_to_float(bits);
}
template <bool kAccumulate, int kColumns, int kCount>
void multiply_bf16(float (&d)[kCount], const std::uint64_t* shared_a, const std::uint32_t* register_a, std::uint64_t b) {
  std::uint32_t words[128][4];
  emulation::share_in_warpgroup(register_a, words);
  const int thread = emulation::current % 128, warp = thread / 32, lane = thread % 32;
  float a[2][16];
  for (int half = 0; half < 2; ++half)
    for (int k = 0; k < 16; ++k)
      a[half][k] = shared_a != nullptr
                       ? atom_element(*shared_a, 16 * warp + lane / 4 + 8 * half, k)
                       : bf16_to_float(words[32 * warp + lane / 4 * 4 + k % 8 / 2][half + k / 8 * 2] >> 16 * (k % 2) & 0xFFFF);
  for (int i = 0; i < kColumns / 2; ++i) {
    double sum = kAccumulate ? d[i] : 0.0;
    for (int k = 0; k < 16; ++k)
      sum += static_cast<double>(a[i / 2 % 2][k]) * atom_element(b, 8 * (i / 4) + 2 * (lane % 4) + i % 2, k);
    d[i] = static_cast<float>(sum);
  }
  emulation::share_in_warpgroup(nullptr, words);
}
template <bool kAccumulate>
void product_bf16_64x64(float (&d)[32], std::uint64_t a, std::uint64_t b) {
  multiply_bf16<kAccumulate, 64>(d, &a, nullptr, b);
}
template <bool kAccumulate>
void product_bf16_64x32(float (&d)[16], std::uint64_t a, std::uint64_t b) {
  multiply_bf16<kAccumulate, 32>(d, &a, nullptr, b);
}
inline void product_bf16_64x128(float (&d)[64], const std::uint32_t* a, std::uint64_t b) {
  multiply_bf16<true, 128>(d, nullptr, a, b);
}
inline void product_bf16_64x64(float (&d)[32], const std::uint32_t* a, std::uint64_t b) {
  multiply_bf16<true, 64>(d, nullptr, a, b);
}

/// A warp's product of 16 x 8 over 16: mma_f16.cuh says where the elements lie.
template <class Element>
void multiply_in_warp(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, Element element) {
  std::uint32_t words[6][32];
  for (int i = 0; i < 6; ++i) {
    const std::uint64_t* const all = emulation::share_in_warp(i < 4 ? a[i] : i == 4 ? b0 : b1, "a warp's product");
    for (int lane = 0; lane < 32; ++lane) words[i][lane] = static_cast<std::uint32_t>(all[lane]);
  }
  const auto half = [&](std::uint32_t word, int k) { return static_cast<double>(element(word >> k % 2 * 16 & 0xFFFF)); };
  const int lane = emulation::current % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, column = 2 * (lane % 4) + i % 2;
    double sum = static_cast<double>(d[i]);
    for (int k = 0; k < 16; ++k)
      sum += half(words[i / 2 + k / 8 * 2][4 * row + k % 8 / 2], k) * half(words[4 + k / 8][4 * column + k % 8 / 2], k);
    d[i] = static_cast<float>(sum);
  }
}
inline void warp_product_f16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  multiply_in_warp(d, a, b0, b1, half_to_float);
}
inline void warp_product_bf16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  multiply_in_warp(d, a, b0, b1, bf16_to_float);
}

}  // namespace flamia::ptx
