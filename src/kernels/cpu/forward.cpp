// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/forward.hpp"

#include <algorithm>

#include "kernels/cpu/driver.hpp"
#include "numerics/platform.hpp"
#include "quantize/means.hpp"

namespace flamia::cpu {
namespace {

struct Inputs {
  quantize::QuantiseInput q, k, v;
};

/// Means of Q and K into their places, where the recipe subtracts them.
Status take_means(const Settings& settings, const schedule::Documents& documents, std::int64_t q_blocks, void* q_means,
                  void* k_means, int threads, Inputs* in) {
  const auto means = [&](quantize::QuantiseInput& input, void* place, std::int64_t blocks, std::int64_t rows) {
    auto* out = static_cast<float*>(place);
    input.subtract = out;
    input.subtract_rows = rows;
    return quantize::means(input, documents, rows, threads, {out, static_cast<std::size_t>(blocks * input.heads * input.dim)});
  };
  if (settings.smooth_q)
    if (Status status = means(in->q, q_means, q_blocks, settings.q_mean_rows); !status.ok()) return status;
  if (settings.smooth_k) return means(in->k, k_means, documents.blocks(kKeyMeanRows), kKeyMeanRows);
  return {};
}

/// Codes and scales of every form in the layout, each place once.
Status encode_inputs(const Inputs& in, const schedule::Documents& documents, const SavedLayout& layout, int threads, void* base) {
  const auto operand_of = [&](int index) { return index <= kQSecond ? in.q : index <= kKDiagonal ? in.k : in.v; };
  for (int index = 0; index < kForms; ++index) {
    const FormPlace& place = layout.forms[index];
    const bool done = std::any_of(layout.forms, layout.forms + index,
                                  [&](const FormPlace& other) { return other.present && other.codes == place.codes; });
    if (!place.present || done) continue;
    if (Status status = encode_at(operand_of(index), documents, place, threads, base); !status.ok()) return status;
  }
  return {};
}

}  // namespace

Status check(const Problem& problem, const Recipe& recipe) {
  Settings settings;
  return lower(problem, recipe, &settings);
}

std::size_t saved_bytes(const Problem& problem, const Recipe& recipe, bool training) {
  return training ? saved_layout(problem, recipe, true).bytes : 0;
}

std::size_t workspace_bytes(const Problem& problem, const Recipe& recipe, Pass pass, int threads) {
  return workspace_layout(problem, recipe, pass, threads).bytes;
}

Status forward_with(Isa isa, const Problem& problem, const Recipe& recipe, const schedule::Documents& documents,
                    const ForwardTensors& tensors, void* saved, void* workspace, int threads, Probe* probe) {
  Settings settings;
  if (Status status = lower(problem, recipe, &settings); !status.ok()) return status;
  if (Status status = check_call(problem, documents, isa); !status.ok()) return status;
  threads = thread_count(threads);
  const WorkspaceLayout work = workspace_layout(problem, recipe, Pass::forward, threads);
  const SavedLayout layout = saved ? saved_layout(problem, recipe, true) : work.forward_forms;
  void* base = saved ? saved : static_cast<char*>(workspace) + work.forms;
  Inputs inputs{{tensors.q, problem.query_heads, problem.head_dim, settings.rotate},
                {tensors.k, problem.key_heads, problem.head_dim, settings.rotate},
                {tensors.v, problem.key_heads, problem.head_dim}};
  char* const q_means = saved ? static_cast<char*>(saved) + layout.q_means : static_cast<char*>(workspace) + work.q_means;
  if (Status status = take_means(settings, documents, q_mean_blocks(problem, recipe), q_means,
                                 static_cast<char*>(workspace) + work.k_means, threads, &inputs);
      !status.ok())
    return status;
  if (Status status = encode_inputs(inputs, documents, layout, threads, base); !status.ok()) return status;

  const BlockSizes sizes = block_sizes(recipe);
  const WorkTable table(documents, sizes, static_cast<char*>(workspace) + work.table);
  const auto operand = [&](FormIndex index, int heads) {
    return operand_at(layout.forms[index], base, sizes, documents, heads, problem.head_dim);
  };
  ForwardCall call;
  call.settings = &settings;
  call.q = operand(kQ, problem.query_heads);
  call.k = operand(kK, problem.key_heads);
  call.v = operand(kV, problem.key_heads);
  call.v_diagonal = operand(kVDiagonal, problem.key_heads);
  call.o = tensors.o;
  call.lse = tensors.lse;
  call.q_rows = tensors.q;
  call.k_rows = tensors.k;
  if (settings.smooth_q) call.q_means = {inputs.q.subtract, sizes.index(settings.q_mean_rows), settings.q_mean_rows};
  if (settings.smooth_k) call.k_means = {inputs.k.subtract, sizes.index(kKeyMeanRows), kKeyMeanRows};
  if (saved) {
    call.m = reinterpret_cast<float*>(static_cast<char*>(saved) + layout.m);
    call.l = reinterpret_cast<float*>(static_cast<char*>(saved) + layout.l);
  }
  if (probe && probe->record_codes) {
    probe->forward_codes.assign(static_cast<std::size_t>(problem.query_heads * problem.tokens * problem.tokens), 0.f);
    call.probe_codes = probe->forward_codes.data();
  }

  clear_tail(tensors.o, documents, problem.query_heads, problem.head_dim);
  for (int head = 0; head < problem.query_heads; ++head)
    for (std::int64_t token = documents.covered(); token < problem.tokens; ++token) {
      const std::int64_t at = head * problem.tokens + token;
      call.lse[at] = numerics::infinity();
      if (saved) call.m[at] = call.l[at] = 0.f;
    }
  const TileCode& code = *tile_code(isa);
  ItemCounts counts(probe, table.tiles() * problem.query_heads);
  for_each_tile(table, problem.query_heads, threads, true, [&](const Item& item, std::int64_t number, int thread) {
    code.forward(call, item, scratch_of(work, workspace, thread), counts.at(number));
  });
  if (probe) counts.add_to(probe);
  return {};
}

Status forward(const Problem& problem, const Recipe& recipe, const schedule::Documents& documents, const ForwardTensors& tensors,
               void* saved, void* workspace, int threads, Probe* probe) {
  return forward_with(Isa::best, problem, recipe, documents, tensors, saved, workspace, threads, probe);
}

}  // namespace flamia::cpu
