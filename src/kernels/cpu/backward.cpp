// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/backward.hpp"

#include <algorithm>

#include "kernels/cpu/driver.hpp"
#include "numerics/exponent.hpp"

namespace flamia::cpu {
namespace {

/// One scale of dS for the call: a power of two, or amax / 448.
float scale_of_ds(const Payload& form, float amax) {
  if (form.amax) return amax > 0.f ? amax / 448.f : 1.f;
  return numerics::pow2(form.floor ? numerics::floor_exponent<numerics::kE4M3>(amax)
                                   : numerics::ceil_exponent<numerics::kE4M3>(amax));
}

/// The control that leaks: every row of a document takes the smallest pre-scale among its rows.
void share_pre_scale(const BackwardCall& call, const WorkTable& table, int threads) {
  const Settings& s = *call.settings;
  for_each_document(table, s.query_heads, threads, [&](const Item& item, int) {
    std::int16_t* rows = call.pre_scale + item.head * s.tokens + item.document.start;
    std::fill_n(rows, item.document.length, *std::min_element(rows, rows + item.document.length));
  });
}

}  // namespace

Status backward_with(Isa isa, const Problem& problem, const Recipe& recipe, const schedule::Documents& documents,
                     const BackwardTensors& tensors, const void* saved, void* workspace, int threads, Probe* probe) {
  Settings settings;
  if (Status status = lower(problem, recipe, &settings); !status.ok()) return status;
  if (Status status = check_call(problem, documents, isa); !status.ok()) return status;
  if (!recipe.trains)
    return Status::unsupported("recipe \"" + recipe.name() +
                               "\" has no backward pass; for training use \"mxfp8\" or \"mxfp8-exact\"");
  threads = thread_count(threads);
  const SavedLayout layout = saved_layout(problem, recipe, true);
  const WorkspaceLayout work = workspace_layout(problem, recipe, Pass::backward, threads);
  auto* base = static_cast<char*>(workspace);
  const auto* kept = static_cast<const char*>(saved);
  const BlockSizes sizes = block_sizes(recipe);
  const WorkTable table(documents, sizes, base + work.table);
  const auto operand = [&](FormIndex index, int heads) {
    return operand_at(layout.forms[index], saved, sizes, documents, heads, problem.head_dim);
  };

  BackwardCall call;
  call.settings = &settings;
  call.q = operand(kQ, problem.query_heads);
  call.q_second = operand(kQSecond, problem.query_heads);
  call.k = operand(kK, problem.key_heads);
  call.k_second = operand(kKSecond, problem.key_heads);
  call.k_diagonal = operand(kKDiagonal, problem.key_heads);
  call.v = operand(kVSecond, problem.key_heads);
  call.v.in_bf16 = settings.widen_v;
  call.v_diagonal = operand(kVSecondDiagonal, problem.key_heads);
  call.v_of_o = operand(kV, problem.key_heads);
  call.v_of_o_diagonal = operand(kVDiagonal, problem.key_heads);
  call.d_o = operand_at(work.d_o, workspace, sizes, documents, problem.query_heads, problem.head_dim);
  call.d_o_second = operand_at(work.d_o_second, workspace, sizes, documents, problem.query_heads, problem.head_dim);
  if (settings.smooth_q)
    call.q_means = {reinterpret_cast<const float*>(kept + layout.q_means), sizes.index(settings.q_mean_rows), settings.q_mean_rows};
  call.o = tensors.o;
  call.d_q = tensors.d_q;
  call.d_k = tensors.d_k;
  call.d_v = tensors.d_v;
  call.m = reinterpret_cast<const float*>(kept + layout.m);
  call.l = reinterpret_cast<const float*>(kept + layout.l);
  call.d = reinterpret_cast<float*>(base + work.d);
  if (settings.dq_f16) {
    call.exponent_bound = reinterpret_cast<std::int16_t*>(base + work.exponent_bound);
    call.pre_scale = reinterpret_cast<std::int16_t*>(base + work.pre_scale);
  }
  if (probe && probe->record_codes) {
    probe->backward_codes.assign(static_cast<std::size_t>(problem.query_heads * problem.tokens * problem.tokens), 0.f);
    call.probe_codes = probe->backward_codes.data();
  }

  const quantize::QuantiseInput d_o{tensors.d_o, problem.query_heads, problem.head_dim, false,
                                    settings.classical ? nullptr : call.l};
  if (Status status = encode_at(d_o, documents, work.d_o, threads, workspace); !status.ok()) return status;
  if (work.d_o_second.codes != work.d_o.codes)
    if (Status status = encode_at(d_o, documents, work.d_o_second, threads, workspace); !status.ok()) return status;

  const TileCode& code = *tile_code(isa);
  const auto scratch = [&](int thread) { return scratch_of(work, workspace, thread); };
  if (settings.dq_f16)
    for_each_document(table, problem.key_heads, threads,
                      [&](const Item& item, int thread) { code.bound_exponents(call, item, scratch(thread)); });
  for_each_tile(table, problem.query_heads, threads, true,
                [&](const Item& item, std::int64_t, int thread) { code.prepare_rows(call, item, scratch(thread)); });
  if (settings.dq_f16 && settings.prescale_sequence) share_pre_scale(call, table, threads);
  if (settings.ds_first.kind == Payload::Kind::tensor || settings.ds_second.kind == Payload::Kind::tensor) {
    float amax = 0.f;
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(max : amax)
    for (std::int64_t i = 0; i < table.tiles() * problem.query_heads; ++i)
      amax = std::max(amax, code.greatest_ds(call, table.tile(i / problem.query_heads, static_cast<int>(i % problem.query_heads)),
                                             scratch(omp_get_thread_num())));
    call.ds_scale = scale_of_ds(settings.ds_first, amax);
  }

  clear_tail(tensors.d_q, documents, problem.query_heads, problem.head_dim);
  clear_tail(tensors.d_k, documents, problem.key_heads, problem.head_dim);
  clear_tail(tensors.d_v, documents, problem.key_heads, problem.head_dim);
  ItemCounts query_counts(probe, table.tiles() * problem.query_heads), key_counts(probe, table.tiles() * problem.key_heads);
  for_each_tile(table, problem.query_heads, threads, true, [&](const Item& item, std::int64_t number, int thread) {
    code.d_q(call, item, scratch(thread), query_counts.at(number));
  });
  for_each_tile(table, problem.key_heads, threads, false, [&](const Item& item, std::int64_t number, int thread) {
    code.d_k_d_v(call, item, scratch(thread), key_counts.at(number));
  });
  if (probe) {
    query_counts.add_to(probe);
    key_counts.add_to(probe);
  }
  return {};
}

Status backward(const Problem& problem, const Recipe& recipe, const schedule::Documents& documents, const BackwardTensors& tensors,
                const void* saved, void* workspace, int threads, Probe* probe) {
  return backward_with(Isa::best, problem, recipe, documents, tensors, saved, workspace, threads, probe);
}

}  // namespace flamia::cpu
