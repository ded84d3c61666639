// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "api/dispatch.hpp"
#include "kernels/cpu/backward.hpp"
#include "kernels/cpu/forward.hpp"
#include "plan/explain.hpp"
#include "recipe/lower.hpp"
#include "schedule/documents.hpp"

namespace flamia::api {
namespace {

Status documents_of(const Problem& problem, const std::int32_t* cu_seqlens, schedule::Documents* documents) {
  return schedule::Documents::create({cu_seqlens, static_cast<std::size_t>(problem.documents) + 1}, problem.tokens, documents);
}

Status check(const Problem& problem, const Recipe& recipe, const PlanOptions& options) {
  if (problem.head_dim % 16 != 0 || problem.head_dim < 16 || problem.head_dim > 256)
    return Status::invalid(
        "head_dim = " + std::to_string(problem.head_dim) +
        " but the CPU backend takes multiples of 16 from 16 to 256; pad q, k, v with zero channels (and set scale)");
  if (Status s = recipe::can_run(recipe, plan::Architecture::cpu, problem.head_dim, options.training); !s.ok())
    return {s.code(), s.message().starts_with("recipe ") ? s.message() : "recipe \"" + recipe.name() + "\": " + s.message()};
  return cpu::check(problem, recipe);
}

std::size_t saved_bytes(const Problem& problem, const Recipe& recipe, const PlanOptions& options) {
  return cpu::saved_bytes(problem, recipe, options.training);
}

std::size_t workspace_bytes(const Problem& problem, const Recipe& recipe, const PlanOptions& options, Pass pass) {
  return cpu::workspace_bytes(problem, recipe, pass, options.threads);
}

std::string explain(const Problem& problem, const Recipe& recipe, const PlanOptions&) {
  return plan::explain(recipe, plan::Architecture::cpu, problem.head_dim);
}

Status forward(const Plan& plan, const ForwardTensors& tensors, void* saved, void* workspace, void*) {
  schedule::Documents documents;
  if (Status s = documents_of(plan.problem(), tensors.cu_seqlens, &documents); !s.ok()) return s;
  // a plan that is not for training leaves nothing, whatever pointer came
  return cpu::forward(plan.problem(), plan.recipe(), documents, tensors, plan.options().training ? saved : nullptr, workspace,
                      plan.options().threads);
}

Status backward(const Plan& plan, const BackwardTensors& tensors, const void* saved, void* workspace, void*) {
  schedule::Documents documents;
  if (Status s = documents_of(plan.problem(), tensors.cu_seqlens, &documents); !s.ok()) return s;
  return cpu::backward(plan.problem(), plan.recipe(), documents, tensors, saved, workspace, plan.options().threads);
}

constexpr Backend kCpu{"cpu", check, saved_bytes, workspace_bytes, explain, forward, backward};

}  // namespace

const Backend& cpu_backend() { return kCpu; }

}  // namespace flamia::api
