// SPDX-License-Identifier: Apache-2.0
#include "flamia/attention.hpp"

#include <new>

#include "api/check.hpp"
#include "api/dispatch.hpp"
#include "api/plan_impl.hpp"

namespace flamia {
namespace {

Status out_of_memory() {
  return {StatusCode::out_of_memory, "out of memory for the document table; free memory or attend fewer documents"};
}

Status check_plan(const Plan& plan) {
  return plan.impl ? Status() : Status::invalid("plan is empty; fill it with Plan::create first and check its status");
}

}  // namespace

Status attention_forward(const Plan& plan, const ForwardTensors& tensors, void* saved, void* workspace, void* stream) {
  try {
    if (Status s = check_plan(plan); !s.ok()) return s;
    if (Status s = api::check_forward(plan, tensors, saved, workspace); !s.ok()) return s;
    return plan.impl->backend->forward(plan, tensors, saved, workspace, stream);
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  }
}

Status attention_backward(const Plan& plan, const BackwardTensors& tensors, const void* saved, void* workspace, void* stream) {
  try {
    if (Status s = check_plan(plan); !s.ok()) return s;
    if (!plan.options().training)
      return Status::invalid(
          "plan was made with training = false, so the forward pass saved nothing; create it with training = true");
    if (Status s = api::check_backward(plan, tensors, saved, workspace); !s.ok()) return s;
    return plan.impl->backend->backward(plan, tensors, saved, workspace, stream);
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  }
}

const char* version() { return FLAMIA_VERSION; }

}  // namespace flamia
