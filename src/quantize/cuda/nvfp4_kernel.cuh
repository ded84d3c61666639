// SPDX-License-Identifier: Apache-2.0
// Q and K with NVFP4 beside E4M3. A thread block of two warps works on 32 tokens of one head at a time, a lane of each warp on half of a token's
// channels, so that values fit 128 registers and four warps a scheduler hide each other's latencies.
#pragma once
#include "kernels/cuda/sm90/values16.cuh"
#include "quantize/cuda/nvfp4.cuh"
#include "quantize/cuda/rotated_kernel.cuh"

namespace flamia::quantize::gpu {

inline constexpr int kPairWarps = 2, kPairThreads = 32 * kPairWarps;
inline constexpr int kPairBlocks = 8;  // of a multiprocessor: 128 registers. Ten have 96, spill five words, and are 1 % slower

template <int D>
struct PairShared {
  static constexpr int kCodeBytes = D / 2, kCodeStride = kCodeBytes + 16;  // of a token; no bank conflicts
  Rows<D> rows[2];
  schedule::gpu::TokenBlock block[4];
  std::uint32_t greatest[kPairWarps][kRowTokens];  // of the row's groups of either warp, before the norm
  std::uint32_t up_to[kRowTokens];                 // sticky exponents: the first warp's finding
  unsigned index[4];                               // of the units whose entries are in `block`
  alignas(16) std::uint8_t codes[kRowTokens * kCodeStride];
  alignas(16) std::uint8_t scales[kRowTokens][D / kScaleChannels];
};

/// Sign bits, of two elements a word, in which the channels of the second warp's share of a row differ from those of the first one's.
template <int D>
constexpr std::uint32_t differing_signs(int channel) {
  const auto differs = [&](int c) { return numerics::rotation_sign(c) != numerics::rotation_sign(c ^ (D / 2 | D / 4)); };
  return (differs(channel) ? 0x8000u : 0u) | (differs(channel + 1) ? 0x80000000u : 0u);
}

/// The warp's groups of the lane's row, rotated but for the norm, with numerics::rotate's bits: the first and the third quarter of the channels, or the
/// second and the fourth. Until the last stage of the butterfly a warp works on a half of the row, the second one on its upper half with the quarters
/// exchanged, so that both keep their first quarter and trade the other one, in the rows' place. All of the thread block.
template <class Element, int D>
__device__ __forceinline__ void rotate_half_row(Rows<D>& rows, int warp, float (&x)[D / 2]) {
  constexpr int kQuarter = D / 4, kPieces = kQuarter / 4;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::uint8_t* const row = rows.bytes + lane * 2 * D;
  const int first = (warp == 0 ? 0 : D / 16 | D / 32) ^ lane % 8;
  const std::uint32_t second_warp = warp == 0 ? 0u : ~0u;
  const float sign = warp == 0 ? 1.f : -1.f;
#pragma unroll
  for (int o = 0; o < D / 16; ++o) {
    uint4 words = *reinterpret_cast<const uint4*>(row + 16 * (first ^ o));
    constexpr auto differ = differing_signs<D>;
    words.x ^= differ(8 * o) & second_warp, words.y ^= differ(8 * o + 2) & second_warp;
    words.z ^= differ(8 * o + 4) & second_warp, words.w ^= differ(8 * o + 6) & second_warp;
    float octet[8];
    unpack_octet<Element>(words, octet);
#pragma unroll
    for (int c = 0; c < 8; ++c) x[8 * o + c] = numerics::rotation_sign(8 * o + c) != 0 ? -octet[c] : octet[c];
  }
#pragma unroll
  for (int h = 1; h < kQuarter; h *= 2)
#pragma unroll
    for (int c = 0; c < D / 2; ++c)
      if ((c & h) == 0) {
        const float a = x[c], b = x[c + h];
        x[c] = numerics::add(a, b);
        x[c + h] = numerics::add(a, -b);
      }
#pragma unroll
  for (int c = 0; c < kQuarter; ++c) {  // of the second warp x[c] is the upper one, which takes the difference
    const float kept = x[c], given = x[c + kQuarter];
    x[c] = numerics::fma(sign, kept, given);
    x[c + kQuarter] = numerics::fma(-sign, given, kept);
  }
  auto* const stage = reinterpret_cast<float4*>(rows.bytes) + lane;
  __syncthreads();  // the rows have been read
#pragma unroll
  for (int i = 0; i < kPieces; ++i)
    stage[(warp * kPieces + i) * 32] =
        make_float4(x[kQuarter + 4 * i], x[kQuarter + 4 * i + 1], x[kQuarter + 4 * i + 2], x[kQuarter + 4 * i + 3]);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const float4 four = stage[((warp ^ 1) * kPieces + i) * 32];
    const float got[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float kept = x[4 * i + k];  // the second warp's is the subtrahend
      x[4 * i + k] = numerics::add(kept, got[k]);
      x[kQuarter + 4 * i + k] = numerics::fma(sign, kept, numerics::mul(-sign, got[k]));
    }
  }
}
/// Which of the row's groups of 16 channels is the warp's l-th.
template <int D>
__device__ __forceinline__ int group_of(int warp, int l) {
  constexpr int kRun = D / 64;
  return l / kRun * 2 * kRun + l % kRun + kRun * warp;
}

/// NVFP4 of the warp's groups, of which `greatest` are the greatest magnitudes before the norm. `block`: of the unit's first slot, counted
/// through the heads. All of the thread block.
template <int D>
__device__ __forceinline__ void quantise_groups(const float (&x)[D / 2], const float (&greatest)[D / 32], bool flagged,
                                                const bool (&owned)[2], std::int64_t block, const Nvfp4Outputs& out,
                                                PairShared<D>& shared) {
  using Shared = PairShared<D>;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const bool own = lane < kGroupTokens ? owned[0] : owned[1], codes_wanted = out.codes != nullptr;
  const std::int64_t slot = block + lane;
  if (own && warp == 0) out.exponents[slot] = static_cast<std::uint8_t>(flagged ? numerics::kFlagged : 127);
  std::uint16_t* const halves = out.halves + (block + lane / 8 * 8) * D + lane % 8 * 8;
#pragma unroll
  for (int l = 0; l < D / 32; ++l) {
    const Nvfp4Group group =
        encode_group(x + kScaleChannels * l, numerics::mul(greatest[l], numerics::rotation_norm(D)), flagged, codes_wanted);
    const int g = group_of<D>(warp, l);
    auto* const at = reinterpret_cast<uint4*>(halves + 128 * g);  // an octet of eight slots: 64 elements
    if (own) at[0] = {group.half[0], group.half[1], group.half[2], group.half[3]};
    if (own) at[8] = {group.half[4], group.half[5], group.half[6], group.half[7]};
    if (!codes_wanted) continue;
    *reinterpret_cast<uint2*>(shared.codes + lane * Shared::kCodeStride + 8 * g) = {group.codes[0], group.codes[1]};
    shared.scales[lane][g] = static_cast<std::uint8_t>(group.scale);
  }
  if (!codes_wanted) return;
  __syncthreads();
  constexpr int kPieces = Shared::kCodeBytes / 16;  // of a token
  auto* const to = reinterpret_cast<uint4*>(out.codes + block * Shared::kCodeBytes);
#pragma unroll
  for (int r = 0; r < kRowTokens * kPieces / kPairThreads; ++r) {
    const int i = kPairThreads * r + static_cast<int>(threadIdx.x), token = i / kPieces;
    if (token < kGroupTokens ? owned[0] : owned[1])
      to[i] = *reinterpret_cast<const uint4*>(shared.codes + token * Shared::kCodeStride + 16 * (i % kPieces));
  }
  if (warp != 0 || !own) return;
#pragma unroll
  for (int w = 0; w < D / 64; ++w)
    reinterpret_cast<std::uint32_t*>(out.scales + slot * (D / kScaleChannels))[w] =
        reinterpret_cast<const std::uint32_t*>(shared.scales[lane])[w];
}

/// The E4M3 codes' values in BF16, 0 of a flagged token, as sm90::values16 makes them; they leave by way of the rows' place, whole lines at a time.
/// `to`: of the unit's first slot. All of the thread block.
template <int D>
__device__ __forceinline__ void store_values(const float (&x)[D / 2], const Scale& scale, const bool (&owned)[2], Rows<D>& rows,
                                             std::uint16_t* to) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const float factor = numerics::pow2(-scale.exponent), inverse = scale.flagged ? 0.f : numerics::pow2(scale.exponent);
  const std::uint32_t kept = scale.flagged ? 0u : ~0u;
  const bool may_overflow = __any_sync(kFullWarp, inverse >= sm90::kMayOverflow);
  std::uint8_t* const row = rows.bytes + lane / 8 * (16 * D) + lane % 8 * 128;
#pragma unroll
  for (int octet = 0; octet < D / 16; ++octet) {
    uint2 first = sm90::products16(encode_four(x, 8 * octet, factor) & kept, inverse);
    uint2 second = sm90::products16(encode_four(x, 8 * octet + 4, factor) & kept, inverse);
    if (may_overflow) {
      first = {sm90::finite16(first.x), sm90::finite16(first.y)};
      second = {sm90::finite16(second.x), sm90::finite16(second.y)};
    }
    const int place = 2 * group_of<D>(warp, octet / 2) + octet % 2;
    *reinterpret_cast<uint4*>(row + place / 8 * 1024 + (place % 8 ^ lane % 8) * 16) = {first.x, first.y, second.x, second.y};
  }
  __syncthreads();
  constexpr int kPieces = 2 * D * kGroupTokens / 16;  // of 16 slots
#pragma unroll
  for (int r = 0; r < 2 * kPieces / kPairThreads; ++r) {
    const int i = kPairThreads * r + static_cast<int>(threadIdx.x);
    if (i < kPieces ? owned[0] : owned[1]) reinterpret_cast<uint4*>(to)[i] = *reinterpret_cast<const uint4*>(rows.bytes + 16 * i);
  }
}

/// The unit whose rows have come. All of the thread block, whose warps `meet` when the rows have been read.
template <int D, class Element, class Meet>
__device__ __forceinline__ void quantise_pair(const QuantiseParams& p, const RowUnit& unit, Rows<D>& rows, PairShared<D>& shared,
                                              Meet meet) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32), half = lane / kGroupTokens;
  const PrefixScratch scratch(p.scratch, p.slots, p.heads);
  const bool sticky = p.prefix == Prefix::sticky;
  Guess guess;  // asked for beside the rotation
  if (sticky && warp == 0) guess = Guess(scratch, unit.head, unit.block);
  float x[D / 2], greatest[D / 32];
  rotate_half_row<Element>(rows, warp, x);
  std::uint32_t mine = 0;
#pragma unroll
  for (int l = 0; l < D / 32; ++l) {
    const std::uint32_t bits = row_magnitude<kScaleChannels>(x, kScaleChannels * l);
    greatest[l] = __uint_as_float(bits);
    mine = max(mine, bits);
  }
  shared.greatest[warp][lane] = mine;
  meet();
  const std::uint32_t own = max(shared.greatest[0][lane], shared.greatest[1][lane]);
  const std::uint32_t all = p.group == Group::token ? own : __reduce_max_sync(kFullWarp, own);
  Scale scale(all >= kNonFinite ? all : __float_as_uint(numerics::mul(__uint_as_float(all), numerics::rotation_norm(D))));
  if (unit.block.position == 0 && (lane == 0 || p.group == Group::block)) scale.raise(p.headroom);
  const std::int64_t at = unit.head * p.slots + unit.block.slot;
  const bool owned = unit.owned(half);
  if (owned && warp == 0) p.exponents[at + lane] = static_cast<std::uint8_t>(scale.byte());
  if (p.prefix != Prefix::none) {
    if (warp == 0) shared.up_to[lane] = row_prefix(p, unit, guess, scratch, scale.prefix_byte());
    if (sticky) {
      __syncthreads();
      scale.exponent = static_cast<int>(shared.up_to[lane]) - 127;
    }
  }
#pragma unroll
  for (int c = 0; c < D / 2; ++c) x[c] = numerics::mul(x[c], numerics::rotation_norm(D));
  if (p.rows != nullptr && owned) {
    const float factor = numerics::pow2(-scale.exponent);
    const std::uint32_t kept = scale.flagged ? 0u : ~0u;
    std::uint8_t* const slot = p.rows + at * D + lane / 8 * 8 * D + lane % 8 * 16;  // a core matrix: 16 channels of eight slots
#pragma unroll
    for (int l = 0; l < D / 32; ++l) {
      const auto word = [&](int w) { return encode_four(x, 16 * l + 4 * w, factor) & kept; };
      *reinterpret_cast<uint4*>(slot + 128 * group_of<D>(warp, l)) = uint4{word(0), word(1), word(2), word(3)};
    }
  }
  if (p.rows16 != nullptr) store_values<D>(x, scale, {unit.owned(0), unit.owned(1)}, rows, p.rows16 + at * D);
  quantise_groups<D>(x, greatest, own >= kNonFinite, {unit.owned(0), unit.owned(1)}, at, p.nvfp4, shared);
}

template <int D, class Element>
__global__ __launch_bounds__(kPairThreads, kPairBlocks) void nvfp4_kernel(const __grid_constant__ OperandSet set) {
  __shared__ PairShared<D> shared;
  const unsigned units = static_cast<unsigned>(set.operand[0].block_capacity * set.heads);
  const auto unit_of = [&](unsigned n) {
    const UnitIndex place(set, shared.index[n % 4]);
    return RowUnit{place.operand, place.head, shared.block[n % 4]};
  };
  const auto fetch_entry = [&](unsigned n) {
    if (threadIdx.x == 0)
      ptx::copy_async16(ptx::shared_address(&shared.block[n % 4]),
                        set.operand[0].blocks + UnitIndex(set, shared.index[n % 4]).entry, true);
    ptx::commit_copies();
  };
  const auto fetch = [&](unsigned n) {
    const RowUnit unit = unit_of(n);
    const QuantiseParams& p = set.operand[unit.operand];
    fetch_rows<D, kPairThreads>(
        static_cast<const std::uint16_t*>(p.input.data) + unit.block.token * p.input.token_stride + unit.head * p.input.head_stride,
        p.input.token_stride, unit.tokens(), shared.rows[n % 2]);
    ptx::commit_copies();
  };
  if (threadIdx.x == 0) shared.index[0] = blockIdx.x, shared.index[1] = blockIdx.x + gridDim.x;
  fetch_entry(0);
  fetch_entry(1);
  ptx::wait_for_copies<0>();
  __syncthreads();
  fetch(0);
  fetch(1);
  ptx::wait_for_previous_grid();                 // the scratch is cleared
  if (set.followed) ptx::let_next_grid_start();  // not before: the next one may rely on it
  ptx::wait_for_copies<1>();
  __syncthreads();
  for (unsigned n = 0; shared.index[n % 4] < units; ++n) {
    const RowUnit unit = unit_of(n);
    if (unit.block.length < 0) break;
    unsigned claimed = 0;
    if (threadIdx.x == 0) claimed = atomicAdd(set.claimed, 1u);
    quantise_pair<D, Element>(set.operand[unit.operand], unit, shared.rows[n % 2], shared, [&] {
      if (threadIdx.x == 0) shared.index[(n + 2) % 4] = 2 * gridDim.x + claimed;  // not before: the claim takes a microsecond
      __syncthreads();
      fetch_entry(n + 2);
    });
    ptx::wait_for_copies<0>();  // the next unit's rows have long come
    __syncthreads();
    fetch(n + 2);
  }
  ptx::wait_for_copies<0>();
}

template <int D, class Element>
void launch_nvfp4(const OperandSet& set, Chain& chain) {
  int multiprocessors = 0;
  if (const cudaError_t error = sm90::count_multiprocessors(&multiprocessors); error != cudaSuccess) return chain.fail(error);
  const std::int64_t units = set.operand[0].block_capacity * set.heads, resident = std::int64_t{kPairBlocks} * multiprocessors;
  chain.launch(nvfp4_kernel<D, Element>, dim3(static_cast<unsigned>(units < resident ? units : resident)), kPairThreads, set);
}

}  // namespace flamia::quantize::gpu
