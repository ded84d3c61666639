// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/backend/forward_call.hpp"

#include <string>

#include "kernels/cuda/backend/kernel_problem.hpp"
#include "kernels/cuda/device_status.hpp"
#include "schedule/cuda/clear.hpp"

namespace flamia::cuda {
namespace {

/// More than half of the L2 cache for the keys and values of the heads that are worked on together; queries and outputs stream through the rest.
constexpr std::int64_t kL2Share = 36 << 20;

}  // namespace

bool is_dense(const MutableTensorView& tensor, int heads, int head_dim) {
  const std::int64_t head = head_dim;
  return (tensor.head_stride == 0 || tensor.head_stride == head) &&
         (tensor.token_stride == 0 || tensor.token_stride == head * heads);
}

ForwardCall::ForwardCall(const Plan& plan, const ForwardTensors& tensors, void* saved, void* workspace, cudaStream_t stream)
    : problem_(plan.problem()),
      training_(plan.options().training),
      tensors_(tensors),
      stream_(stream),
      form_(hopper_form(plan.recipe(), training_)),
      memory_(forward_memory(problem_, form_, plan.options(), saved, workspace)),
      slots_(slots_of(problem_)),
      shape_(schedule_shape(problem_, form_, training_)),
      schedule_(schedule::gpu::view(shape_, memory_.schedule)) {}

Status ForwardCall::check() const {
  if (tensors_.o.dtype != DType::bf16)
    return Status::unsupported("o is F32; on a GPU the forward pass writes BF16: pass a BF16 tensor");
  if (tensors_.q.dtype == DType::f32)
    return Status::unsupported("q, k and v are F32; on a GPU they must be BF16 or F16: cast them first");
  if (!is_dense(tensors_.o, problem_.query_heads, problem_.head_dim))
    return Status::unsupported("o is strided; on a GPU it must be dense [tokens][query_heads][head_dim]");
  return {};
}

Status ForwardCall::schedule() const { return schedule::gpu::launch(shape_, tensors_.cu_seqlens, memory_.schedule, stream_); }

quantize::gpu::QuantiseParams ForwardCall::quantised_operand(const TensorView& input, int heads, const OperandForm& form,
                                                             bool rotate, const OperandMemory& memory) const {
  quantize::gpu::QuantiseParams params;
  params.input = input;
  params.heads = heads;
  params.head_dim = problem_.head_dim;
  params.rotate = rotate;
  params.group = form.group;
  params.prefix = prefix_of(form, memory.prefix_exponents != nullptr);
  params.headroom = form.headroom;
  params.rows = memory.rows;
  params.rows16 = memory.rows16;
  params.transposed = memory.transposed;
  params.order = sm90::TokenOrder::pi;
  params.exponents = memory.exponents;
  params.prefix_exponents = memory.prefix_exponents;
  params.nvfp4 = memory.nvfp4;
  params.slots = slots_;
  params.blocks = schedule_.blocks;
  params.block_capacity = schedule_.block_capacity;
  params.scratch = memory_.scratch;
  return params;
}

Status ForwardCall::quantise() const {
  if (form_.int8) return quantise_int8();
  if (form_.sage3) return quantise_sage3();
  const quantize::gpu::QuantiseParams operands[] = {
      quantised_operand(tensors_.q, problem_.query_heads, form_.q, form_.rotate, memory_.q),
      quantised_operand(tensors_.k, problem_.key_heads, form_.k, form_.rotate, memory_.k),
      quantised_operand(tensors_.v, problem_.key_heads, form_.v, false, memory_.v),
  };
  return quantize::gpu::launch_quantise(operands, stream_);
}

sm90::ForwardConfig ForwardCall::config() const { return forward_config(problem_, form_); }

sm90::ForwardParams ForwardCall::params() const {
  sm90::ForwardParams params;
  const auto codes = [&](const OperandMemory& m) {
    return form_.nvfp4 ? reinterpret_cast<const std::uint8_t*>(m.nvfp4.halves) : m.rows;
  };
  const auto exponents = [&](const OperandMemory& m) { return form_.nvfp4 ? m.nvfp4.exponents : m.exponents; };
  params.query_codes = codes(memory_.q);
  params.key_codes = codes(memory_.k);
  params.value_codes = memory_.v.transposed;
  params.query_exponents = exponents(memory_.q);
  params.key_exponents = exponents(memory_.k);
  params.value_exponents = memory_.v.exponents;
  params.documents = schedule_.documents;
  params.items = schedule_.forward;
  params.item_count = &schedule_.totals->forward.items;
  params.counter = schedule_.counters;
  params.output = tensors_.o.data;
  params.lse = tensors_.lse;
  params.row_reference = memory_.row_reference;
  params.row_sum = memory_.row_sum;
  params.value_blocks = form_.nvfp4 && form_.v.group == quantize::gpu::Group::block;
  fill_problem(params, problem_);
  params.heads_per_group = sm90::heads_per_group(config(), slots_, problem_.query_heads, problem_.key_heads, kL2Share);
  return params;
}

Status ForwardCall::attend() const {
  schedule::gpu::ClearParams clear;
  clear.tensors[0] = {tensors_.o, problem_.query_heads};
  clear.lse = tensors_.lse;
  clear.head_dim = problem_.head_dim;
  clear.tokens = problem_.tokens;
  if (Status s = schedule::gpu::launch_clear_uncovered(clear, schedule_.totals, stream_); !s.ok()) return s;
  if (form_.int8) return device_status(sm90::int8::launch_forward(int8_params(), stream_), "INT8 forward kernel");
  if (form_.sage3) return device_status(sm90::sage3::launch(sage3_params(), stream_), "sage3 kernel");
  sm90::ForwardParams forward = params();
  forward.beside_previous = true;  // rows outside the documents
  return device_status(sm90::launch_forward(forward, config(), stream_), "forward kernel");
}

}  // namespace flamia::cuda
