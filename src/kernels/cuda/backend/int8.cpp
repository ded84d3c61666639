// SPDX-License-Identifier: Apache-2.0
// The INT8 form of both calls (recipe `sagebwd`): memory, quantising, what the kernels are told.
#include "quantize/cuda/int8.hpp"

#include <algorithm>

#include "kernels/cuda/backend/backward_call.hpp"
#include "kernels/cuda/backend/forward_call.hpp"
#include "kernels/cuda/backend/kernel_problem.hpp"
#include "kernels/cuda/backend/pieces.hpp"

namespace flamia::cuda {
namespace {

using quantize::gpu::Int8Params;

/// About half of the L2 cache for what the heads that are worked on together stream.
constexpr std::int64_t kL2Share = 30 << 20;

/// Key heads whose operands, `bytes` a slot and channel, fit.
int key_heads_per_group(const Problem& problem, std::int64_t bytes) {
  const std::int64_t of_head = std::max<std::int64_t>(bytes * slots_of(problem) * problem.head_dim, 1);
  return static_cast<int>(std::clamp<std::int64_t>(kL2Share / of_head, 1, problem.key_heads));
}

sm90::int8::Operand operand(const Int8Memory& memory) { return {memory.rows, memory.transposed, memory.scales}; }

Int8Params quantiser(const TensorView& input, int heads, const Problem& problem, const Int8Memory& memory,
                     const schedule::gpu::View& schedule) {
  Int8Params made;
  made.input = input;
  made.heads = heads;
  made.head_dim = problem.head_dim;
  made.rows = memory.rows;
  made.transposed = memory.transposed;
  made.rows16 = memory.rows16;
  made.scales = memory.scales;
  made.slots = slots_of(problem);
  made.blocks = schedule.blocks;
  made.block_capacity = schedule.block_capacity;
  return made;
}

}  // namespace

ForwardMemory int8_forward_memory(const Problem& problem, const HopperForm& form, const PlanOptions& options, void* saved_base,
                                  void* workspace_base) {
  const std::int64_t slots = slots_of(problem), groups = slots / sm90::int8::kScaleSlots;
  const std::int64_t query_slots = slots * problem.query_heads, key_slots = slots * problem.key_heads;
  const int d = problem.head_dim;
  Pieces saved(saved_base), workspace(workspace_base);
  Pieces& kept = options.training ? saved : workspace;
  ForwardMemory memory;
  memory.q8.rows = kept.take<std::uint8_t>(query_slots * d);
  memory.q8.scales = kept.take<float>(groups * problem.query_heads);
  memory.k8.rows = kept.take<std::uint8_t>(key_slots * d);
  memory.k8.scales = kept.take<float>(groups * problem.key_heads);
  memory.v8.transposed = workspace.take<std::uint8_t>(key_slots * d);
  memory.v8.scales = workspace.take<float>(groups * problem.key_heads);
  if (form.smooth_keys) {
    memory.key_means = workspace.take<float>(groups * problem.key_heads * d);
    memory.key_mean_score = workspace.take<float>(query_slots);
  }
  if (options.training) {
    memory.q8.transposed = saved.take<std::uint8_t>(query_slots * d);
    memory.k8.transposed = saved.take<std::uint8_t>(key_slots * d);
    memory.v8.rows16 = saved.take<std::uint16_t>(key_slots * d);
    memory.row_reference = saved.take<float>(query_slots);
    memory.row_sum = saved.take<float>(query_slots);
  }
  memory.schedule = kept.take<std::byte>(
      static_cast<std::int64_t>(schedule::gpu::workspace_bytes(schedule_shape(problem, form, options.training))));
  memory.saved_bytes = saved.bytes();
  memory.workspace_bytes = workspace.bytes();
  return memory;
}

BackwardMemory int8_backward_memory(const Problem& problem, void* base) {
  const std::int64_t slots = slots_of(problem), query_slots = slots * problem.query_heads;
  Pieces workspace(base);
  BackwardMemory memory;
  memory.d_out8.transposed = workspace.take<std::uint8_t>(query_slots * problem.head_dim);
  memory.d_out8.rows16 = workspace.take<std::uint16_t>(query_slots * problem.head_dim);
  memory.d_out8.scales = workspace.take<float>(slots / sm90::int8::kScaleSlots * problem.query_heads);
  memory.d_parts = workspace.take<std::uint16_t>(8 * query_slots);
  memory.row_lse = workspace.take<float>(query_slots);
  memory.counters = workspace.take<std::int32_t>(schedule::gpu::kCounters);
  memory.workspace_bytes = workspace.bytes();
  return memory;
}

Status ForwardCall::quantise_int8() const {
  Int8Params q = quantiser(tensors_.q, problem_.query_heads, problem_, memory_.q8, schedule_);
  Int8Params k = quantiser(tensors_.k, problem_.key_heads, problem_, memory_.k8, schedule_);
  Int8Params v = quantiser(tensors_.v, problem_.key_heads, problem_, memory_.v8, schedule_);
  v.decoded = true;
  if (form_.smooth_keys) {
    quantize::gpu::MeanParams means;
    means.input = tensors_.k;
    means.heads = problem_.key_heads;
    means.head_dim = problem_.head_dim;
    means.slots = slots_;
    means.documents = schedule_.documents;
    means.document_capacity = problem_.documents;
    means.means = memory_.key_means;
    if (Status s = quantize::gpu::launch_means(means, stream_); !s.ok()) return s;
    k.means = memory_.key_means;
    q.key_means = memory_.key_means;
    q.key_heads = problem_.key_heads;
    q.key_mean_score = memory_.key_mean_score;
  }
  if (Status s = quantize::gpu::launch_int8(q, stream_); !s.ok()) return s;
  if (Status s = quantize::gpu::launch_int8(k, stream_); !s.ok()) return s;
  return quantize::gpu::launch_int8(v, stream_);
}

sm90::int8::ForwardParams ForwardCall::int8_params() const {
  sm90::int8::ForwardParams params;
  fill_problem(params, problem_);
  params.documents = schedule_.documents;
  params.counter = schedule_.counters;
  params.key_heads_per_group = key_heads_per_group(problem_, 2);
  params.query = operand(memory_.q8);
  params.key = operand(memory_.k8);
  params.value = operand(memory_.v8);
  params.key_mean_score = memory_.key_mean_score;
  params.items = schedule_.forward;
  params.item_count = &schedule_.totals->forward.items;
  params.output = tensors_.o.data;
  params.lse = tensors_.lse;
  params.row_reference = memory_.row_reference;
  params.row_sum = memory_.row_sum;
  return params;
}

Status BackwardCall::quantise_int8() const {
  Int8Params params = quantiser(tensors_.d_o, problem_.query_heads, problem_, memory_.d_out8, schedule_);
  params.output = tensors_.o;
  params.row_reference = saved_.row_reference;
  params.row_sum = saved_.row_sum;
  params.row_d = memory_.d_parts;
  params.row_lse = memory_.row_lse;
  return quantize::gpu::launch_int8(params, stream_);
}

sm90::int8::BackwardParams BackwardCall::int8_params() const {
  sm90::int8::BackwardParams params;
  fill_problem(params, problem_);
  params.documents = schedule_.documents;
  params.counter = memory_.counters;
  params.key_heads_per_group = key_heads_per_group(problem_, std::int64_t{5} * (problem_.query_heads / problem_.key_heads));
  params.query = operand(saved_.q8);
  params.key = operand(saved_.k8);
  params.gradient = operand(memory_.d_out8);
  params.value_rows16 = saved_.v8.rows16;
  params.gradient_rows16 = memory_.d_out8.rows16;
  params.row_lse = memory_.row_lse;
  params.row_d = memory_.d_parts;
  params.items = schedule_.backward;
  params.item_count = &schedule_.totals->backward.items;
  params.gradients = config().gradients;
  params.d_query = tensors_.d_q.data;
  params.d_key = tensors_.d_k.data;
  params.d_value = tensors_.d_v.data;
  return params;
}

}  // namespace flamia::cuda
