// SPDX-License-Identifier: Apache-2.0
#include "flamia/health.hpp"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "api/check.hpp"
#include "kernels/cpu/backward.hpp"
#include "kernels/cpu/memory.hpp"
#include "kernels/cpu/settings.hpp"
#include "quantize/means.hpp"
#include "quantize/measure.hpp"

namespace flamia {
namespace {

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<char, Free>;

Buffer allocate(std::size_t bytes) {
  Buffer buffer(static_cast<char*>(std::aligned_alloc(256, (std::max<std::size_t>(bytes, 1) + 255) / 256 * 256)));
  if (!buffer) throw std::bad_alloc();
  return buffer;
}

Status measure_operand(const quantize::QuantiseInput& input, const schedule::Documents& documents, const Quantisation& form,
                       int threads, OperandHealth* health) {
  quantize::QuantisedTensor codes;
  if (Status s = quantize::quantise(input, documents, form, threads, &codes); !s.ok()) return s;
  *health = quantize::measure(input, documents, codes);
  return {};
}

Status measure(const Plan& plan, const ForwardTensors& given, const TensorView* d_out, Health* health) {
  const Problem& p = plan.problem();
  const Recipe& recipe = plan.recipe();
  const int threads = plan.options().threads;
  schedule::Documents documents;
  if (Status s = schedule::Documents::create({given.cu_seqlens, static_cast<std::size_t>(p.documents) + 1}, p.tokens, &documents);
      !s.ok())
    return s;
  const Buffer saved = allocate(plan.saved_bytes());
  const Buffer workspace = allocate(std::max(plan.workspace_bytes(Pass::forward), plan.workspace_bytes(Pass::backward)));
  const std::size_t rows = static_cast<std::size_t>(p.tokens * p.query_heads),
                    elements = rows * static_cast<std::size_t>(p.head_dim);
  const std::size_t key_elements = static_cast<std::size_t>(p.tokens * p.key_heads * p.head_dim);
  std::vector<float> out(elements), lse(rows);
  ForwardTensors forward = given;
  forward.o = {out.data(), DType::f32, 0, 0};
  forward.lse = lse.data();
  Health made;
  cpu::Probe probe;
  void* const kept = plan.options().training ? saved.get() : nullptr;
  if (Status s = cpu::forward(p, recipe, documents, forward, kept, workspace.get(), threads, &probe); !s.ok()) return s;
  cpu::Settings settings;
  if (Status s = cpu::lower(p, recipe, &settings); !s.ok()) return s;
  const auto operand = [&](const TensorView& tensor, int heads, bool rotate, std::int64_t mean_rows, const OperandPolicy& policy,
                           OperandHealth* result) {
    quantize::QuantiseInput input{tensor, heads, p.head_dim, rotate};
    std::vector<float> smoothed;
    if (mean_rows > 0) {
      if (Status s = quantize::less_means(input, documents, mean_rows, threads, &smoothed); !s.ok()) return s;
      input = {{smoothed.data(), DType::f32, 0, 0}, heads, p.head_dim};
    }
    return measure_operand(input, documents, policy.first, threads, result);
  };
  const std::int64_t q_rows = settings.smooth_q ? settings.q_mean_rows : 0, k_rows = settings.smooth_k ? cpu::kKeyMeanRows : 0;
  if (Status s = operand(given.q, p.query_heads, settings.rotate, q_rows, recipe.q, &made.q); !s.ok()) return s;
  if (Status s = operand(given.k, p.key_heads, settings.rotate, k_rows, recipe.k, &made.k); !s.ok()) return s;
  if (Status s = operand(given.v, p.key_heads, false, 0, recipe.v, &made.v); !s.ok()) return s;
  if (d_out != nullptr) {
    const auto* l = reinterpret_cast<const float*>(saved.get() + cpu::saved_layout(p, recipe, true).l);
    const quantize::QuantiseInput input{*d_out, p.query_heads, p.head_dim, false, settings.classical ? nullptr : l};
    if (Status s = measure_operand(input, documents, recipe.d_out.first, threads, &made.d_out); !s.ok()) return s;
    std::vector<float> d_q(elements), d_k(key_elements), d_v(key_elements);
    BackwardTensors backward;
    backward.o = {out.data(), DType::f32, 0, 0};
    backward.d_o = *d_out;
    backward.cu_seqlens = given.cu_seqlens;
    backward.d_q = {d_q.data(), DType::f32, 0, 0};
    backward.d_k = {d_k.data(), DType::f32, 0, 0};
    backward.d_v = {d_v.data(), DType::f32, 0, 0};
    if (Status s = cpu::backward(p, recipe, documents, backward, saved.get(), workspace.get(), threads, &probe); !s.ok()) return s;
  }
  const cpu::ProbeCounts& c = probe.counts;
  made.pairs = {c.pairs,          c.p_zero,         c.p_saturated, c.ds_pairs,  c.ds_zero_q, c.ds_zero_k,
                c.ds_saturated_q, c.ds_saturated_k, c.ds_mass,     c.ds_lost_q, c.ds_lost_k};
  *health = made;
  return {};
}

}  // namespace

Status attention_health(const Problem& problem, const Recipe& recipe, const ForwardTensors& tensors, const TensorView* d_out,
                        int threads, Health* health) {
  if (health == nullptr) return Status::invalid("health is null; pass where the figures go");
  try {
    Plan plan;  // without d_out for the forward pass alone, which inference recipes have too
    if (Status s = Plan::create(problem, recipe, {Device::cpu, threads, false, d_out != nullptr}, &plan); !s.ok()) return s;
    if (Status s = api::check_inputs(problem, tensors, d_out); !s.ok()) return s;
    return measure(plan, tensors, d_out, health);
  } catch (const std::bad_alloc&) {
    return {StatusCode::out_of_memory, "out of memory for the health figures; measure a smaller sample"};
  }
}

}  // namespace flamia
