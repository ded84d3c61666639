// SPDX-License-Identifier: Apache-2.0
// Launch interface of the Hopper backward pass: gradients of attention over packed documents with FP8 operands.
//
// Three kernels in a row, and nothing else (no allocation, no synchronisation): *prepare* turns exponents and row statistics into the
// records that the tiles stream, *gradients* makes dK, dV and the partial sums of dQ, *finish* turns those into dQ. They may be captured
// in a CUDA graph, and document lengths may change between replays. Rows outside every document are not written.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../forward/forward.hpp"  // ScaleGroup
#include "../layout.hpp"

namespace flamia::sm90 {

/// Number format in which the partial sums of dQ are added in global memory.
enum class PartialFormat {
  f16,  // with the row's power-of-two pre-scale (numerics: section 6)
  f32,
};
enum class GradientFormat { bf16, f32 };
/// How dS enters dK and dQ.
enum class DsFormat {
  e4m3,  // two payloads with exponents of their own, against the transposed codes of K and Q
  bf16,  // rounded once, against K and Q as BF16 values (rows16): ../backward_ds16
};

/// Documents of at most so many tokens are one block's work where dS is BF16 and dQ is summed in memory: what the first of their tiles adds to dQ
/// is stored, so their partial sums need not be zero before.
inline constexpr int kOneBlockTokens = 2 * kKeyTile;

struct BackwardConfig {
  int head_dim = 128;  // 64 or 128
  ScaleGroup scale_group = ScaleGroup::block;
  DsFormat ds = DsFormat::e4m3;
  PartialFormat partials = PartialFormat::f16;
  GradientFormat gradients = GradientFormat::bf16;
  bool deterministic = false;  // dQ bit-repeatable: the split pass runs (../split/split.hpp); dK and dV always are
  bool rotated = true;         // Q and K were rotated (signs, then Hadamard): dQ and dK are rotated back
  bool record_codes = false;   // test mode: fill BackwardParams::recorded_codes
};

struct BackwardParams {
  // Operands in the layouts of ../layout.hpp, each both ways; `transposed` always in order pi. `slots` is slot_capacity(tokens, documents).
  // Of the scores and dP. ScaleGroup::nvfp4: Q and K are values in FP16, `rows_f16` layout, behind the same pointers.
  const std::uint8_t* query_rows = nullptr;        // [query_heads][slots]
  const std::uint8_t* query_transposed = nullptr;  // of Q and K: for DsFormat::e4m3 only
  const std::uint16_t* query_rows16 = nullptr;     // for DsFormat::bf16 only
  const std::uint8_t* key_rows = nullptr;          // [key_heads][slots]; of NVFP4 in deterministic mode only
  const std::uint8_t* key_transposed = nullptr;
  const std::uint16_t* key_rows16 = nullptr;  // for DsFormat::bf16 in deterministic mode
  const std::uint8_t* value_rows = nullptr;
  const std::uint8_t* gradient_rows = nullptr;  // dO' = dO / l, [query_heads][slots]
  const std::uint8_t* gradient_transposed = nullptr;
  const std::uint8_t* query_exponents = nullptr;  // UE8M0 bytes [query_heads][slots]: exponent + 127; 255 = flagged token
  const std::uint8_t* gradient_exponents = nullptr;
  const std::uint8_t* key_exponents = nullptr;  // [key_heads][slots]
  const std::uint8_t* value_exponents = nullptr;
  const float* row_reference = nullptr;       // m, [query_heads][slots]
  const float* d_prime = nullptr;             // D' = rowsum(dequantised dO' * BF16(O)), [query_heads][slots]
  const std::int16_t* dq_exponent = nullptr;  // z, [query_heads][slots]: f16 partials carry 2^z

  // Work: tiles of 128 keys, in any order; dearest first is fastest. The count is known on the device only.
  const Document* documents = nullptr;
  const WorkItem* items = nullptr;
  const std::int32_t* item_count = nullptr;
  const std::int32_t* used_slots = nullptr;  // slots that belong to documents; kTailSlots slots of code 0 follow
  std::int32_t* counter = nullptr;           // two words, zero before the first launch; the kernel leaves them zero

  // Scratch, any contents: see backward_scratch.
  void* row_records = nullptr;
  void* key_records = nullptr;
  // Partial sums of dQ, [query_heads][slots][head_dim] of f16 or f32, in the order of accumulator fragments. Zero before the launch; with
  // DsFormat::bf16 in documents of more than kOneBlockTokens tokens only.
  void* dq_partials = nullptr;

  // Results, [tokens][heads][head_dim]. d_query has query_heads heads; d_key and d_value have key_heads.
  void* d_query = nullptr;
  void* d_key = nullptr;
  void* d_value = nullptr;

  // Test mode: unfolded codes E4M3(exp2(t + 8 - m)) of the visible pairs; one byte a pair, others are not written.
  std::uint8_t* recorded_codes = nullptr;  // [query_heads][slots][record_keys]
  std::int32_t record_keys = 0;            // at least the longest document

  std::int64_t slots = 0;
  std::int64_t tokens = 0;
  int query_heads = 0;
  int key_heads = 0;           // divides query_heads
  int heads_per_group = 1;     // key heads worked on together: the query stream of their groups should fit in the L2 cache
  float softmax_scale = 0.0f;  // > 0
  int window_left = -1;        // a query at i sees keys i - left ... i + right; -1: no limit
  int window_right = -1;       // 0: causal

  // ScaleGroup::nvfp4, instead of key_rows and key_rows16 where neither is said to be needed: K in E4M3 for dQ, `rows` layout; codes and scales of NVFP4
  // (quantize/cuda/quantise.hpp).
  const std::uint8_t* key_codes = nullptr;
  const std::uint8_t* key_nvfp4 = nullptr;
  const std::uint8_t* key_scales = nullptr;
};

/// Bytes of the scratch buffers; 16-byte alignment is enough.
struct BackwardScratch {
  std::size_t row_records, key_records;
};
BackwardScratch backward_scratch(std::int64_t slots, int query_heads, int key_heads);

/// Key heads whose query stream (four copies of Q and dO' for every query head of the group) takes at most `l2_bytes`, at least one.
int backward_heads_per_group(const BackwardConfig& config, std::int64_t slots, int query_heads, int key_heads,
                             std::int64_t l2_bytes);

/// The whole pass. cudaErrorInvalidValue: a parameter is missing or out of range.
cudaError_t launch_backward(const BackwardParams& params, const BackwardConfig& config, cudaStream_t stream);

/// The same in two launches of the caller's: Q and K in BF16 need not be there before the second. With DsFormat::bf16 the next grid may start beside
/// the first (ptx/grid.cuh).
cudaError_t launch_backward_prepare(const BackwardParams& params, const BackwardConfig& config, cudaStream_t stream);
cudaError_t launch_backward_prepared(const BackwardParams& params, const BackwardConfig& config, cudaStream_t stream);

/// Parts of the second, for timing.
cudaError_t launch_backward_gradients(const BackwardParams& params, const BackwardConfig& config, cudaStream_t stream);
cudaError_t launch_backward_finish(const BackwardParams& params, const BackwardConfig& config, cudaStream_t stream);

}  // namespace flamia::sm90
