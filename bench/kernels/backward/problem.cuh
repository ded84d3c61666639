// SPDX-License-Identifier: Apache-2.0
// Problems for the backward kernel: packed documents, operands in the kernel's layouts, work list, scratch. A plain quantiser of its own, so
// that the kernel is not checked with the code it is shipped with.
#pragma once
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels/cuda/sm90/backward/backward.hpp"
#include "kernels/cuda/sm90/layout.hpp"
#include "kernels/cuda/sm90/split/split.hpp"
#include "numerics/exponent.hpp"
#include "numerics/hadamard.hpp"

#define CHECK(call)                                                                         \
  do {                                                                                      \
    const cudaError_t error_ = (call);                                                      \
    if (error_ != cudaSuccess) {                                                            \
      std::printf("%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      std::exit(2);                                                                         \
    }                                                                                       \
  } while (0)

namespace bench {

using namespace flamia::sm90;
namespace numerics = flamia::numerics;

#define FOR_EACH(i, n)                                                                             \
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < (n); \
       i += gridDim.x * static_cast<std::int64_t>(blockDim.x))

__device__ inline std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
/// N(0, 1), keyed by index and seed.
__device__ inline float normal(std::int64_t i, std::uint64_t seed) {
  const std::uint64_t z = mix((static_cast<std::uint64_t>(i) + 1) * 0x9E3779B97F4A7C15ull + mix(seed + 0x1234567));
  return sqrtf(-2.0f * logf(((z >> 40) + 1) * (1.0f / 16777217.0f))) * cosf(6.2831853f * ((z & 0xFFFFFF) * (1.0f / 16777216.0f)));
}
__device__ inline float round_bf16(float x) {
  const unsigned u = __float_as_uint(x);
  return __uint_as_float((u + 0x7FFF + (u >> 16 & 1)) & 0xFFFF0000u);
}
__device__ inline float decode(std::uint8_t code) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3))); }
__device__ inline std::uint8_t encode(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }

__device__ inline std::uint16_t half_bits(float x) { return static_cast<__half_raw>(__float2half_rn(x)).x; }
__device__ inline float half_value(std::uint16_t bits) {
  __half_raw raw;
  raw.x = bits;
  return __half2float(__half(raw));
}

/// The passes under test: one kernel or two with dS in E4M3, one with dS in BF16.
enum class Pass { fused, split, ds16, ds16_split };
inline Pass pass = Pass::fused;
inline bool is_split() { return pass == Pass::split || pass == Pass::ds16_split; }
inline bool is_ds16() { return pass == Pass::ds16 || pass == Pass::ds16_split; }
inline const char* name_of(Pass which) {
  return which == Pass::split ? "split" : which == Pass::ds16 ? "ds16" : which == Pass::ds16_split ? "ds16_split" : "fused";
}

struct Shape {
  std::vector<int> lengths;
  int query_heads = 4, key_heads = 2, head_dim = 128;
  int left = -1, right = 0;
  BackwardConfig config;
  bool sticky = false;  // K and V exponents: prefix maximum
  float amplitude = 1.0f;
  bool stress = false;                      // sinks, zero tokens, outliers
  int query_power = 0, gradient_power = 0;  // Q and dO times these powers of two, K and V divided by them

  bool nvfp4() const { return config.scale_group == ScaleGroup::nvfp4; }
  /// Whether E4M3 codes share exponents in token-blocks; with NVFP4 scores both occur.
  bool blocks() const { return config.scale_group == ScaleGroup::block || (nvfp4() && !sticky); }
};

template <class T>
T* device_array(std::int64_t count, int poison = 0xFF) {
  T* pointer = nullptr;
  CHECK(cudaMalloc(&pointer, std::max<std::int64_t>(count, 1) * sizeof(T)));
  CHECK(cudaMemset(pointer, poison, std::max<std::int64_t>(count, 1) * sizeof(T)));
  return pointer;
}

/// One operand both ways; `halves`: NVFP4 as code times scale in FP16, rows of twice as many bytes; `nvfp4` and `scales`: the same as codes, tokens by
/// themselves.
struct Operand {
  std::uint8_t *rows, *transposed, *exponents;
  std::uint16_t *rows16, *halves;
  std::uint8_t *nvfp4, *scales;
};

struct Problem {
  Shape shape;
  std::int64_t tokens = 0, slots = 0, used = 0;
  std::vector<Document> documents;
  Document* device_documents;
  std::int32_t* token_document;  // [tokens]
  int longest = 0;
  float *q, *k, *v, *g;  // [tokens][heads][d], values of BF16
  Operand query, key, value, gradient;
  float *reference, *sum, *d_prime;
  std::int16_t* dq_exponent;
  std::int32_t* counter;
  std::vector<void*> owned;
  BackwardParams params;
  std::int64_t gradient_bytes() const { return shape.config.gradients == GradientFormat::bf16 ? 2 : 4; }
  std::int64_t query_elements() const { return tokens * shape.query_heads * shape.head_dim; }
  std::int64_t key_elements() const { return tokens * shape.key_heads * shape.head_dim; }
};

static __global__ void fill_normal(float* x, std::int64_t n, std::uint64_t seed, float amplitude) {
  FOR_EACH(i, n) x[i] = round_bf16(normal(i, seed) * amplitude);
}

/// Exponent per token before grouping; 255 + kFlag marks a token with NaN or infinity.
struct QuantiseShape {
  int heads, d;
  std::int64_t tokens, slots;
  bool rotate;
};
template <int kHeadDim>
__device__ void load_row(float* x, const float* in, const float* divide_by, std::int64_t at, bool rotate) {
  for (int c = 0; c < kHeadDim; ++c) x[c] = divide_by == nullptr ? in[at * kHeadDim + c] : in[at * kHeadDim + c] / *divide_by;
  if (rotate) numerics::rotate<kHeadDim>(x);
}
template <int kHeadDim>
__global__ void token_exponents(const float* in, const float* divide, int* exponents, const Document* documents,
                                const std::int32_t* document_of, QuantiseShape s) {
  FOR_EACH(i, s.tokens * s.heads) {
    const std::int64_t token = i / s.heads, head = i % s.heads;
    const Document document = documents[document_of[token]];
    const std::int64_t slot = document.slot_start + token - document.token_start;
    float x[kHeadDim];
    load_row<kHeadDim>(x, in, divide == nullptr ? nullptr : divide + head * s.slots + slot, i, s.rotate);
    float amax = 0.0f;
    bool flagged = false;
    for (int c = 0; c < kHeadDim; ++c) {
      flagged |= !numerics::is_finite(x[c]);
      amax = fmaxf(amax, fabsf(x[c]));
    }
    exponents[head * s.slots + slot] = flagged ? 1000 : numerics::ceil_exponent<numerics::kE4M3>(amax);
  }
}
static __global__ void group_exponents(const int* exponents, std::uint8_t* bytes, const Document* documents, int count, int heads,
                                       std::int64_t slots, bool block, bool sticky) {
  FOR_EACH(i, static_cast<std::int64_t>(count) * heads) {
    const Document document = documents[i / heads];
    const std::int64_t first = i % heads * slots + document.slot_start;
    int prefix = -127;
    for (int begin = 0; begin < document.length; begin += block ? 32 : 1) {
      const int end = block ? min(begin + 32, document.length) : begin + 1;
      int e = -127;
      bool flagged = false;
      for (int p = begin; p < end; ++p) {
        flagged |= exponents[first + p] == 1000;
        e = exponents[first + p] == 1000 ? e : max(e, exponents[first + p]);
      }
      if (!flagged) prefix = max(prefix, e);
      for (int p = begin; p < end; ++p) bytes[first + p] = flagged ? 255 : static_cast<std::uint8_t>((sticky ? prefix : e) + 127);
    }
  }
}
template <int kHeadDim>
__global__ void encode_tokens(const float* in, const float* divide, Operand out, const Document* documents,
                              const std::int32_t* document_of, QuantiseShape s) {
  FOR_EACH(i, s.tokens * s.heads) {
    const std::int64_t token = i / s.heads, head = i % s.heads;
    const Document document = documents[document_of[token]];
    const std::int64_t slot = document.slot_start + token - document.token_start;
    float x[kHeadDim];
    load_row<kHeadDim>(x, in, divide == nullptr ? nullptr : divide + head * s.slots + slot, i, s.rotate);
    const int byte = out.exponents[head * s.slots + slot];
    for (int c = 0; c < kHeadDim; ++c) {
      const std::uint8_t code = byte == 255 ? 0 : encode(numerics::scale_pow2(x[c], 127 - byte));
      out.rows[rows_offset(s.slots, kHeadDim, head, slot, c)] = code;
      out.transposed[transposed_offset(s.slots, kHeadDim, head, slot, c, TokenOrder::pi)] = code;
      out.rows16[rows16_offset(s.slots, kHeadDim, head, slot, c)] = static_cast<std::uint16_t>(
          __float_as_uint(numerics::scale_pow2(decode(code), byte == 255 ? 0 : byte - 127)) >> 16);  // exact
    }
  }
}

/// NVFP4 of rotated rows, scales by amax / 6. A token with NaN or infinity has values 0.
__device__ inline float round_e2m1(float x) {
  const float a = fminf(x, 6.0f);
  return a < 2.0f ? rintf(2.0f * a) / 2.0f : a < 4.0f ? rintf(a) : 2.0f * rintf(a / 2.0f);
}
template <int kHeadDim>
__global__ void encode_nvfp4(const float* in, Operand out, const Document* documents, const std::int32_t* document_of,
                             QuantiseShape s) {
  FOR_EACH(i, s.tokens * s.heads) {
    const std::int64_t token = i / s.heads, head = i % s.heads;
    const Document document = documents[document_of[token]];
    const std::int64_t slot = document.slot_start + token - document.token_start;
    float x[kHeadDim];
    load_row<kHeadDim>(x, in, nullptr, i, s.rotate);
    bool flagged = false;
    for (int c = 0; c < kHeadDim; ++c) flagged |= !numerics::is_finite(x[c]);
    for (int first = 0; first < kHeadDim; first += 16) {
      float amax = 0.0f;
      for (int c = first; c < first + 16; ++c) amax = fmaxf(amax, fabsf(x[c]));
      const auto byte = encode(amax / 6.0f);
      const float scale = decode(byte);
      const std::int64_t row = head * s.slots + slot;
      out.scales[row * (kHeadDim / 16) + first / 16] = flagged ? 0x7f : byte;
      for (int c = first; c < first + 16; ++c) {
        const float value = flagged || scale == 0.0f ? 0.0f : copysignf(round_e2m1(fabsf(x[c]) / scale) * scale, x[c]);
        out.halves[rows_offset(s.slots, 2 * kHeadDim, head, slot, 2 * c) / 2] = half_bits(value);  // exact
        const float code = scale == 0.0f ? 0.0f : fabsf(value) / scale;
        const int bits = half_bits(code * 0x1p-14f) >> 9 | (value < 0.0f ? 8 : 0);
        std::uint8_t& two = out.nvfp4[row * (kHeadDim / 2) + c / 2];
        two = c % 2 == 0 ? bits : two | bits << 4;
      }
    }
  }
}

inline Operand make_operand(Problem& p, int heads) {
  const std::int64_t n = heads * p.slots;
  Operand o{device_array<std::uint8_t>(n * p.shape.head_dim, 0),
            device_array<std::uint8_t>(n * p.shape.head_dim, 0),
            device_array<std::uint8_t>(n),
            device_array<std::uint16_t>(n * p.shape.head_dim, 0),
            device_array<std::uint16_t>(n * p.shape.head_dim, 0),
            device_array<std::uint8_t>(n * p.shape.head_dim / 2, 0),
            device_array<std::uint8_t>(n * p.shape.head_dim / 16, 0)};
  for (void* x :
       {static_cast<void*>(o.rows), static_cast<void*>(o.transposed), static_cast<void*>(o.exponents), static_cast<void*>(o.rows16),
        static_cast<void*>(o.halves), static_cast<void*>(o.nvfp4), static_cast<void*>(o.scales)})
    p.owned.push_back(x);
  return o;
}

template <int kHeadDim>
void quantise(const Problem& p, const float* in, const float* divide, Operand out, int heads, bool rotate, bool sticky) {
  const QuantiseShape s{heads, kHeadDim, p.tokens, p.slots, rotate};
  int* exponents = device_array<int>(heads * p.slots);
  token_exponents<kHeadDim><<<512, 128>>>(in, divide, exponents, p.device_documents, p.token_document, s);
  group_exponents<<<64, 64>>>(exponents, out.exponents, p.device_documents, static_cast<int>(p.documents.size()), heads, p.slots,
                              p.shape.blocks(), sticky);
  encode_tokens<kHeadDim><<<512, 128>>>(in, divide, out, p.device_documents, p.token_document, s);
  if (rotate) encode_nvfp4<kHeadDim><<<512, 128>>>(in, out, p.device_documents, p.token_document, s);
  CHECK(cudaGetLastError());
  CHECK(cudaFree(exponents));
}

/// Documents, work list, memory. Nothing is quantised yet.
inline Problem make_problem(const Shape& shape) {
  Problem p;
  p.shape = shape;
  p.shape.config.ds = is_ds16() ? DsFormat::bf16 : DsFormat::e4m3;
  std::vector<std::int32_t> document_of;
  std::vector<WorkItem> items;
  for (std::size_t d = 0; d < shape.lengths.size(); ++d) {
    const int length = shape.lengths[d];
    p.documents.push_back({static_cast<std::int32_t>(p.used), static_cast<std::int32_t>(p.tokens), length});
    p.used += (length + kSlotAlign - 1) / kSlotAlign * kSlotAlign;
    p.tokens += length;
    p.longest = std::max(p.longest, length);
    document_of.insert(document_of.end(), length, static_cast<std::int32_t>(d));
    for (int first = 0; first < length; first += kKeyTile) items.push_back({static_cast<std::int32_t>(d), first});
  }
  p.slots = slot_capacity(p.tokens, static_cast<std::int64_t>(shape.lengths.size()));
  const auto cost = [&](const WorkItem& item) {
    const int length = shape.lengths[item.document];
    const int begin = shape.right < 0 ? 0 : std::max(item.first - shape.right, 0);
    const int end = shape.left < 0 ? length : std::min(length, item.first + kKeyTile + shape.left);
    return (end + 63) / 64 - begin / 64;
  };
  const auto key = [&](const WorkItem& item) {  // as the schedule does it: tiles of documents of up to 16 together
    return shape.lengths[item.document] <= 16 * kKeyTile ? cost({item.document, 0}) : cost(item);
  };
  std::stable_sort(items.begin(), items.end(), [&](const WorkItem& a, const WorkItem& b) { return key(a) > key(b); });
  const auto upload = [&](const auto& host) {
    using T = typename std::decay_t<decltype(host)>::value_type;
    T* to = device_array<T>(static_cast<std::int64_t>(host.size()));
    CHECK(cudaMemcpy(to, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    p.owned.push_back(to);
    return to;
  };
  p.device_documents = upload(p.documents);
  p.token_document = upload(document_of);
  BackwardParams& b = p.params;
  b.items = upload(items);
  b.item_count = upload(std::vector<std::int32_t>{static_cast<std::int32_t>(items.size())});
  b.used_slots = upload(std::vector<std::int32_t>{static_cast<std::int32_t>(p.used)});
  b.documents = p.device_documents;
  p.counter = device_array<std::int32_t>(2, 0);
  b.counter = p.counter;
  p.query = make_operand(p, shape.query_heads);
  p.gradient = make_operand(p, shape.query_heads);
  p.key = make_operand(p, shape.key_heads);
  p.value = make_operand(p, shape.key_heads);
  const std::int64_t rows = shape.query_heads * p.slots;
  p.reference = device_array<float>(rows);
  p.sum = device_array<float>(rows);
  p.d_prime = device_array<float>(rows);
  p.dq_exponent = device_array<std::int16_t>(rows);
  for (void* x : {static_cast<void*>(p.reference), static_cast<void*>(p.sum), static_cast<void*>(p.d_prime),
                  static_cast<void*>(p.dq_exponent), static_cast<void*>(p.counter)})
    p.owned.push_back(x);
  b.query_rows = p.query.rows, b.query_transposed = p.query.transposed, b.query_exponents = p.query.exponents;
  b.gradient_rows = p.gradient.rows, b.gradient_transposed = p.gradient.transposed, b.gradient_exponents = p.gradient.exponents;
  b.key_rows = p.key.rows, b.key_transposed = p.key.transposed, b.key_exponents = p.key.exponents;
  if (is_ds16()) {
    b.query_transposed = b.key_transposed = nullptr;
    b.query_rows16 = p.query.rows16, b.key_rows16 = p.key.rows16;
  }
  if (shape.nvfp4()) {
    b.query_rows = reinterpret_cast<const std::uint8_t*>(p.query.halves);
    b.key_rows = reinterpret_cast<const std::uint8_t*>(p.key.halves);
    b.key_codes = p.key.rows, b.key_nvfp4 = p.key.nvfp4, b.key_scales = p.key.scales;
  }
  b.value_rows = p.value.rows, b.value_exponents = p.value.exponents;
  b.row_reference = p.reference, b.d_prime = p.d_prime, b.dq_exponent = p.dq_exponent;
  const BackwardScratch scratch = backward_scratch(p.slots, shape.query_heads, shape.key_heads);
  const auto own = [&](void* x) { return p.owned.push_back(x), x; };
  b.row_records = own(device_array<std::uint8_t>(scratch.row_records));
  b.key_records = own(device_array<std::uint8_t>(scratch.key_records));
  b.dq_partials = own(device_array<std::uint8_t>(rows * shape.head_dim * (shape.config.partials == PartialFormat::f16 ? 2 : 4)));
  b.d_query = own(device_array<std::uint8_t>(p.query_elements() * p.gradient_bytes()));
  b.d_key = own(device_array<std::uint8_t>(p.key_elements() * p.gradient_bytes()));
  b.d_value = own(device_array<std::uint8_t>(p.key_elements() * p.gradient_bytes()));
  b.slots = p.slots, b.tokens = p.tokens, b.query_heads = shape.query_heads, b.key_heads = shape.key_heads;
  b.heads_per_group = backward_heads_per_group(shape.config, p.slots, shape.query_heads, shape.key_heads, 24 << 20);
  b.softmax_scale = shape.head_dim == 128 ? 0.08838834764f : 0.125f;
  b.window_left = shape.left, b.window_right = shape.right;
  p.q = p.k = p.v = p.g = nullptr;
  return p;
}

inline void release(Problem& p) {
  for (void* x : p.owned) CHECK(cudaFree(x));
  p.owned.clear();
}

/// Zeros where the pass adds to the partial sums; NaN where it stores them first.
inline void clear_partials(const Problem& p) {
  const std::int64_t row = p.shape.head_dim * (p.shape.config.partials == PartialFormat::f16 ? 2 : 4);
  CHECK(cudaMemsetAsync(p.params.dq_partials, is_ds16() ? 0xFF : 0, p.shape.query_heads * p.slots * row));
  for (const Document& document : p.documents) {
    if (!is_ds16() || document.length <= kOneBlockTokens) continue;
    for (std::int64_t head = 0; head < p.shape.query_heads; ++head)
      CHECK(cudaMemsetAsync(static_cast<char*>(p.params.dq_partials) + (head * p.slots + document.slot_start) * row, 0,
                            (document.length + kSlotAlign - 1) / kSlotAlign * kSlotAlign * row));
  }
}

/// Poisons the outputs, clears the partial sums and runs the pass.
inline void run(const Problem& p) {
  const BackwardParams& b = p.params;
  clear_partials(p);
  CHECK(cudaMemsetAsync(b.d_query, 0xFF, p.query_elements() * p.gradient_bytes()));
  CHECK(cudaMemsetAsync(b.d_key, 0xFF, p.key_elements() * p.gradient_bytes()));
  CHECK(cudaMemsetAsync(b.d_value, 0xFF, p.key_elements() * p.gradient_bytes()));
  BackwardConfig config = p.shape.config;
  config.deterministic = is_split();
  CHECK(launch_backward(b, config, nullptr));
  CHECK(cudaDeviceSynchronize());
}

}  // namespace bench
