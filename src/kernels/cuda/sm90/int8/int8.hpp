// SPDX-License-Identifier: Apache-2.0
// Launch interface of the Hopper kernels for INT8 attention (recipe `sagebwd`): forward, dQ, and dK with dV.
//
// A call enqueues its kernels and nothing else (no allocation, no synchronisation): it may be captured in a CUDA graph, and document lengths may
// change between replays. Rows outside every document are not written. Every result repeats bit for bit.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "../backward/backward.hpp"  // GradientFormat
#include "../forward/forward.hpp"
#include "../layout.hpp"

namespace flamia::sm90::int8 {

inline constexpr int kScaleSlots = 16;       // slots that share an entry of a table of scales
inline constexpr int kBlock = 128;           // tokens of Q, K, V or dO that share a scale; queries or keys of a row of P or dS
inline constexpr float kGreatestCode = 127;  // a scale is the greatest magnitude / 127

/// INT8 codes of an operand and the scales of its blocks, [heads][slots / 16]: an entry is that of the block which the slots belong to, NaN where
/// the block holds NaN or infinity (its codes are 0).
struct Operand {
  const std::uint8_t* rows = nullptr;        // `rows` layout
  const std::uint8_t* transposed = nullptr;  // `transposed` layout, order pi
  const float* scales = nullptr;
};

/// What all three kernels are told.
struct Problem {
  const Document* documents = nullptr;
  std::int32_t* counter = nullptr;  // two words, zero before the first launch; every kernel leaves them zero
  std::int64_t slots = 0;           // slot_capacity(tokens, documents)
  std::int64_t tokens = 0;
  int head_dim = 128;  // 64 or 128
  int query_heads = 0;
  int key_heads = 0;            // divides query_heads
  int key_heads_per_group = 1;  // key heads worked on together: what their items read should fit in the L2 cache
  float softmax_scale = 0.0f;   // > 0
  int window_left = -1;         // a query at i sees keys i - left ... i + right; -1: no limit
  int window_right = -1;        // 0: causal
};

struct ForwardParams : Problem {
  Operand query, key, value;
  const float* key_mean_score = nullptr;  // q_i . (mean of the document's keys), [query_heads][slots]; null: keys are not smoothed
  const WorkItem* items = nullptr;        // tiles of kForwardTile queries, dearest first
  const std::int32_t* item_count = nullptr;
  void* output = nullptr;          // BF16 [tokens][query_heads][head_dim]
  float* lse = nullptr;            // natural log, [query_heads][tokens]
  float* row_reference = nullptr;  // m, [query_heads][slots]; null: not wanted
  float* row_sum = nullptr;        // l
};
inline constexpr int kForwardTile = 192;

struct BackwardParams : Problem {
  Operand query, key, gradient;                 // of dO the transposed codes alone
  const std::uint16_t* value_rows16 = nullptr;  // V and dO in BF16: [heads][slot / 8][d / 8][slot % 8][8]
  const std::uint16_t* gradient_rows16 = nullptr;
  const float* row_lse = nullptr;        // m + log2 l, [query_heads][slots]
  const std::uint16_t* row_d = nullptr;  // -D as a sum of three BF16 numbers, [query_heads][slots][8], the rest 0
  const WorkItem* items = nullptr;       // tiles of 128 keys, dearest first; queries take them mirrored
  const std::int32_t* item_count = nullptr;
  GradientFormat gradients = GradientFormat::bf16;
  void* d_query = nullptr;  // [tokens][heads][head_dim]
  void* d_key = nullptr;
  void* d_value = nullptr;
};

cudaError_t launch_forward(const ForwardParams& params, cudaStream_t stream);
cudaError_t launch_backward(const BackwardParams& params, cudaStream_t stream);

/// Its parts, for timing.
cudaError_t launch_query_gradient(const BackwardParams& params, cudaStream_t stream);
cudaError_t launch_key_gradients(const BackwardParams& params, cudaStream_t stream);

}  // namespace flamia::sm90::int8
