// SPDX-License-Identifier: Apache-2.0
// Means of K's documents first, then a launch an operand: a thread block makes a tile of 128 tokens of one head, a warp 16 of them.
#include "quantize/cuda/sage3.hpp"

#include "kernels/cuda/dense_strides.hpp"
#include "kernels/cuda/device_status.hpp"
#include "kernels/cuda/sm90/sage3/sage3.hpp"
#include "quantize/cuda/block_scale.cuh"
#include "quantize/cuda/checks.hpp"
#include "quantize/cuda/instance.cuh"
#include "quantize/cuda/means.hpp"
#include "quantize/cuda/tile.cuh"

namespace flamia::quantize::gpu {
namespace {

constexpr int kTile = sm90::sage3::kTile, kWarps = kTile / kGroupTokens, kThreads = 32 * kWarps;

enum class Operand { query, key, value };

/// What a thread block works on, and its warp.
struct Tile {
  sm90::Document document;
  int document_index, head, first;  // position of the tile
  int valid;                        // tokens of the warp's 16
  std::int64_t slot;                // of the warp's first token, counted through the heads

  __device__ bool find(const Sage3Params& p, int heads, const Lane& lane) {
    const int item_index = static_cast<int>(blockIdx.x) / heads;
    head = static_cast<int>(blockIdx.x) % heads;
    if (item_index >= p.totals->forward.items) return false;
    const sm90::WorkItem item = p.items[item_index];
    document = p.documents[item.document];
    document_index = item.document;
    first = item.first;
    const int position = first + kGroupTokens * lane.warp;
    valid = min(max(document.length - position, 0), kGroupTokens);
    slot = head * p.slots + document.slot_start + position;
    return true;
  }
};

/// The lane's tokens, values of flagged ones zero.
template <int D, class Element>
__device__ __forceinline__ void load_values(const TensorView& input, const Tile& tile, const Lane& lane,
                                            Values<D> (&x)[kLaneTokens], bool (&flagged)[kLaneTokens]) {
  Raw<D> raw[kLaneTokens];
  const std::int64_t token = std::int64_t{tile.document.token_start} + tile.first + kGroupTokens * lane.warp;
  load(static_cast<const std::uint16_t*>(input.data) + token * input.token_stride + tile.head * input.head_stride,
       input.token_stride, tile.valid, lane, raw);
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    unpack<Element>(raw[i], x[i]);
    flagged[i] = token_maximum(magnitude<Element>(raw[i])) >= kNonFinite;
    if (flagged[i]) x[i] = {};
  }
}

/// FP16 values of one token's octet of channels.
struct HalfOctet {
  std::uint32_t half[4];
};

/// Both tokens of one octet in the `rows_f16` layout: they are neighbours of 16 bytes, so lanes j and j ^ 1 trade and each pair writes 32
/// consecutive bytes at once. `group` points at the 16 slots.
template <int D>
__device__ __forceinline__ void store_halves(const HalfOctet (&octet)[kLaneTokens], int index, const Lane& lane,
                                             std::uint16_t* group) {
  const bool odd = lane.j % 2 != 0;
  std::uint32_t mine[4], other[4];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    mine[p] = odd ? octet[1].half[p] : octet[0].half[p];
    other[p] = __shfl_xor_sync(kFullWarp, odd ? octet[0].half[p] : octet[1].half[p], 1);
  }
  const uint4 own{mine[0], mine[1], mine[2], mine[3]}, got{other[0], other[1], other[2], other[3]};
  auto* const slot = reinterpret_cast<uint4*>(group + lane.k / 4 * 8 * D) + lane_token(lane.k, odd) % 8;
  slot[index / 2 * 2 * 8] = odd ? got : own;        // the even lane's octet
  slot[(index / 2 * 2 + 1) * 8] = odd ? own : got;  // the odd lane's
}

/// NVFP4 values of the lane's octet of channels; its neighbour has the other half of the block.
__device__ __forceinline__ HalfOctet round_octet(const float (&x)[8]) {
  float amax = 0.f;
#pragma unroll
  for (int c = 0; c < 8; ++c) amax = fmaxf(amax, fabsf(x[c]));
  const BlockScale scale = block_scale(fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, 1)), 6.f, 1.f / 6.f, 1.f);
  HalfOctet octet{};
#pragma unroll
  for (int p = 0; p < 4; ++p)
    octet.half[p] = ptx::pack_f16x2(copysignf(numerics::mul(scale.magnitude(x[2 * p]), scale.value), x[2 * p]),
                                    copysignf(numerics::mul(scale.magnitude(x[2 * p + 1]), scale.value), x[2 * p + 1]));
  return octet;
}

/// Q or K less `mean`, for the warp's 16 tokens.
template <int D>
__device__ __forceinline__ void store_smoothed(Values<D> (&x)[kLaneTokens], const bool (&flagged)[kLaneTokens], const float* mean,
                                               const Tile& tile, const Lane& lane, const SmoothedOutputs& out) {
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    const bool zero = flagged[i] || lane_token(lane.k, i) >= tile.valid;
#pragma unroll
    for (int m = 0; m < Values<D>::kOctets; ++m)
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        float& v = x[i].octet[m][c];
        v = zero ? 0.f : numerics::add(v, -mean[8 * (kTokenLanes * m + lane.j) + c]);
      }
  }
#pragma unroll 1
  for (int m = 0; m < Values<D>::kOctets; ++m) {
    HalfOctet octet[kLaneTokens];
#pragma unroll
    for (int o = 0; o < Values<D>::kOctets; ++o)
      if (o == m) octet[0] = round_octet(x[0].octet[o]), octet[1] = round_octet(x[1].octet[o]);
    if (tile.valid > 0) store_halves<D>(octet, kTokenLanes * m + lane.j, lane, out.halves + tile.slot * D);
  }
  const std::uint32_t bytes[kLaneTokens] = {flagged[0], flagged[1]};
  if (tile.valid > 0) store_bytes(bytes, lane, out.flags + tile.slot);
}

/// The mean of the tile's tokens in `mean`, from their values; all threads. `values`: [128][D], left as scratch.
template <int D>
__device__ __forceinline__ void tile_mean(const Values<D> (&x)[kLaneTokens], const bool (&flagged)[kLaneTokens], const Tile& tile,
                                          const Lane& lane, float* values, float* mean) {
  constexpr int kParts = kThreads / D, kRows = kTile / kParts;
  __shared__ std::uint8_t counted[kTile];
  __shared__ double sums[kThreads];
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    const int token = lane_token(lane.k, i), row = kGroupTokens * lane.warp + token;
    if (lane.j == 0) counted[row] = token < tile.valid && !flagged[i];
#pragma unroll
    for (int m = 0; m < Values<D>::kOctets; ++m) {
      auto* const to = reinterpret_cast<float4*>(values + row * D + 8 * (kTokenLanes * m + lane.j));
      const float(&v)[8] = x[i].octet[m];
      to[0] = {v[0], v[1], v[2], v[3]};
      to[1] = {v[4], v[5], v[6], v[7]};
    }
  }
  __syncthreads();
  const int channel = static_cast<int>(threadIdx.x) % D, part = static_cast<int>(threadIdx.x) / D;
  double sum = 0;
  for (int r = kRows * part; r < kRows * (part + 1); ++r) sum += static_cast<double>(values[r * D + channel]);  // absent ones are 0
  sums[threadIdx.x] = sum;
  const int count = __syncthreads_count(threadIdx.x < kTile && counted[threadIdx.x % kTile] != 0);
  if (threadIdx.x < D) {
    for (int other = 1; other < kParts; ++other) sum += sums[threadIdx.x + D * other];
    mean[threadIdx.x] = count == 0 ? 0.f : static_cast<float>(sum / static_cast<double>(count));
  }
  __syncthreads();
}

template <int D, class Element, Operand kOperand>
__global__ __launch_bounds__(kThreads) void smooth_kernel(const __grid_constant__ Sage3Params p) {
  extern __shared__ float4 shared[];
  __shared__ float mean[D];
  const Lane lane;
  Tile tile;
  constexpr bool query = kOperand == Operand::query;
  if (!tile.find(p, query ? p.query_heads : p.key_heads, lane)) return;
  Values<D> x[kLaneTokens];
  bool flagged[kLaneTokens];
  load_values<D, Element>(query ? p.q : p.k, tile, lane, x, flagged);
  const int key_head = query ? tile.head / (p.query_heads / p.key_heads) : tile.head;
  const float* const key_mean = p.key_means + (std::int64_t{tile.document_index} * p.key_heads + key_head) * D;
  if constexpr (query) {
    tile_mean<D>(x, flagged, tile, lane, reinterpret_cast<float*>(shared), mean);
    const std::int64_t first_slot = tile.head * p.slots + tile.document.slot_start + tile.first;
    if (threadIdx.x < D) p.query_means[first_slot / sm90::kSlotAlign * D + threadIdx.x] = mean[threadIdx.x];
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      float dot = 0.f;
#pragma unroll
      for (int m = 0; m < Values<D>::kOctets; ++m)
#pragma unroll
        for (int c = 0; c < 8; ++c)
          dot = numerics::fma(x[i].octet[m][c], __ldg(key_mean + 8 * (kTokenLanes * m + lane.j) + c), dot);
#pragma unroll
      for (int distance = 1; distance < kTokenLanes; distance *= 2) dot += __shfl_xor_sync(kFullWarp, dot, distance);
      if (lane.j == 0 && tile.valid > 0) p.mean_scores[tile.slot + lane_token(lane.k, i)] = numerics::mul(p.softmax_scale, dot);
    }
    store_smoothed<D>(x, flagged, mean, tile, lane, p.query);
  } else {
    store_smoothed<D>(x, flagged, key_mean, tile, lane, p.key);
  }
}

/// V: a lane takes whole blocks, of 16 tokens and one channel.
template <int D, class Element>
__global__ __launch_bounds__(kThreads) void value_kernel(const __grid_constant__ Sage3Params p) {
  extern __shared__ float4 shared[];
  const Lane lane;
  Tile tile;
  const int in_warp = static_cast<int>(threadIdx.x % 32);
  if (static_cast<std::int64_t>(blockIdx.x) / p.key_heads ==
      p.item_capacity) {  // the slots after the last document: a tile may reach them
    auto* const tail = reinterpret_cast<uint4*>(p.value.halves +
                                                (blockIdx.x % static_cast<unsigned>(p.key_heads) * p.slots + p.totals->slots) * D);
    for (int i = static_cast<int>(threadIdx.x); i < sm90::kTailSlots * D / 8; i += kThreads) tail[i] = {0, 0, 0, 0};
    return;
  }
  if (!tile.find(p, p.key_heads, lane) || tile.valid == 0) return;  // warps do not meet
  Values<D> x[kLaneTokens];
  bool flagged[kLaneTokens];
  load_values<D, Element>(p.v, tile, lane, x, flagged);
  const bool block_flagged = __any_sync(kFullWarp, flagged[0] || flagged[1]);
  float* const values = reinterpret_cast<float*>(shared) + lane.warp * kGroupTokens * D;
  std::uint32_t bytes[kLaneTokens];
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    const int token = lane_token(lane.k, i);
    bytes[i] = block_flagged && token < tile.valid;
#pragma unroll
    for (int m = 0; m < Values<D>::kOctets; ++m) {
      auto* const to = reinterpret_cast<float4*>(values + token * D + 8 * (kTokenLanes * m + lane.j));
      const float(&v)[8] = x[i].octet[m];
      to[0] = {v[0], v[1], v[2], v[3]};
      to[1] = {v[4], v[5], v[6], v[7]};
    }
  }
  store_bytes(bytes, lane, p.value.flags + tile.slot);
  __syncwarp();
#pragma unroll 1
  for (int r = 0; r < D / 32; ++r) {
    const int channel = 32 * r + in_warp;
    float v[kGroupTokens], amax = 0.f;
#pragma unroll
    for (int t = 0; t < kGroupTokens; ++t) {
      v[t] = block_flagged ? 0.f : values[t * D + channel];
      amax = fmaxf(amax, fabsf(v[t]));
    }
    const BlockScale scale = block_scale(amax, 6.f, 1.f / 6.f, 1.f);
    std::uint32_t pairs[kGroupTokens / 2];
#pragma unroll
    for (int t = 0; t < kGroupTokens; t += 2)
      pairs[t / 2] = ptx::pack_f16x2(copysignf(numerics::mul(scale.magnitude(v[t]), scale.value), v[t]),
                                     copysignf(numerics::mul(scale.magnitude(v[t + 1]), scale.value), v[t + 1]));
    auto* const out = reinterpret_cast<uint4*>(p.value.halves + tile.slot * D);  // eight tokens a piece
    out[channel] = {pairs[0], pairs[1], pairs[2], pairs[3]};
    out[D + channel] = {pairs[4], pairs[5], pairs[6], pairs[7]};
  }
}

template <class Kernel>
cudaError_t enqueue(Kernel kernel, const Sage3Params& p, std::int64_t blocks, int shared_bytes, cudaStream_t stream) {
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
      error != cudaSuccess)
    return error;
  kernel<<<static_cast<unsigned>(blocks), kThreads, static_cast<std::size_t>(shared_bytes), stream>>>(p);
  return cudaGetLastError();
}

template <int D, class Element>
cudaError_t enqueue(const Sage3Params& p, cudaStream_t stream) {
  constexpr int kTileBytes = kTile * D * 4;
  const std::int64_t queries = p.item_capacity * p.query_heads, keys = p.item_capacity * p.key_heads;
  if (const cudaError_t error = enqueue(smooth_kernel<D, Element, Operand::query>, p, queries, kTileBytes, stream);
      error != cudaSuccess)
    return error;
  if (const cudaError_t error = enqueue(smooth_kernel<D, Element, Operand::key>, p, keys, 0, stream); error != cudaSuccess)
    return error;
  return enqueue(value_kernel<D, Element>, p, keys + p.key_heads, kTileBytes, stream);
}

Status check(const Sage3Params& p) {
  if (Status status = check_operand(p.q.dtype, p.query_heads, p.head_dim); !status.ok()) return status;
  if (p.q.dtype != p.k.dtype || p.q.dtype != p.v.dtype)
    return Status::unsupported("q, k and v have different types; on a GPU sage3 reads them all as BF16 or all as F16");
  for (const auto& [name, tensor] : {std::pair{"q", &p.q}, {"k", &p.k}, {"v", &p.v}})
    if (Status status = check_rows(name, *tensor); !status.ok()) return status;
  return {};
}

}  // namespace

Status launch_sage3(const Sage3Params& params, cudaStream_t stream) {
  Sage3Params p = params;
  fill_dense_strides(p.q, p.query_heads, p.head_dim);
  fill_dense_strides(p.k, p.key_heads, p.head_dim);
  fill_dense_strides(p.v, p.key_heads, p.head_dim);
  if (Status status = check(p); !status.ok()) return status;
  MeanParams means;
  means.input = p.k;
  means.heads = p.key_heads;
  means.head_dim = p.head_dim;
  means.layout = MeanLayout::documents;
  means.documents = p.documents;
  means.document_capacity = p.document_capacity;
  means.means = p.key_means;
  if (Status status = launch_means(means, stream); !status.ok()) return status;
  const auto enqueued = [&]<int D, class Element>() { return enqueue<D, Element>(p, stream); };
  return device_status(with_instance(p.head_dim, p.q.dtype, enqueued), "quantise for sage3");
}

}  // namespace flamia::quantize::gpu
