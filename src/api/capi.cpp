// SPDX-License-Identifier: Apache-2.0
#include "api/capi.hpp"
#include "flamia/health.hpp"

namespace flamia::capi {
namespace {

// The C API's numbers are the C++ API's.
static_assert(FLAMIA_OK == static_cast<int>(StatusCode::ok));
static_assert(FLAMIA_INVALID_ARGUMENT == static_cast<int>(StatusCode::invalid_argument));
static_assert(FLAMIA_UNSUPPORTED == static_cast<int>(StatusCode::unsupported));
static_assert(FLAMIA_OUT_OF_MEMORY == static_cast<int>(StatusCode::out_of_memory));
static_assert(FLAMIA_IO_ERROR == static_cast<int>(StatusCode::io_error));
static_assert(FLAMIA_DEVICE_ERROR == static_cast<int>(StatusCode::device_error));
static_assert(FLAMIA_F32 == static_cast<int>(DType::f32) && FLAMIA_F16 == static_cast<int>(DType::f16) &&
              FLAMIA_BF16 == static_cast<int>(DType::bf16));
static_assert(FLAMIA_CPU == static_cast<int>(Device::cpu) && FLAMIA_CUDA_DEVICE == static_cast<int>(Device::cuda));

// Sizes of the descriptors' first version (0.1.0), never to change.
constexpr std::size_t kProblemV1 = 64, kOptionsV1 = 24, kForwardV1 = 192, kBackwardV1 = 216;
static_assert(sizeof(void*) != 8 || (sizeof(flamia_problem) >= kProblemV1 && sizeof(flamia_plan_options) >= kOptionsV1 &&
                                     sizeof(flamia_forward_args) >= kForwardV1 && sizeof(flamia_backward_args) >= kBackwardV1));

Status check_flag(const char* name, std::int32_t value) {
  if (value == 0 || value == 1) return {};
  return Status::invalid(std::string(name) + " = " + std::to_string(value) + " but must be 0 or 1");
}

/// Fields that a later version may give a meaning.
Status check_reserved(const std::string& name, std::int32_t value) {
  if (value == 0) return {};
  return Status::unsupported(name + ".reserved = " + std::to_string(value) +
                             " but this version knows only 0; start from the FLAMIA_..._INIT macro");
}

Status read_problem(const flamia_problem* given, Problem* problem) {
  flamia_problem p = FLAMIA_PROBLEM_INIT;
  if (Status s = read_descriptor("problem", given, kProblemV1, &p); !s.ok()) return s;
  if (Status s = check_flag("problem.causal", p.causal); !s.ok()) return s;
  if (Status s = check_reserved("problem", p.reserved); !s.ok()) return s;
  *problem = {p.tokens, p.documents, p.query_heads, p.key_heads, p.head_dim, {p.causal == 1, p.window_left, p.window_right},
              p.scale};
  return {};
}

Status read_options(const flamia_plan_options* given, PlanOptions* options) {
  flamia_plan_options o = FLAMIA_PLAN_OPTIONS_INIT;
  if (given != nullptr)
    if (Status s = read_descriptor("options", given, kOptionsV1, &o); !s.ok()) return s;
  if (o.device != FLAMIA_CPU && o.device != FLAMIA_CUDA_DEVICE)
    return Status::invalid("options.device = " + std::to_string(o.device) +
                           " but must be FLAMIA_CPU (0) or FLAMIA_CUDA_DEVICE (1)");
  if (Status s = check_flag("options.deterministic", o.deterministic); !s.ok()) return s;
  if (Status s = check_flag("options.training", o.training); !s.ok()) return s;
  *options = {static_cast<Device>(o.device), o.threads, o.deterministic == 1, o.training == 1};
  return {};
}

Status read_dtype(const char* name, flamia_dtype given, DType* dtype) {
  if (given < FLAMIA_F32 || given > FLAMIA_BF16)
    return Status::invalid(std::string(name) + ".dtype = " + std::to_string(given) +
                           " but must be FLAMIA_F32 (0), FLAMIA_F16 (1) or FLAMIA_BF16 (2)");
  *dtype = static_cast<DType>(given);
  return {};
}

/// flamia_tensor or flamia_const_tensor.
template <class Tensor, class View>
Status read_tensor(const char* name, const Tensor& given, View* view) {
  if (Status s = check_reserved(name, given.reserved); !s.ok()) return s;
  view->data = given.data;
  view->token_stride = given.token_stride;
  view->head_stride = given.head_stride;
  return read_dtype(name, given.dtype, &view->dtype);
}

Status check_size(const char* name, std::size_t given, std::size_t needed) {
  if (given >= needed) return {};
  return Status::invalid(std::string(name) + "_bytes = " + std::to_string(given) + " but the plan needs " + std::to_string(needed) +
                         "; see flamia_plan_" + name + "_bytes");
}

Status forward(const Plan& plan, const flamia_forward_args* given) {
  flamia_forward_args a = FLAMIA_FORWARD_ARGS_INIT;
  if (Status s = read_descriptor("args", given, kForwardV1, &a); !s.ok()) return s;
  ForwardTensors t;
  if (Status s = read_tensor("q", a.q, &t.q); !s.ok()) return s;
  if (Status s = read_tensor("k", a.k, &t.k); !s.ok()) return s;
  if (Status s = read_tensor("v", a.v, &t.v); !s.ok()) return s;
  if (Status s = read_tensor("o", a.o, &t.o); !s.ok()) return s;
  t.cu_seqlens = a.cu_seqlens;
  t.lse = a.lse;
  if (Status s = check_size("saved", a.saved_bytes, plan.saved_bytes()); !s.ok()) return s;
  if (Status s = check_size("workspace", a.workspace_bytes, plan.workspace_bytes(Pass::forward)); !s.ok()) return s;
  return attention_forward(plan, t, a.saved, a.workspace, a.stream);
}

Status backward(const Plan& plan, const flamia_backward_args* given) {
  flamia_backward_args a = FLAMIA_BACKWARD_ARGS_INIT;
  if (Status s = read_descriptor("args", given, kBackwardV1, &a); !s.ok()) return s;
  BackwardTensors t;
  if (Status s = read_tensor("o", a.o, &t.o); !s.ok()) return s;
  if (Status s = read_tensor("d_o", a.d_o, &t.d_o); !s.ok()) return s;
  if (Status s = read_tensor("d_q", a.d_q, &t.d_q); !s.ok()) return s;
  if (Status s = read_tensor("d_k", a.d_k, &t.d_k); !s.ok()) return s;
  if (Status s = read_tensor("d_v", a.d_v, &t.d_v); !s.ok()) return s;
  t.cu_seqlens = a.cu_seqlens;
  if (Status s = check_size("saved", a.saved_bytes, plan.saved_bytes()); !s.ok()) return s;
  if (Status s = check_size("workspace", a.workspace_bytes, plan.workspace_bytes(Pass::backward)); !s.ok()) return s;
  return attention_backward(plan, t, a.saved, a.workspace, a.stream);
}

constexpr std::size_t kHealthV1 = 256;
static_assert(sizeof(void*) != 8 || sizeof(flamia_health) >= kHealthV1);

flamia_operand_health written(const OperandHealth& h) {
  return {h.elements, h.flagged, h.zeros, h.saturated, h.least_exponent, h.greatest_exponent};
}

Status health(const flamia_problem* problem, const Recipe& recipe, const flamia_const_tensor* const (&given)[4],
              const std::int32_t* cu_seqlens, std::int32_t threads, flamia_health* out) {
  Problem p;
  if (Status s = read_problem(problem, &p); !s.ok()) return s;
  flamia_health made{};
  if (Status s = read_descriptor("health", out, kHealthV1, &made); !s.ok()) return s;
  TensorView views[4];
  const char* names[] = {"q", "k", "v", "d_out"};
  for (int i = 0; i < 4; ++i) {
    if (given[i] == nullptr && i < 3) return Status::invalid(std::string(names[i]) + " is null; pass a filled descriptor");
    if (given[i] != nullptr)
      if (Status s = read_tensor(names[i], *given[i], &views[i]); !s.ok()) return s;
  }
  ForwardTensors tensors;
  tensors.q = views[0], tensors.k = views[1], tensors.v = views[2], tensors.cu_seqlens = cu_seqlens;
  Health h;
  if (Status s = attention_health(p, recipe, tensors, given[3] == nullptr ? nullptr : &views[3], threads, &h); !s.ok()) return s;
  const PairHealth& c = h.pairs;
  made = {out->struct_size, written(h.q), written(h.k), written(h.v),     written(h.d_out), c.pairs,   c.p_zero,    c.p_saturated,
          c.ds_pairs,       c.ds_zero_q,  c.ds_zero_k,  c.ds_saturated_q, c.ds_saturated_k, c.ds_mass, c.ds_lost_q, c.ds_lost_k};
  std::memcpy(out, &made, out->struct_size < sizeof made ? out->struct_size : sizeof made);
  return {};
}

}  // namespace
}  // namespace flamia::capi

using namespace flamia;

extern "C" {

flamia_status flamia_plan_create(const flamia_problem* problem, const flamia_recipe* recipe, const flamia_plan_options* options,
                                 flamia_plan** plan) {
  if (recipe == nullptr) return capi::null_argument("recipe");
  if (plan == nullptr) return capi::null_argument("plan");
  return capi::guarded([&]() -> Status {
    Problem read;
    PlanOptions chosen;
    if (Status s = capi::read_problem(problem, &read); !s.ok()) return s;
    if (Status s = capi::read_options(options, &chosen); !s.ok()) return s;
    Plan made;
    if (Status s = Plan::create(read, recipe->recipe, chosen, &made); !s.ok()) return s;
    *plan = new flamia_plan{std::move(made)};
    return {};
  });
}

void flamia_plan_destroy(flamia_plan* plan) { delete plan; }

size_t flamia_plan_saved_bytes(const flamia_plan* plan) { return plan == nullptr ? 0 : plan->plan.saved_bytes(); }

size_t flamia_plan_workspace_bytes(const flamia_plan* plan, flamia_pass pass) {
  return plan == nullptr ? 0 : plan->plan.workspace_bytes(pass == FLAMIA_BACKWARD ? Pass::backward : Pass::forward);
}

flamia_status flamia_plan_explain(const flamia_plan* plan, char* text, size_t capacity, size_t* length) {
  if (plan == nullptr) return capi::null_argument("plan");
  return capi::guarded([&] { return capi::write_text(plan->plan.explain(), text, capacity, length); });
}

flamia_status flamia_attention_forward(const flamia_plan* plan, const flamia_forward_args* args) {
  if (plan == nullptr) return capi::null_argument("plan");
  return capi::guarded([&] { return capi::forward(plan->plan, args); });
}

flamia_status flamia_attention_backward(const flamia_plan* plan, const flamia_backward_args* args) {
  if (plan == nullptr) return capi::null_argument("plan");
  return capi::guarded([&] { return capi::backward(plan->plan, args); });
}

flamia_status flamia_attention_health(const flamia_problem* problem, const flamia_recipe* recipe, const flamia_const_tensor* q,
                                      const flamia_const_tensor* k, const flamia_const_tensor* v, const int32_t* cu_seqlens,
                                      const flamia_const_tensor* d_out, int32_t threads, flamia_health* health) {
  if (recipe == nullptr) return capi::null_argument("recipe");
  return capi::guarded([&] { return capi::health(problem, recipe->recipe, {q, k, v, d_out}, cu_seqlens, threads, health); });
}

}  // extern "C"
