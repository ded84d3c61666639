// SPDX-License-Identifier: Apache-2.0
// Operands that are not rotated (V).
//
//   warp                 both warps
//   load 16 tokens  ->   maxima -> [token-block: exchange] -> exponents -> [sticky: guess what came before] -> codes -> store
// A token-block of one head per thread block: nothing waits for another thread block. Prefix maxima: a second kernel (prefix.cuh).
#include "kernels/cuda/ptx/barrier.cuh"
#include "quantize/cuda/instance.cuh"
#include "quantize/cuda/operand_set.cuh"
#include "quantize/cuda/prefix.cuh"

namespace flamia::quantize::gpu {
namespace {

constexpr int kSecondWarp = 1;  // named barrier at which the second warp waits for the first one's greatest byte
constexpr int kResidentUnits = 12;

template <int D>
struct Shared {
  Stage<D> stage[kUnitWarps];
  std::uint32_t exchange[kUnitWarps];
  std::uint32_t first_warp;  // greatest byte of its tokens
};

/// Guess of the greatest byte of the document before this warp's tokens, `own` = theirs, `first` = the lane's first one. All threads of the unit. Exact in a document's
/// first token-block.
template <int D>
__device__ __forceinline__ std::uint32_t guess_before(const Lane& lane, std::uint32_t own, std::uint32_t first, int headroom,
                                                      const Guess& guess, const PrefixScratch& scratch, Shared<D>& shared) {
  const std::uint32_t known = guess.before(own, first, headroom, scratch);
  if (lane.warp == 0) {
    if (threadIdx.x == 0) shared.first_warp = own;
    ptx::named_barrier_arrive(kSecondWarp, kUnitThreads);
    return known;
  }
  ptx::named_barrier_sync(kSecondWarp, kUnitThreads);
  return max(known, shared.first_warp);
}

template <int D, class Element>
__global__ __launch_bounds__(kUnitThreads, kResidentUnits) void plain_kernel(const __grid_constant__ OperandSet set) {
  __shared__ Shared<D> shared;
  if (set.followed) ptx::let_next_grid_start();
  const Lane lane;
  Unit unit;
  const bool found = unit.find(set.operand[0].blocks, set.heads, lane.warp);
  const QuantiseParams& p = set.operand[set.find(unit.head)];
  Raw<D> raw[kLaneTokens];
  if (found)
    load(static_cast<const std::uint16_t*>(p.input.data) +
             (unit.block.token + std::int64_t{kGroupTokens} * lane.warp) * p.input.token_stride + unit.head * p.input.head_stride,
         p.input.token_stride, unit.tokens, lane, raw);
  // The scratch is cleared; and whoever waits for this grid waits for the one before it too.
  if (!set.beside || blockIdx.x == gridDim.x - 1) ptx::wait_for_previous_grid();
  if (!found) return;
  const PrefixScratch scratch(p.scratch, p.slots, p.heads);
  const bool sticky = p.prefix == Prefix::sticky;
  const Guess guess = sticky ? Guess(scratch, unit.head, unit.block) : Guess();
  std::uint32_t greatest[kLaneTokens];
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) greatest[i] = magnitude<Element>(raw[i]);
  if (set.find_maximum) return raise_maximum(p.scratch, max(greatest[0], greatest[1]));

  Scale scale[kLaneTokens] = {Scale(0), Scale(0)};
  if (p.group == Group::token) {
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) scale[i] = Scale(token_maximum(greatest[i]));
  } else {
    const std::uint32_t all =
        p.group == Group::tensor ? *p.scratch : unit_maximum(max(greatest[0], greatest[1]), lane, shared.exchange);
    scale[0] = scale[1] = Scale(all);
  }
  if (unit.block.position == 0 && (threadIdx.x < kTokenLanes || p.group == Group::block)) scale[0].raise(p.headroom);
  if (p.group == Group::block) scale[1] = scale[0];
  const std::int64_t at = unit.head * p.slots + unit.slot;
  if (unit.owned) {
    const std::uint32_t bytes[kLaneTokens] = {scale[0].byte(), scale[1].byte()};
    store_bytes(bytes, lane, p.exponents + at);
  }
  if (p.prefix != Prefix::none) {
    const std::uint32_t own = __reduce_max_sync(kFullWarp, max(scale[0].prefix_byte(), scale[1].prefix_byte()));
    std::uint32_t before = 0;
    if (sticky) {
      before = guess_before<D>(lane, own, scale[0].prefix_byte(), p.headroom, guess, scratch, shared);
      std::uint32_t prefix[kLaneTokens];
      prefix_in_group(lane, scale, before, own, prefix);
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i) scale[i].exponent = static_cast<int>(prefix[i]) - 127;
    }
    if (unit.owned && threadIdx.x % 32 == 0) {
      scratch.summaries[at / kGroupTokens] = static_cast<std::uint16_t>(own | before << 8);
      if (unit.head == 0) scratch.describe(unit.block, kGroupTokens * lane.warp, unit.tokens);
    }
  }
  if (!unit.owned) return;
  Values<D> x[kLaneTokens];
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) unpack<Element>(raw[i], x[i]);
  Codes<D> codes[kLaneTokens];
  encode(x, scale, 1.f, codes);
  if (p.rows != nullptr) store_rows<D>(codes, lane, p.rows + at * D);
  if (p.transposed != nullptr) store_transposed<D>(codes, p.order, lane, shared.stage[lane.warp], p.transposed + at * D);
}

}  // namespace

void enqueue_plain(const OperandSet& set, Chain& chain) {
  const dim3 grid(static_cast<unsigned>(set.operand[0].block_capacity * set.heads));
  with_instance(set.operand[0].head_dim, set.operand[0].input.dtype,
                [&]<int D, class Element>() { chain.launch(plain_kernel<D, Element>, grid, kUnitThreads, set); });
}

}  // namespace flamia::quantize::gpu
