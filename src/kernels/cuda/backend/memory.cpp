// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/backend/memory.hpp"

#include <algorithm>

#include "kernels/cuda/backend/pieces.hpp"
#include "kernels/cuda/sm90/sage3/sage3.hpp"

namespace flamia::cuda {
std::int64_t slots_of(const Problem& problem) { return sm90::slot_capacity(problem.tokens, problem.documents); }

quantize::gpu::Prefix prefix_of(const OperandForm& form, bool wanted) {
  if (form.sticky) return quantize::gpu::Prefix::sticky;
  return wanted ? quantize::gpu::Prefix::record : quantize::gpu::Prefix::none;
}

sm90::ForwardConfig forward_config(const Problem& problem, const HopperForm& form) {
  sm90::ForwardConfig config;
  config.head_dim = problem.head_dim;
  config.scale_group = form.scale_group;
  config.reference = form.reference;
  return config;
}

int forward_tile(const Problem& problem, const HopperForm& form) {
  return form.sage3 ? sm90::sage3::kTile : sm90::query_tile(forward_config(problem, form));
}

schedule::gpu::Shape schedule_shape(const Problem& problem, const HopperForm& form, bool training) {
  schedule::gpu::Shape shape;
  shape.tokens = problem.tokens;
  shape.documents = problem.documents;
  shape.reach = schedule::reach_of(problem.mask.causal, problem.mask.left, problem.mask.right);
  shape.forward_tile = forward_tile(problem, form);
  if (training) shape.backward_tile = sm90::kKeyTile;
  return shape;
}

sm90::BackwardConfig backward_config(const Problem& problem, const HopperForm& form, const PlanOptions& options) {
  sm90::BackwardConfig config;
  config.head_dim = problem.head_dim;
  config.scale_group = form.gradient_scale_group;
  config.ds = form.ds;
  config.partials = form.partials;
  config.deterministic = options.deterministic;
  config.rotated = form.rotate;
  return config;
}

BackwardMemory backward_memory(const Problem& problem, const HopperForm& form, const PlanOptions& options, void* base) {
  if (form.int8) return int8_backward_memory(problem, base);
  const std::int64_t slots = slots_of(problem), query_slots = slots * problem.query_heads, key_slots = slots * problem.key_heads;
  const sm90::BackwardScratch scratch = sm90::backward_scratch(slots, problem.query_heads, problem.key_heads);
  const auto bytes = [](std::size_t n) { return static_cast<std::int64_t>(n); };
  Pieces workspace(base);
  BackwardMemory memory;
  memory.d_out.rows = workspace.take<std::uint8_t>(query_slots * problem.head_dim);
  memory.d_out.transposed = workspace.take<std::uint8_t>(query_slots * problem.head_dim);
  memory.d_out.exponents = workspace.take<std::uint8_t>(query_slots);
  memory.d_prime = workspace.take<float>(query_slots);
  if (form.ds == sm90::DsFormat::bf16) {
    if (!form.nvfp4) memory.query16 = workspace.take<std::uint16_t>(query_slots * problem.head_dim);
    if (options.deterministic) memory.key16 = workspace.take<std::uint16_t>(key_slots * problem.head_dim);
  }
  if (form.nvfp4 && options.deterministic) {
    memory.key_scores = workspace.take<std::uint16_t>(key_slots * problem.head_dim);
  }
  const bool scaled = form.partials == sm90::PartialFormat::f16;
  if (!options.deterministic) {
    if (scaled) memory.dq_exponent = workspace.take<std::int16_t>(query_slots);
    memory.dq_partials = workspace.take<std::byte>(query_slots * problem.head_dim * (scaled ? 2 : 4));
  }
  memory.row_records = workspace.take<std::byte>(bytes(scratch.row_records));
  memory.key_records = workspace.take<std::byte>(bytes(scratch.key_records));
  memory.counters = workspace.take<std::int32_t>(schedule::gpu::kCounters);
  memory.scratch = workspace.take<std::uint32_t>(1);
  memory.workspace_bytes = workspace.bytes();
  return memory;
}

ForwardMemory forward_memory(const Problem& problem, const HopperForm& form, const PlanOptions& options, void* saved_base,
                             void* workspace_base) {
  if (form.int8) return int8_forward_memory(problem, form, options, saved_base, workspace_base);
  if (form.sage3) return sage3_memory(problem, schedule_shape(problem, form, false), workspace_base);
  const std::int64_t slots = slots_of(problem);
  const std::int64_t query_slots = slots * problem.query_heads, key_slots = slots * problem.key_heads;
  Pieces saved(saved_base), workspace(workspace_base);
  Pieces& kept = options.training ? saved : workspace;

  ForwardMemory memory;
  for (const auto& [operand, heads_slots] : {std::pair{&memory.q, query_slots}, {&memory.k, key_slots}}) {
    const bool values_kept =
        options.training && operand == &memory.q;  // the other way is a pass over Q, K's is shorter with grouped heads
    if (form.nvfp4) {
      operand->nvfp4.halves = (values_kept ? saved : workspace).take<std::uint16_t>(heads_slots * problem.head_dim);
      operand->nvfp4.exponents = workspace.take<std::uint8_t>(heads_slots);
      if (values_kept) {
        operand->rows16 = saved.take<std::uint16_t>(heads_slots * problem.head_dim);
      } else if (options.training) {
        operand->nvfp4.codes = saved.take<std::uint8_t>(heads_slots * problem.head_dim / 2);
        operand->nvfp4.scales = saved.take<std::uint8_t>(heads_slots * problem.head_dim / 16);
        operand->rows = saved.take<std::uint8_t>(heads_slots * problem.head_dim);
      }
    } else {
      operand->rows = kept.take<std::uint8_t>(heads_slots * problem.head_dim);
    }
    operand->exponents = kept.take<std::uint8_t>(heads_slots);
  }
  memory.v.transposed = workspace.take<std::uint8_t>(key_slots * problem.head_dim);
  memory.v.exponents = kept.take<std::uint8_t>(key_slots);
  if (options.training) {
    if (form.ds == sm90::DsFormat::e4m3) {
      memory.q.transposed = saved.take<std::uint8_t>(query_slots * problem.head_dim);
      memory.k.transposed = saved.take<std::uint8_t>(key_slots * problem.head_dim);
    }
    memory.v.rows = saved.take<std::uint8_t>(key_slots * problem.head_dim);
    // one exponent for the whole tensor is its own prefix maximum
    if (form.k.group != quantize::gpu::Group::tensor) memory.k.prefix_exponents = saved.take<std::uint8_t>(key_slots);
    if (form.v.group != quantize::gpu::Group::tensor) memory.v.prefix_exponents = saved.take<std::uint8_t>(key_slots);
    memory.row_reference = saved.take<float>(query_slots);
    memory.row_sum = saved.take<float>(query_slots);
  }
  const schedule::gpu::Shape shape = schedule_shape(problem, form, options.training);
  memory.schedule = kept.take<std::byte>(static_cast<std::int64_t>(schedule::gpu::workspace_bytes(shape)));

  quantize::gpu::QuantiseParams operands[3];
  int count = 0;
  for (const auto& [operand, heads] :
       {std::pair{&form.q, problem.query_heads}, {&form.k, problem.key_heads}, {&form.v, problem.key_heads}}) {
    quantize::gpu::QuantiseParams& params = operands[count++];
    params.heads = heads;
    params.group = operand->group;
    params.prefix = prefix_of(*operand, options.training && operand != &form.q && operand->group != quantize::gpu::Group::tensor);
    params.slots = slots;
  }
  const std::size_t scratch = quantize::gpu::scratch_bytes(operands);
  memory.scratch = workspace.take<std::uint32_t>(static_cast<std::int64_t>((scratch + 3) / 4));
  memory.saved_bytes = saved.bytes();
  memory.workspace_bytes = workspace.bytes();
  return memory;
}

}  // namespace flamia::cuda
