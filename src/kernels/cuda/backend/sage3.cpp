// SPDX-License-Identifier: Apache-2.0
// The form of sage3: memory, quantising, what the kernel is told.
#include "kernels/cuda/sm90/sage3/sage3.hpp"

#include <algorithm>

#include "kernels/cuda/backend/forward_call.hpp"
#include "kernels/cuda/backend/kernel_problem.hpp"
#include "kernels/cuda/backend/pieces.hpp"
#include "kernels/cuda/dense_strides.hpp"

namespace flamia::cuda {

ForwardMemory sage3_memory(const Problem& problem, const schedule::gpu::Shape& shape, void* base) {
  const std::int64_t slots = slots_of(problem), query_slots = slots * problem.query_heads, key_slots = slots * problem.key_heads;
  Pieces workspace(base);
  ForwardMemory memory;
  Sage3Memory& own = memory.sage3;
  for (const auto& [operand, heads_slots] : {std::pair{&own.query, query_slots}, {&own.key, key_slots}, {&own.value, key_slots}}) {
    operand->halves = workspace.take<std::uint16_t>(heads_slots * problem.head_dim);
    operand->flags = workspace.take<std::uint8_t>(heads_slots);
  }
  own.query_means = workspace.take<float>(query_slots / sm90::kSlotAlign * problem.head_dim);
  own.key_means = workspace.take<float>(std::max<std::int64_t>(problem.documents, 1) * problem.key_heads * problem.head_dim);
  own.mean_scores = workspace.take<float>(query_slots);
  memory.schedule = workspace.take<std::byte>(static_cast<std::int64_t>(schedule::gpu::workspace_bytes(shape)));
  memory.workspace_bytes = workspace.bytes();
  return memory;
}

Status ForwardCall::quantise_sage3() const {
  quantize::gpu::Sage3Params params;
  params.q = tensors_.q;
  params.k = tensors_.k;
  params.v = tensors_.v;
  params.query_heads = problem_.query_heads;
  params.key_heads = problem_.key_heads;
  params.head_dim = problem_.head_dim;
  params.softmax_scale = problem_.scale;
  params.query = memory_.sage3.query;
  params.key = memory_.sage3.key;
  params.value = memory_.sage3.value;
  params.query_means = memory_.sage3.query_means;
  params.key_means = memory_.sage3.key_means;
  params.mean_scores = memory_.sage3.mean_scores;
  params.slots = slots_;
  params.document_capacity = problem_.documents;
  params.item_capacity = schedule_.forward_capacity;
  params.documents = schedule_.documents;
  params.items = schedule_.forward;
  params.totals = schedule_.totals;
  return quantize::gpu::launch_sage3(params, stream_);
}

sm90::sage3::Params ForwardCall::sage3_params() const {
  const Sage3Memory& own = memory_.sage3;
  sm90::sage3::Params params;
  params.queries = own.query.halves;
  params.keys = own.key.halves;
  params.values = own.value.halves;
  params.query_flags = own.query.flags;
  params.key_flags = own.key.flags;
  params.value_flags = own.value.flags;
  params.query_means = own.query_means;
  params.key_means = own.key_means;
  params.mean_scores = own.mean_scores;
  params.key_rows = tensors_.k;
  fill_dense_strides(params.key_rows, problem_.key_heads, problem_.head_dim);
  params.documents = schedule_.documents;
  params.items = schedule_.forward;
  params.item_count = &schedule_.totals->forward.items;
  params.output = tensors_.o.data;
  params.lse = tensors_.lse;
  fill_problem(params, problem_);
  params.causal = problem_.mask.causal || problem_.mask.right == 0;
  params.first_level = form_.first_level;
  return params;
}

}  // namespace flamia::cuda
