// SPDX-License-Identifier: Apache-2.0
// How the caller's `saved` and `workspace` are divided. Sizes follow from the problem's bounds alone; lengths are not known here.
#pragma once
#include <cstddef>
#include <cstdint>

#include "flamia/attention.hpp"
#include "kernels/cuda/backend/form.hpp"
#include "quantize/cuda/sage3.hpp"
#include "schedule/cuda/schedule.hpp"

namespace flamia::cuda {

/// Codes and exponents of one operand; layouts of sm90/layout.hpp. Null: this call does not need it.
struct OperandMemory {
  std::uint8_t* rows = nullptr;
  std::uint16_t* rows16 = nullptr;  // the codes' values in BF16
  std::uint8_t* transposed = nullptr;
  std::uint8_t* exponents = nullptr;         // [heads][slots]
  std::uint8_t* prefix_exponents = nullptr;  // [heads][slots]
  quantize::gpu::Nvfp4Outputs nvfp4;
};

/// INT8 codes and scales of one operand (sm90/int8/int8.hpp), and its values in BF16.
struct Int8Memory {
  std::uint8_t* rows = nullptr;
  std::uint8_t* transposed = nullptr;
  std::uint16_t* rows16 = nullptr;
  float* scales = nullptr;  // [heads][slots / 16]
};

/// What `sage3` computes with: a call that does not train, all of it workspace.
struct Sage3Memory {
  quantize::gpu::SmoothedOutputs query, key, value;
  float* query_means = nullptr;
  float* key_means = nullptr;
  float* mean_scores = nullptr;
};

/// Everything the forward pass computes with. When training, what the backward pass reads again lies in `saved`, the rest in
/// `workspace`; without training all of it is workspace.
struct ForwardMemory {
  OperandMemory q, k, v;
  Int8Memory q8, k8, v8;            // instead, for INT8
  float* key_means = nullptr;       // INT8, of documents: quantize::gpu::mean_offset
  float* key_mean_score = nullptr;  // INT8, [query_heads][slots]
  Sage3Memory sage3;                // instead, for sage3
  float* row_reference = nullptr;   // m, [query_heads][slots]
  float* row_sum = nullptr;         // l
  void* schedule = nullptr;         // of both passes when training
  std::uint32_t* scratch = nullptr;
  std::size_t saved_bytes = 0;
  std::size_t workspace_bytes = 0;
};

/// With null bases only the sizes are meaningful.
ForwardMemory forward_memory(const Problem& problem, const HopperForm& form, const PlanOptions& options, void* saved,
                             void* workspace);

/// What the backward pass works in, all of it workspace.
struct BackwardMemory {
  OperandMemory d_out;
  Int8Memory d_out8;                    // instead, for INT8
  float* row_lse = nullptr;             // INT8: m + log2 l, [query_heads][slots]
  std::uint16_t* d_parts = nullptr;     // INT8: -D in three parts, [query_heads][slots][8]
  std::uint16_t* query16 = nullptr;     // Q as BF16 values, rows16; null unless dS is BF16, and where they are saved
  std::uint16_t* key16 = nullptr;       // the same of K, in deterministic mode
  std::uint16_t* key_scores = nullptr;  // K of NVFP4 scores as FP16 values, rows_f16 (Q's are saved), in deterministic mode
  float* d_prime = nullptr;             // D', [query_heads][slots]
  std::int16_t* dq_exponent = nullptr;  // z; null where dQ is summed in FP32 or not in memory
  void* dq_partials = nullptr;          // null in deterministic mode: dQ is summed in registers
  void* row_records = nullptr;
  void* key_records = nullptr;
  std::int32_t* counters = nullptr;  // the schedule's own are in `saved`, which is only read
  std::uint32_t* scratch = nullptr;
  std::size_t workspace_bytes = 0;
};
BackwardMemory backward_memory(const Problem& problem, const HopperForm& form, const PlanOptions& options, void* workspace);

/// The same for INT8.
ForwardMemory int8_forward_memory(const Problem& problem, const HopperForm& form, const PlanOptions& options, void* saved,
                                  void* workspace);
BackwardMemory int8_backward_memory(const Problem& problem, void* workspace);
/// The same for sage3, whose calls do not train.
ForwardMemory sage3_memory(const Problem& problem, const schedule::gpu::Shape& shape, void* workspace);

/// What the quantiser does about prefix maxima; `wanted`: the backward pass reads them.
quantize::gpu::Prefix prefix_of(const OperandForm& form, bool wanted);

std::int64_t slots_of(const Problem& problem);
/// Queries of an item of the forward list.
int forward_tile(const Problem& problem, const HopperForm& form);
/// One schedule serves both passes of a training call.
schedule::gpu::Shape schedule_shape(const Problem& problem, const HopperForm& form, bool training);
sm90::ForwardConfig forward_config(const Problem& problem, const HopperForm& form);
/// Gradients in BF16; a call that wants F32 says so.
sm90::BackwardConfig backward_config(const Problem& problem, const HopperForm& form, const PlanOptions& options);

}  // namespace flamia::cuda
