// SPDX-License-Identifier: Apache-2.0
// Rotated operands (Q and K of a call) in E4M3. A warp works on 32 tokens of one head at a time, a lane a token, and meets no
// other warp:
//
//   copy the next unit's rows || rotate -> maximum -> exponent -> [sticky: guess what came before] -> codes -> store
//
// The grid fills the GPU, and warps claim units in the order of the block table: those under way at a time are neighbours in memory. Prefix maxima:
// a second kernel (prefix.cuh).
#pragma once
#include "kernels/cuda/sm90/launch_persistent.cuh"
#include "quantize/cuda/operand_set.cuh"
#include "quantize/cuda/prefix.cuh"
#include "quantize/cuda/token_row.cuh"

namespace flamia::quantize::gpu {

inline constexpr int kRotatedWarps = 2;  // of a thread block; they do not meet
inline constexpr int kRotatedBlocks =
    6;  // of a multiprocessor: 168 registers. Nothing may spill: beside 200 KB of rows hardly any L1 cache is left

/// A token-block of a head of one of the operands.
struct RowUnit {
  int operand, head;
  schedule::gpu::TokenBlock block;  // length -1: past the end of the table

  __device__ int tokens() const { return min(max(block.length - block.position, 0), kRowTokens); }
  /// Whether the half's 16 slots are the unit's to write (a short block's second half may belong to the next document).
  __device__ bool owned(int half) const { return tokens() > kGroupTokens * half || block.length == 0; }
};

/// Units are counted through the block table, then the heads of all operands: what the table does not use comes last.
struct UnitIndex {
  unsigned entry;
  int head, operand;

  __device__ __forceinline__ UnitIndex(const OperandSet& set, unsigned index)
      : entry(min(index / static_cast<unsigned>(set.heads),
                  static_cast<unsigned>(set.operand[0].block_capacity) - 1)),  // past the end: any
        head(static_cast<int>(index % static_cast<unsigned>(set.heads))) {
    operand = set.find(head);
  }
};

/// What a warp is about to work on: the rows of two units, and the entries of the block table of four, for rows are asked for by an entry.
template <int D>
struct Queue {
  Rows<D> rows[2];
  schedule::gpu::TokenBlock block[4];

  /// Unit number n of the warp, `index` of all.
  __device__ __forceinline__ RowUnit unit(const OperandSet& set, unsigned n, unsigned index) const {
    const UnitIndex at(set, index);
    return {at.operand, at.head, block[n % 4]};
  }
  __device__ __forceinline__ void fetch_entry(const OperandSet& set, unsigned n, unsigned index) {
    if (threadIdx.x % 32 == 0)
      ptx::copy_async16(ptx::shared_address(&block[n % 4]), set.operand[0].blocks + UnitIndex(set, index).entry, true);
    ptx::commit_copies();
  }
  __device__ __forceinline__ void fetch_rows(const OperandSet& set, unsigned n, unsigned index) {
    const RowUnit next = unit(set, n, index);
    const QuantiseParams& p = set.operand[next.operand];
    gpu::fetch_rows<D, 32>(
        static_cast<const std::uint16_t*>(p.input.data) + next.block.token * p.input.token_stride + next.head * p.input.head_stride,
        p.input.token_stride, next.tokens(), rows[n % 2]);
    ptx::commit_copies();
  }
};

/// Greatest byte up to the lane's token, if exponents are sticky; leaves what the scan reads. `byte`: the lane's own. The whole warp.
__device__ __forceinline__ std::uint32_t row_prefix(const QuantiseParams& p, const RowUnit& unit, const Guess& guess,
                                                    const PrefixScratch& scratch, std::uint32_t byte) {
  const int lane = static_cast<int>(threadIdx.x % 32), half = lane / kGroupTokens;
  const std::uint32_t first = __reduce_max_sync(kFullWarp, half == 0 ? byte : 0u);
  const std::uint32_t second = __reduce_max_sync(kFullWarp, half == 0 ? 0u : byte);
  std::uint32_t up_to = byte, before = 0;
  if (p.prefix == Prefix::sticky) {
    before = guess.before(max(first, second), byte, p.headroom, scratch);
    if (max(first, second) > before) {
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const std::uint32_t other = __shfl_up_sync(kFullWarp, up_to, distance);
        if (lane >= distance) up_to = max(up_to, other);
      }
    }
    up_to = max(up_to, before);
    if (half == 1) before = max(before, first);
  }
  if (lane % kGroupTokens == 0 && unit.owned(half)) {
    const std::int64_t group = (unit.head * p.slots + unit.block.slot) / kGroupTokens + half;
    scratch.summaries[group] = static_cast<std::uint16_t>((half == 0 ? first : second) | before << 8);
    if (unit.head == 0) {
      const int in_block = kGroupTokens * half;
      scratch.describe(unit.block, in_block, min(max(unit.tokens() - in_block, 0), kGroupTokens));
    }
  }
  return up_to;
}

/// The unit whose rows have come; `then` is called when they have been read. What is written through shared memory takes their place.
template <int D, class Element, class Then>
__device__ __forceinline__ void quantise_unit(const OperandSet& set, const RowUnit& unit, Rows<D>& rows, Then then) {
  const QuantiseParams& p = set.operand[unit.operand];
  const int lane = static_cast<int>(threadIdx.x % 32), half = lane / kGroupTokens;
  float x[D];
  rotate_row<Element>(rows, x);
  then();
  const PrefixScratch scratch(p.scratch, p.slots, p.heads);
  Guess guess;  // asked for beside the search for the greatest magnitude
  if (p.prefix == Prefix::sticky) guess = Guess(scratch, unit.head, unit.block);
  const std::uint32_t own = row_magnitude<D>(x, 0);
  if (set.find_maximum) return raise_maximum(p.scratch, own);

  const std::uint32_t all = p.group == Group::token   ? own
                            : p.group == Group::block ? __reduce_max_sync(kFullWarp, own)
                                                      : *p.scratch;
  Scale scale(all >= kNonFinite ? all : __float_as_uint(numerics::mul(__uint_as_float(all), numerics::rotation_norm(D))));
  if (unit.block.position == 0 && (lane == 0 || p.group == Group::block)) scale.raise(p.headroom);
  const std::int64_t at = unit.head * p.slots + unit.block.slot;
  const bool owned = unit.owned(half);
  if (owned) p.exponents[at + lane] = static_cast<std::uint8_t>(scale.byte());
  if (p.prefix != Prefix::none) {
    const std::uint32_t up_to = row_prefix(p, unit, guess, scratch, scale.prefix_byte());
    if (p.prefix == Prefix::sticky) scale.exponent = static_cast<int>(up_to) - 127;
  }
  const float factor = code_factor(x, scale.exponent);
  clear_row(scale.flagged, x);
  RowCodes<D> codes;
#pragma unroll
  for (int w = 0; w < D / 4; ++w) codes.word[w] = encode_four(x, 4 * w, factor);
  if (p.rows != nullptr && owned) store_row<D>([&](int w) { return codes.word[w]; }, p.rows + at * D);
  if (p.transposed != nullptr) store_row_transposed<D>(codes, p.order, unit.owned(0), unit.owned(1), rows, p.transposed + at * D);
}

template <int D, class Element>
__global__ __launch_bounds__(32 * kRotatedWarps, kRotatedBlocks) void rotated_kernel(const __grid_constant__ OperandSet set) {
  __shared__ Queue<D> queues[kRotatedWarps];
  if (set.followed) ptx::let_next_grid_start();
  Queue<D>& queue = queues[threadIdx.x / 32];
  const unsigned warps = gridDim.x * kRotatedWarps, units = static_cast<unsigned>(set.operand[0].block_capacity * set.heads);
  unsigned index = blockIdx.x * kRotatedWarps + threadIdx.x / 32, next = index + warps;
  queue.fetch_entry(set, 0, index);
  queue.fetch_entry(set, 1, next);
  ptx::wait_for_copies<0>();
  __syncwarp();
  queue.fetch_rows(set, 0, index);
  queue.fetch_rows(set, 1, next);
  ptx::wait_for_previous_grid();  // the scratch is cleared
  ptx::wait_for_copies<1>();
  for (unsigned n = 0; index < units; ++n) {
    __syncwarp();
    const RowUnit unit = queue.unit(set, n, index);
    if (unit.block.length < 0) break;
    unsigned claimed = 0, after = 0;
    // A search for the maximum is too short a work for claims: one counter takes 400 a microsecond.
    if (!set.find_maximum && threadIdx.x % 32 == 0) claimed = atomicAdd(set.claimed, 1u);
    quantise_unit<D, Element>(set, unit, queue.rows[n % 2], [&] {
      after = set.find_maximum ? next + warps : 2 * warps + __shfl_sync(kFullWarp, claimed, 0);
      queue.fetch_entry(set, n + 2, after);
    });
    ptx::wait_for_copies<0>();  // the next unit's rows have long come
    __syncwarp();
    queue.fetch_rows(set, n + 2, after);
    index = next;
    next = after;
  }
  ptx::wait_for_copies<0>();
}

template <int D, class Element>
void launch_rotated(const OperandSet& set, Chain& chain) {
  int multiprocessors = 0;
  if (const cudaError_t error = sm90::count_multiprocessors(&multiprocessors); error != cudaSuccess) return chain.fail(error);
  const std::int64_t units = set.operand[0].block_capacity * set.heads, blocks = (units + kRotatedWarps - 1) / kRotatedWarps;
  const std::int64_t resident = std::int64_t{kRotatedBlocks} * multiprocessors;
  chain.launch(rotated_kernel<D, Element>, dim3(static_cast<unsigned>(blocks < resident ? blocks : resident)), 32 * kRotatedWarps,
               set);
}

}  // namespace flamia::quantize::gpu
