// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/backend/backward_call.hpp"

#include <string>
#include <tuple>
#include <utility>

#include "kernels/cuda/backend/forward_call.hpp"
#include "kernels/cuda/backend/kernel_problem.hpp"
#include "kernels/cuda/device_status.hpp"
#include "quantize/cuda/dequantise.hpp"
#include "quantize/cuda/expand_nvfp4.hpp"
#include "quantize/cuda/gradient.hpp"
#include "schedule/cuda/clear.hpp"

namespace flamia::cuda {
namespace {

/// About half of the L2 cache for the queries and gradients of the heads that are worked on together; keys and sums of dQ take the rest.
constexpr std::int64_t kL2Share = 24 << 20;

/// `saved` is only read, but the layout is the forward pass's, which writes it.
ForwardMemory saved_memory(const Plan& plan, const HopperForm& form, const void* saved) {
  return forward_memory(plan.problem(), form, plan.options(), const_cast<void*>(saved), nullptr);
}

}  // namespace

BackwardCall::BackwardCall(const Plan& plan, const BackwardTensors& tensors, const void* saved, void* workspace,
                           cudaStream_t stream)
    : problem_(plan.problem()),
      options_(plan.options()),
      tensors_(tensors),
      stream_(stream),
      form_(hopper_form(plan.recipe(), true)),
      saved_(saved_memory(plan, form_, saved)),
      memory_(backward_memory(problem_, form_, options_, workspace)),
      slots_(slots_of(problem_)),
      shape_(schedule_shape(problem_, form_, true)),
      schedule_(schedule::gpu::view(shape_, saved_.schedule)) {}

Status BackwardCall::check() const {
  if (tensors_.d_o.dtype == DType::f32) return Status::unsupported("d_o is F32; on a GPU it must be BF16 or F16: cast it first");
  if (tensors_.o.dtype == DType::f16)
    return Status::unsupported("o is F16; on a GPU it must be what the forward pass wrote, BF16, or F32");
  for (const auto& [name, tensor] : {std::pair{"o", &tensors_.o}, {"d_o", &tensors_.d_o}})
    if (reinterpret_cast<std::uintptr_t>(tensor->data) % 16 != 0 || tensor->token_stride % 8 != 0 || tensor->head_stride % 8 != 0)
      return Status::unsupported(
          std::string(name) +
          " is not aligned to 16 bytes or has strides that are no multiple of 8 elements, which a GPU needs; "
          "copy it");
  for (const auto& [name, tensor, heads] : {std::tuple{"d_q", &tensors_.d_q, problem_.query_heads},
                                            {"d_k", &tensors_.d_k, problem_.key_heads},
                                            {"d_v", &tensors_.d_v, problem_.key_heads}}) {
    if (!is_dense(*tensor, heads, problem_.head_dim))
      return Status::unsupported(std::string(name) + " is strided; on a GPU it must be dense [tokens][heads][head_dim]");
    if (tensor->dtype != tensors_.d_q.dtype)
      return Status::unsupported(std::string(name) + ".dtype differs from d_q.dtype; on a GPU all gradients have one dtype");
    if (reinterpret_cast<std::uintptr_t>(tensor->data) % 16 != 0)
      return Status::unsupported(std::string(name) + " is not aligned to 16 bytes, which a GPU needs");
  }
  return {};
}

Status BackwardCall::schedule() const {
  return device_status(cudaMemsetAsync(memory_.counters, 0, schedule::gpu::kCounters * sizeof(std::int32_t), stream_),
                       "counters of the schedule");
}

Status BackwardCall::quantise() const {
  if (form_.int8) return quantise_int8();
  quantize::gpu::GradientParams params;
  params.d_o = tensors_.d_o;
  params.o = tensors_.o;
  params.heads = problem_.query_heads;
  params.key_heads = problem_.key_heads;
  params.head_dim = problem_.head_dim;
  params.group = form_.d_out.group;
  params.row_sum = saved_.row_sum;
  params.reach = shape_.reach;
  params.rows = memory_.d_out.rows;
  params.transposed = memory_.d_out.transposed;
  params.exponents = memory_.d_out.exponents;
  params.d_prime = memory_.d_prime;
  // one exponent for the whole tensor is its own prefix maximum
  params.key_prefix = saved_.k.prefix_exponents != nullptr ? saved_.k.prefix_exponents : saved_.k.exponents;
  params.value_prefix = saved_.v.prefix_exponents != nullptr ? saved_.v.prefix_exponents : saved_.v.exponents;
  params.dq_exponent = memory_.dq_exponent;
  params.dq_accumulator = memory_.dq_partials;
  if (form_.ds == sm90::DsFormat::bf16) params.dq_untouched_tokens = sm90::kOneBlockTokens;
  params.dq_accumulator_bytes = form_.partials == sm90::PartialFormat::f16 ? 2 : 4;
  params.slots = slots_;
  params.blocks = schedule_.blocks;
  params.block_capacity = schedule_.block_capacity;
  params.scratch = memory_.scratch;
  if (Status s = quantize::gpu::launch_gradient(params, stream_); !s.ok()) return s;
  if (form_.ds != sm90::DsFormat::bf16) return {};
  return memory_.key_scores != nullptr ? expand_nvfp4() : Status();
}

Status BackwardCall::dequantise() const {
  quantize::gpu::DequantiseParams params;
  if (memory_.query16 != nullptr) params.operands[0] = {saved_.q.rows, saved_.q.exponents, memory_.query16, problem_.query_heads};
  if (memory_.key16 != nullptr) params.operands[1] = {saved_.k.rows, saved_.k.exponents, memory_.key16, problem_.key_heads};
  params.head_dim = problem_.head_dim;
  params.slots = slots_;
  params.used_slots = &schedule_.totals->slots;
  return quantize::gpu::launch_dequantise(params, stream_);
}

Status BackwardCall::expand_nvfp4() const {
  quantize::gpu::ExpandNvfp4Params params;
  params.codes = saved_.k.nvfp4.codes;
  params.scales = saved_.k.nvfp4.scales;
  params.halves = memory_.key_scores;
  params.heads = problem_.key_heads;
  params.head_dim = problem_.head_dim;
  params.slots = slots_;
  params.used_slots = &schedule_.totals->slots;
  return quantize::gpu::launch_expand_nvfp4(params, stream_);
}

sm90::BackwardConfig BackwardCall::config() const {
  sm90::BackwardConfig config = backward_config(problem_, form_, options_);
  config.gradients = tensors_.d_q.dtype == DType::f32 ? sm90::GradientFormat::f32 : sm90::GradientFormat::bf16;
  return config;
}

sm90::BackwardParams BackwardCall::params() const {
  sm90::BackwardParams params;
  const auto scores = [&](const OperandMemory& m, const std::uint16_t* values) {
    return form_.nvfp4 ? reinterpret_cast<const std::uint8_t*>(values) : m.rows;
  };
  params.query_rows = scores(saved_.q, saved_.q.nvfp4.halves);
  params.query_rows16 = form_.nvfp4 ? saved_.q.rows16 : memory_.query16;
  params.query_transposed = saved_.q.transposed;
  params.key_rows = scores(saved_.k, memory_.key_scores);
  params.key_rows16 = memory_.key16;
  if (form_.nvfp4) {
    params.key_codes = saved_.k.rows;
    params.key_nvfp4 = saved_.k.nvfp4.codes;
    params.key_scales = saved_.k.nvfp4.scales;
  }
  params.key_transposed = saved_.k.transposed;
  params.value_rows = saved_.v.rows;
  params.gradient_rows = memory_.d_out.rows;
  params.gradient_transposed = memory_.d_out.transposed;
  params.query_exponents = saved_.q.exponents;
  params.gradient_exponents = memory_.d_out.exponents;
  params.key_exponents = saved_.k.exponents;
  params.value_exponents = saved_.v.exponents;
  params.row_reference = saved_.row_reference;
  params.d_prime = memory_.d_prime;
  params.dq_exponent = memory_.dq_exponent;
  params.documents = schedule_.documents;
  params.items = schedule_.backward;
  params.item_count = &schedule_.totals->backward.items;
  params.used_slots = &schedule_.totals->slots;
  params.counter = memory_.counters;
  params.row_records = memory_.row_records;
  params.key_records = memory_.key_records;
  params.dq_partials = memory_.dq_partials;
  params.d_query = tensors_.d_q.data;
  params.d_key = tensors_.d_k.data;
  params.d_value = tensors_.d_v.data;
  fill_problem(params, problem_);
  params.heads_per_group = sm90::backward_heads_per_group(config(), slots_, problem_.query_heads, problem_.key_heads, kL2Share);
  return params;
}

Status BackwardCall::differentiate() const {
  schedule::gpu::ClearParams clear;
  clear.tensors[0] = {tensors_.d_q, problem_.query_heads};
  clear.tensors[1] = {tensors_.d_k, problem_.key_heads};
  clear.tensors[2] = {tensors_.d_v, problem_.key_heads};
  clear.head_dim = problem_.head_dim;
  clear.tokens = problem_.tokens;
  if (Status s = schedule::gpu::launch_clear_uncovered(clear, schedule_.totals, stream_); !s.ok()) return s;
  if (form_.int8) return device_status(sm90::int8::launch_backward(int8_params(), stream_), "INT8 backward kernels");
  return run(params(), config());
}

Status BackwardCall::run(const sm90::BackwardParams& params, const sm90::BackwardConfig& config) const {
  const auto status = [](cudaError_t error) { return device_status(error, "backward kernels"); };
  if (Status s = status(sm90::launch_backward_prepare(params, config, stream_)); !s.ok()) return s;
  if (memory_.query16 != nullptr || memory_.key16 != nullptr)
    if (Status s = dequantise(); !s.ok()) return s;
  return status(sm90::launch_backward_prepared(params, config, stream_));
}

}  // namespace flamia::cuda
