// SPDX-License-Identifier: Apache-2.0
// The second kernel of operands with prefix maxima (prefix.cuh): scans the groups' bytes, and encodes again where the first kernel guessed wrong.
#include "quantize/cuda/instance.cuh"
#include "quantize/cuda/operand_set.cuh"
#include "quantize/cuda/prefix.cuh"

namespace flamia::quantize::gpu {
namespace {

/// A group to be encoded again.
struct WrongGroup {
  std::int32_t group, token, tokens;
};

/// Its codes once more, with the exponents that stand in p.exponents by now. The whole warp.
template <int D, class Element, bool kRotate>
__device__ __forceinline__ void encode_again(const QuantiseParams& p, int head, const WrongGroup& wrong, Stage<D>& stage) {
  const Lane lane;
  Raw<D> raw[kLaneTokens];
  load(static_cast<const std::uint16_t*>(p.input.data) + wrong.token * p.input.token_stride + head * p.input.head_stride,
       p.input.token_stride, wrong.tokens, lane, raw);
  const std::int64_t at = head * p.slots + std::int64_t{kGroupTokens} * wrong.group;
  const std::uint8_t* const bytes = p.exponents + at + lane_token(lane.k, 0);
  const Scale scale[kLaneTokens] = {Scale(bytes[0] == numerics::kFlagged, bytes[0] - 127),
                                    Scale(bytes[1] == numerics::kFlagged, bytes[1] - 127)};
  [[maybe_unused]] Raw<D> signs;
  if constexpr (kRotate) signs = load_signs<D>(lane);
  Values<D> x[kLaneTokens];
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    if constexpr (kRotate)
      rotate_unscaled<Element>(raw[i], signs, lane, x[i]);
    else
      unpack<Element>(raw[i], x[i]);
  }
  Codes<D> codes[kLaneTokens];
  encode(x, scale, kRotate ? numerics::rotation_norm(D) : 1.f, codes);
  if (p.rows != nullptr) store_rows<D>(codes, lane, p.rows + at * D);
  if (p.transposed != nullptr) store_transposed<D>(codes, p.order, lane, stage, p.transposed + at * D);
  __syncwarp();  // the stage is free again
}

/// A warp a tile of 32 groups. Grid: heads of all operands in y; a thread block's tiles lie gridDim.x apart, because wrong guesses are neighbours
/// and its warps share them: encoding a group again takes one warp several microseconds.
template <int D, class Element, bool kSticky>
__global__ __launch_bounds__(32 * kPrefixWarps, kSticky ? 2 : 4) void prefix_kernel(const __grid_constant__ OperandSet set) {
  __shared__ WrongGroup wrong[kSticky ? kPrefixWarps * kTileGroups : 1];
  __shared__ int wrong_groups;
  if (threadIdx.x == 0) wrong_groups = 0;
  ptx::wait_for_previous_grid();
  __syncthreads();
  auto head = static_cast<int>(blockIdx.y);
  const QuantiseParams& p = set.operand[set.find(head)];
  const PrefixScratch scratch(p.scratch, p.slots, p.heads);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const std::int64_t first_group = kTileGroups * (std::int64_t{gridDim.x} * warp + blockIdx.x), group = first_group + lane;
  GroupInfo info{};
  if (group < scratch.groups) info = scratch.infos[group];
  if (__any_sync(kFullWarp, info.owned)) {
    const std::int64_t at = head * p.slots + group * kGroupTokens;
    PrefixBytes bytes(info.owned ? *reinterpret_cast<const uint4*>(p.exponents + at) : uint4{0, 0, 0, 0});
    const std::uint32_t first = bytes.first();
    bytes.scan(0);
    const std::uint32_t before = scan_tile(scratch, head, first_group, info, bytes.greatest());
    bytes.scan(before);
    if (info.owned) {
      if (kSticky && p.prefix == Prefix::sticky) {
        *reinterpret_cast<uint4*>(p.exponents + at) = bytes.exponents();
        const std::uint32_t guess = scratch.summaries[head * scratch.groups + group] >> 8;
        if (info.tokens > 0 && max(before, first) != max(guess, first))
          wrong[atomicAdd(&wrong_groups, 1)] = {static_cast<std::int32_t>(group), info.token, info.tokens};
      }
      if (p.prefix_exponents != nullptr) *reinterpret_cast<uint4*>(p.prefix_exponents + at) = bytes.prefix();
    }
  }
  if constexpr (kSticky) {
    __shared__ Stage<D> stage[kPrefixWarps];
    __syncthreads();
    for (int i = warp; i < wrong_groups; i += kPrefixWarps) {
      if (p.rotate)
        encode_again<D, Element, true>(p, head, wrong[i], stage[warp]);
      else
        encode_again<D, Element, false>(p, head, wrong[i], stage[warp]);
    }
  }
}

template <int D, class Element, bool kSticky>
void enqueue(const OperandSet& set, Chain& chain) {
  constexpr std::int64_t kSlots = kGroupTokens * kTileGroups * kPrefixWarps;  // of a thread block
  const dim3 grid(static_cast<unsigned>((set.operand[0].slots + kSlots - 1) / kSlots), static_cast<unsigned>(set.heads));
  chain.launch(prefix_kernel<D, Element, kSticky>, grid, 32 * kPrefixWarps, set);
}

}  // namespace

void enqueue_prefix(const OperandSet& set, Chain& chain) {
  bool sticky = false;
  for (int i = 0; i < set.count; ++i) sticky |= set.operand[i].prefix == Prefix::sticky;
  if (!sticky)  // a scan of bytes: which operand they belong to does not matter
    enqueue<64, __nv_bfloat16, false>(set, chain);
  else
    with_instance(set.operand[0].head_dim, set.operand[0].input.dtype,
                  [&]<int D, class Element>() { enqueue<D, Element, true>(set, chain); });
}

}  // namespace flamia::quantize::gpu
