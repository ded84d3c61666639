// SPDX-License-Identifier: Apache-2.0
// Test operands for the forward kernel: seeded random tokens, quantised by a plain (slow) quantiser straight into the kernel's layouts.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "../../../src/kernels/cuda/sm90/forward/forward.hpp"
#include "../../../src/kernels/cuda/sm90/forward/work.hpp"

namespace bench {

using flamia::sm90::Document;
using flamia::sm90::ForwardConfig;
using flamia::sm90::ForwardParams;
using flamia::sm90::ScaleGroup;
using flamia::sm90::WorkItem;

#define CUDA_CHECK(call)                                                                       \
  do {                                                                                         \
    const cudaError_t error_ = (call);                                                         \
    if (error_ != cudaSuccess) {                                                               \
      std::printf("CUDA error %s at %s:%d\n", cudaGetErrorString(error_), __FILE__, __LINE__); \
      std::exit(1);                                                                            \
    }                                                                                          \
  } while (0)

template <class T>
struct Buffer {
  T* data = nullptr;
  std::size_t count = 0;
  explicit Buffer(std::size_t n = 0) : count(n) {
    if (n != 0) CUDA_CHECK(cudaMalloc(&data, n * sizeof(T)));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }
  void fill(int byte) { CUDA_CHECK(cudaMemset(data, byte, count * sizeof(T))); }
  void from(const std::vector<T>& host) {
    CUDA_CHECK(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> host() const {
    std::vector<T> values(count);
    CUDA_CHECK(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }
};

enum class Scales {
  tensor,
  block,
  sticky_block,
  token,
  nvfp4,
  nvfp4_block
};  // fp8-tensor, mxfp8, mxfp8 with sticky K and V, mxfp8-exact (sticky K and V), nvfp4-exact, nvfp4

/// Whether rows depend on the rest of a token-block.
__host__ __device__ constexpr bool has_token_blocks(Scales scales) {
  return scales == Scales::block || scales == Scales::nvfp4_block;
}

/// Whether Q and K are NVFP4.
__host__ __device__ constexpr bool is_nvfp4(Scales scales) { return scales == Scales::nvfp4 || scales == Scales::nvfp4_block; }

/// What the random tokens look like; all values pass through BF16.
struct Data {
  std::uint64_t seed = 1;
  float query_gain = 1, value_mean = 0, value_gain = 1;
  int headroom = 0;     // of sticky exponents per token; with 0 a document's first tile has several (what check wants), with 2 one
  bool sink = false;    // the first key of a document attracts every query
  bool uneven = false;  // token-dependent magnitudes, so that exponents differ
  int amplify_from = -1;  // tokens of amplify_document at or after this position are multiplied by `amplify`
  int amplify_document = 0;
  float amplify = 1;
  int poison_operand = -1;  // 0, 1, 2: one element of Q, K or V ...
  int poison_document = 0, poison_position = 0, poison_channel = 5;
  float poison = 0;  // ... becomes this (NaN, infinity)
};

struct Shape {
  std::vector<int> lengths;
  int query_heads = 2, key_heads = 2, head_dim = 128;
};

__host__ __device__ inline std::uint64_t mix(std::uint64_t z) {
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}
__device__ inline float normal(std::uint64_t seed, std::uint64_t index) {
  const std::uint64_t z = mix(mix(seed * 0xD1B54A32D192ED03ull + 77) + (index + 1) * 0x9E3779B97F4A7C15ull);
  const float u = ((z >> 40) + 1) * (1.0f / 16777217.0f), v = (z & 0xFFFFFF) * (1.0f / 16777216.0f);
  return sqrtf(-2 * logf(u)) * cosf(6.2831853f * v);
}

/// The BF16 input element of operand 0 (Q), 1 (K) or 2 (V).
__device__ inline float element(const Data& data, int operand, int document, int position, int head, int channel, int d) {
  const std::uint64_t index =
      ((static_cast<std::uint64_t>(operand) * 4096 + document * 64ull + head) * 131072 + position) * d + channel;
  float x = normal(data.seed, index);
  if (operand == 0) x *= data.query_gain;
  if (operand == 2) x = x * data.value_gain + data.value_mean;
  if (data.uneven)
    x *= exp2f(static_cast<float>(static_cast<int>(mix(data.seed + 31 * operand + position * 7ull + document) % 5) - 2));
  if (data.sink && channel == 3) x = operand == 0 ? 6.0f : operand == 1 && position == 0 ? 12.0f : x;
  if (data.amplify_from >= 0 && document == data.amplify_document && position >= data.amplify_from) x *= data.amplify;
  if (operand == data.poison_operand && document == data.poison_document && position == data.poison_position && head == 0 &&
      channel == data.poison_channel) {
    x = data.poison;
  }
  return __bfloat162float(__float2bfloat16_rn(x));
}

/// Least exponent e with amax <= 448 * 2^e, as a UE8M0 byte.
__device__ inline int exponent_byte(float amax) {
  const std::uint32_t u = __float_as_uint(amax);
  if (u == 0) return 0;
  return max(static_cast<int>(u >> 23) - 8 + ((u & 0x7FFFFF) > 0x600000 ? 1 : 0), 0);
}

struct Packed {  // one operand while it is made
  int operand, heads, d;
  std::int64_t slots;
  const Document* documents;
  int document_count;
};

/// Exponent of every token by itself (255: flagged). One warp a token and head.
__global__ void token_exponents(Packed p, Data data, std::uint8_t* exponents) {
  const Document doc = p.documents[blockIdx.y];
  const int lane = threadIdx.x % 32, warps = gridDim.x * blockDim.x / 32;
  for (int unit = (blockIdx.x * blockDim.x + threadIdx.x) / 32; unit < doc.length * p.heads; unit += warps) {
    const int position = unit % doc.length, head = unit / doc.length;
    float amax = 0;
    bool bad = false;
    for (int c = lane; c < p.d; c += 32) {
      const float x = element(data, p.operand, blockIdx.y, position, head, c, p.d);
      bad |= !(fabsf(x) < INFINITY);
      amax = fmaxf(amax, fabsf(x));
    }
    for (int step = 16; step; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
    bad = __any_sync(~0u, bad);
    if (lane == 0) exponents[head * p.slots + doc.slot_start + position] = bad ? 255 : exponent_byte(amax);
  }
}

/// Groups: blocks of 32 (flagged as a whole), prefix maximum (sticky), or one constant for everything.
__global__ void group_exponents(Packed p, Scales scales, int headroom, std::uint8_t* exponents) {
  const int unit = blockIdx.x * blockDim.x + threadIdx.x;
  if (unit >= p.document_count * p.heads) return;
  const Document doc = p.documents[unit % p.document_count];
  std::uint8_t* const e = exponents + unit / p.document_count * p.slots + doc.slot_start;
  if (scales == Scales::tensor || (is_nvfp4(scales) && p.operand != 2)) {
    for (int i = 0; i < doc.length; ++i) e[i] = scales == Scales::tensor ? 127 - 6 : 127;
    return;
  }
  if (scales != Scales::token && scales != Scales::nvfp4) {
    for (int i = 0; i < doc.length; i += 32) {
      int top = 0;
      for (int j = i; j < min(i + 32, doc.length); ++j) top = max(top, static_cast<int>(e[j]));
      for (int j = i; j < min(i + 32, doc.length); ++j) e[j] = top;
    }
  }
  if (scales != Scales::block && scales != Scales::nvfp4_block && p.operand != 0) {
    int top = 0;
    for (int i = 0; i < doc.length; ++i) {
      if (e[i] == 255) continue;
      const bool raised = i == 0 && e[i] > 0 && (scales == Scales::token || scales == Scales::nvfp4);
      top = max(top, e[i] + (raised ? headroom : 0));
      e[i] = top;
    }
  }
}

__global__ void encode(Packed p, Data data, const std::uint8_t* exponents, std::uint8_t* codes) {
  const Document doc = p.documents[blockIdx.y];
  const std::int64_t total = static_cast<std::int64_t>(doc.length) * p.heads * p.d;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < total;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const int channel = i % p.d, position = i / p.d % doc.length, head = i / p.d / doc.length;
    const std::int64_t slot = doc.slot_start + position;
    const int e = exponents[head * p.slots + slot];
    const float x = element(data, p.operand, blockIdx.y, position, head, channel, p.d);
    const float scaled = ldexpf(x, 127 - e);
    const std::uint8_t code = e == 255 ? 0 : __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3);
    const std::int64_t at = p.operand == 2
                                ? flamia::sm90::transposed_offset(p.slots, p.d, head, slot, channel, flamia::sm90::TokenOrder::pi)
                                : flamia::sm90::rows_offset(p.slots, p.d, head, slot, channel);
    codes[at] = code;
  }
}

/// Of an element of Q or K of NVFP4.
__device__ inline std::int64_t half_offset(std::int64_t slots, int d, int head, std::int64_t slot, int channel) {
  return (head * slots + slot / 8 * 8) * d + channel / 8 * 64 + slot % 8 * 8 + channel % 8;
}

/// Q or K of NVFP4: code times scale in FP16, scales of 16 channels by amax / 6.
__global__ void encode_nvfp4(Packed p, Data data, std::uint8_t* halves) {
  const Document doc = p.documents[blockIdx.y];
  const std::int64_t total = static_cast<std::int64_t>(doc.length) * p.heads * (p.d / 16);
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < total;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const int first = i % (p.d / 16) * 16, position = i / (p.d / 16) % doc.length, head = i / (p.d / 16) / doc.length;
    const std::int64_t slot = doc.slot_start + position;
    float x[16], amax = 0;
    for (int c = 0; c < 16; ++c) {
      x[c] = element(data, p.operand, blockIdx.y, position, head, first + c, p.d);
      amax = fmaxf(amax, fabsf(x[c]));
    }
    const float s = fmaxf(static_cast<float>(__nv_fp8_e4m3(amax / 6)), 0x1p-9f);
    for (int c = 0; c < 16; ++c) {
      const float y = fminf(fabsf(x[c]) / s, 6.0f), step = y < 2 ? 0.5f : y < 4 ? 1.0f : 2.0f;
      reinterpret_cast<__half*>(halves)[half_offset(p.slots, p.d, head, slot, first + c)] =
          __float2half_rn(copysignf(rintf(y / step) * step * s, x[c]));
    }
  }
}

/// Operands, tables, results of one problem on the device.
struct Problem {
  Shape shape;
  Scales scales;
  int window_left, window_right;
  std::int64_t tokens, slots;
  std::vector<Document> documents;
  std::vector<WorkItem> items;
  Buffer<Document> document_table;
  Buffer<WorkItem> item_table;
  Buffer<std::int32_t> words{3};  // item count, counter (two words)
  Buffer<std::uint8_t> codes[3], exponents[3];
  Buffer<__nv_bfloat16> output;
  Buffer<float> lse, reference, sum;

  Problem(const Shape& s, Scales scales_, int left, int right, int query_tile)
      : shape(s),
        scales(scales_),
        window_left(left),
        window_right(right),
        tokens(std::accumulate(s.lengths.begin(), s.lengths.end(), std::int64_t{0})),
        slots(flamia::sm90::slot_capacity(tokens, s.lengths.size())),
        documents(make_documents(s)),
        items(make_items(documents, left, right, query_tile)),
        document_table(documents.size()),
        item_table(items.size()),
        codes{Buffer<std::uint8_t>(s.query_heads * slots * s.head_dim * score_bytes()),
              Buffer<std::uint8_t>(s.key_heads * slots * s.head_dim * score_bytes()),
              Buffer<std::uint8_t>(s.key_heads * slots * s.head_dim)},
        exponents{Buffer<std::uint8_t>(s.query_heads * slots), Buffer<std::uint8_t>(s.key_heads * slots),
                  Buffer<std::uint8_t>(s.key_heads * slots)},
        output(tokens * s.query_heads * s.head_dim),
        lse(tokens * s.query_heads),
        reference(slots * s.query_heads),
        sum(slots * s.query_heads) {
    document_table.from(documents);
    item_table.from(items);
    words.from({static_cast<std::int32_t>(items.size()), 0, 0});
  }

  int score_bytes() const { return is_nvfp4(scales) ? 2 : 1; }  // of an element of Q and K

  static std::vector<Document> make_documents(const Shape& s) {
    std::vector<Document> documents;
    std::int32_t slot = 0, token = 0;
    for (int length : s.lengths) {
      documents.push_back({slot, token, length});
      token += length;
      slot = (slot + length + flamia::sm90::kSlotAlign - 1) / flamia::sm90::kSlotAlign * flamia::sm90::kSlotAlign;
    }
    return documents;
  }

  /// Dearest first; equal costs in document order.
  static std::vector<WorkItem> make_items(const std::vector<Document>& documents, int left, int right, int query_tile) {
    std::vector<std::pair<int, WorkItem>> costed;
    for (int i = 0; i < static_cast<int>(documents.size()); ++i) {
      for (int first = 0; first < documents[i].length; first += query_tile) {
        const auto range = flamia::sm90::forward::tile_range({left, right}, first, query_tile, documents[i].length);
        costed.push_back({range.last - range.first + 1, {i, first}});
      }
    }
    std::stable_sort(costed.begin(), costed.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    std::vector<WorkItem> items;
    for (const auto& item : costed) items.push_back(item.second);
    return items;
  }

  void make_operands(const Data& data) {
    for (int operand = 0; operand < 3; ++operand) {
      const int heads = operand == 0 ? shape.query_heads : shape.key_heads;
      const Packed p{operand, heads, shape.head_dim, slots, document_table.data, static_cast<int>(documents.size())};
      codes[operand].fill(0);
      exponents[operand].fill(0);
      const dim3 grid(std::max<int>(1, 2048 / p.document_count), p.document_count);
      token_exponents<<<grid, 256>>>(p, data, exponents[operand].data);
      group_exponents<<<(p.document_count * heads + 63) / 64, 64>>>(p, scales, data.headroom, exponents[operand].data);
      if (is_nvfp4(scales) && operand != 2)
        encode_nvfp4<<<grid, 256>>>(p, data, codes[operand].data);
      else
        encode<<<grid, 256>>>(p, data, exponents[operand].data, codes[operand].data);
    }
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaDeviceSynchronize());
  }

  ForwardConfig config() const {
    ForwardConfig c;
    c.head_dim = shape.head_dim;
    c.scale_group = is_nvfp4(scales) ? ScaleGroup::nvfp4 : scales == Scales::token ? ScaleGroup::token : ScaleGroup::block;
    return c;
  }

  ForwardParams params() {
    ForwardParams p;
    p.query_codes = codes[0].data;
    p.key_codes = codes[1].data;
    p.value_codes = codes[2].data;
    p.query_exponents = exponents[0].data;
    p.key_exponents = exponents[1].data;
    p.value_exponents = exponents[2].data;
    p.documents = document_table.data;
    p.items = item_table.data;
    p.item_count = words.data;
    p.counter = words.data + 1;
    p.output = output.data;
    p.lse = lse.data;
    p.row_reference = reference.data;
    p.row_sum = sum.data;
    p.slots = slots;
    p.tokens = tokens;
    p.query_heads = shape.query_heads;
    p.key_heads = shape.key_heads;
    p.heads_per_group = flamia::sm90::heads_per_group(config(), slots, shape.query_heads, shape.key_heads, std::int64_t{36} << 20);
    p.softmax_scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    p.window_left = window_left;
    p.window_right = window_right;
    p.value_blocks = scales == Scales::nvfp4_block;
    return p;
  }

  /// Every output byte 0xFF: what the kernel does not write is a NaN.
  void poison_outputs() {
    output.fill(0xFF);
    lse.fill(0xFF);
    reference.fill(0xFF);
    sum.fill(0xFF);
  }
};

}  // namespace bench
