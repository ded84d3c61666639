// SPDX-License-Identifier: Apache-2.0
#include "flamia/attention.hpp"

#include <cmath>
#include <new>

#include "api/check.hpp"
#include "api/dispatch.hpp"
#include "api/plan_impl.hpp"
#include "kernels/cpu/settings.hpp"

namespace flamia {

Status Plan::create(const Problem& problem, const Recipe& recipe, const PlanOptions& options, Plan* plan) {
  if (plan == nullptr) return Status::invalid("plan is null; pass the address of a Plan to fill");
  try {
    if (Status s = api::check_problem(problem, options); !s.ok()) return s;
    const api::Backend* backend = api::find_backend(options.device);
    if (backend == nullptr)
      return Status::unsupported(
          "device cuda: this build has no CUDA part; configure with -DFLAMIA_CUDA=ON (needs nvcc 13), or use the CPU backend");
    auto made = std::make_shared<Plan::Impl>();
    made->problem = problem;
    if (problem.scale == 0.f) made->problem.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(problem.head_dim)));
    made->recipe = recipe;
    made->options = options;
    // fixed here: the number of cores that a thread may use can differ between the plan and the call, and the workspace's size must not
    if (options.device == Device::cpu) made->options.threads = cpu::thread_count(options.threads);
    made->backend = backend;
    if (Status s = backend->check(made->problem, recipe, made->options); !s.ok()) return s;
    made->saved_bytes = backend->saved_bytes(made->problem, recipe, made->options);
    made->workspace_bytes[0] = backend->workspace_bytes(made->problem, recipe, made->options, Pass::forward);
    if (options.training) made->workspace_bytes[1] = backend->workspace_bytes(made->problem, recipe, made->options, Pass::backward);
    plan->impl = std::move(made);
    return {};
  } catch (const std::bad_alloc&) {
    return {StatusCode::out_of_memory, "out of memory while planning; the plan itself needs a few kilobytes"};
  }
}

namespace {

/// What a plan that was never filled says of itself; the calls refuse it.
const Plan::Impl& of(const Plan& plan) {
  static const Plan::Impl empty;
  return plan.impl ? *plan.impl : empty;
}

}  // namespace

const Problem& Plan::problem() const { return of(*this).problem; }
const Recipe& Plan::recipe() const { return of(*this).recipe; }
const PlanOptions& Plan::options() const { return of(*this).options; }
std::size_t Plan::saved_bytes() const { return of(*this).saved_bytes; }
std::size_t Plan::workspace_bytes(Pass pass) const { return of(*this).workspace_bytes[pass == Pass::forward ? 0 : 1]; }
std::string Plan::explain() const {
  return impl ? impl->backend->explain(impl->problem, impl->recipe, impl->options) : "an empty plan; fill it with Plan::create\n";
}

}  // namespace flamia
