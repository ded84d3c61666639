// SPDX-License-Identifier: Apache-2.0
// Launch interface of the Hopper forward kernel: attention over packed documents with FP8 operands.
//
// The call enqueues one kernel and nothing else (no allocation, no synchronisation): it may be captured in a CUDA graph, and document
// lengths may change between replays. Rows of `output` and `lse` outside every document are not written (another kernel fills them).
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "../layout.hpp"

namespace flamia::sm90 {

/// How many tokens share one exponent. A compile-time property of the kernel: it decides what a tile with several exponents costs.
enum class ScaleGroup {
  block,  // token-block of 32 (recipes `mxfp8`, `fp8-tensor`)
  token,  // every token has its own (recipe `mxfp8-exact`, where key and value exponents are sticky)
  nvfp4,  // of values as `token`; queries and keys are NVFP4 numbers in FP16 and have none (recipes `nvfp4`, `nvfp4-exact`). Forward only
};

/// How a row's power-of-two reference follows its scores (numerics: section 8 and 9).
enum class RowReference { phase32, tilesum };

struct ForwardConfig {
  int head_dim = 128;  // 64 or 128
  ScaleGroup scale_group = ScaleGroup::block;
  RowReference reference = RowReference::phase32;
  bool record_codes = false;  // test mode: fill ForwardParams::recorded_*
};

struct ForwardParams {
  // Operands in the layouts of ../layout.hpp. `slots` is slot_capacity(tokens, documents).
  const std::uint8_t* query_codes = nullptr;  // rows        [query_heads][slots]; NVFP4: rows_f16
  const std::uint8_t* key_codes = nullptr;    // rows        [key_heads][slots]; NVFP4: rows_f16
  const std::uint8_t* value_codes = nullptr;  // transposed  [key_heads][slots], order pi
  const std::uint8_t* query_exponents =
      nullptr;                                  // UE8M0 bytes [query_heads][slots]: exponent + 127; 255 = flagged token. NVFP4: 127
  const std::uint8_t* key_exponents = nullptr;  // [key_heads][slots]
  const std::uint8_t* value_exponents = nullptr;  // [key_heads][slots]

  // Work: tiles of query_tile(config) queries, dearest first. The count is known on the device only.
  const Document* documents = nullptr;
  const WorkItem* items = nullptr;
  const std::int32_t* item_count = nullptr;
  std::int32_t* counter = nullptr;  // two words, zero before the first launch; the kernel leaves them zero

  // Results.
  void* output = nullptr;          // BF16 [tokens][query_heads][head_dim]
  float* lse = nullptr;            // natural log, [query_heads][tokens]
  float* row_reference = nullptr;  // m (or r), [query_heads][slots]; null: not wanted
  float* row_sum = nullptr;        // l, [query_heads][slots]; null: not wanted

  // Test mode: unfolded codes of the visible pairs and the row reference they were made with.
  std::uint8_t* recorded_codes = nullptr;  // [query_heads][slots][record_keys]
  float* recorded_reference = nullptr;     // [query_heads][slots][record_keys / kKeyTile]
  std::int32_t record_keys = 0;            // multiple of kKeyTile, at least the longest document

  std::int64_t slots = 0;
  std::int64_t tokens = 0;
  int query_heads = 0;
  int key_heads = 0;             // divides query_heads
  int heads_per_group = 1;       // query heads worked on together: their K and V should fit in the L2 cache
  float softmax_scale = 0.0f;    // > 0
  int window_left = -1;          // a query at i sees keys i - left ... i + right; -1: no limit
  int window_right = -1;         // 0: causal
  bool beside_previous = false;  // the kernel before it in the stream writes nothing that this one touches: both may run at once
  bool value_blocks = false;     // NVFP4: V has token-blocks, whose exponents P's bias folds where they lie close together
};

/// Queries per work item.
int query_tile(const ForwardConfig& config);

/// Heads whose keys and values take at most `l2_bytes`, at least one key head's worth.
int heads_per_group(const ForwardConfig& config, std::int64_t slots, int query_heads, int key_heads, std::int64_t l2_bytes);

cudaError_t launch_forward(const ForwardParams& params, const ForwardConfig& config, cudaStream_t stream);

}  // namespace flamia::sm90
