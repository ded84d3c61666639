// SPDX-License-Identifier: Apache-2.0
#include "leakage.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "schedule/mask.hpp"

namespace flamia::cli {
namespace {

using schedule::DocumentRange;
using schedule::MaskReach;

constexpr std::int64_t kBlock = 32;  // a token block

struct Span {  // tokens of the packed row
  std::int64_t begin, end;
};
using Spans = std::vector<Span>;

/// The last position that belongs to the earlier side: one inside a block, one at a block's end, so that a scale shared by a block
/// shows in the first and its limits show in the second. -1: the document is too short to cut.
std::int64_t cut_position(std::int64_t length, int which) {
  if (length < 2) return -1;
  if (length < 2 * kBlock) return std::max<std::int64_t>((which + 1) * length / 3 - 1, 0);
  const std::int64_t block = (which + 1) * length / 3 / kBlock * kBlock;
  return which == 0 ? block + kBlock / 2 - 1 : block - 1;
}
constexpr const char* kCutNames[] = {"1/3", "2/3"};

/// What to multiply and what to compare for one figure and cut, over all documents at once.
struct Experiment {
  const char* figure;
  const char* block_figure;  // null: none
  const char* cut;
  bool queries_only;  // multiply q and dout, not k and v
  std::vector<Output> outputs;
  Spans multiplied, compared, compared_blocks;
};

Experiment earlier(const schedule::Documents& documents, const MaskReach& reach, int which) {
  Experiment e{"earlier", "earlier_blocks", kCutNames[which], false, {kO, kDq}, {}, {}, {}};
  for (const DocumentRange& d : documents.ranges()) {
    const std::int64_t t = cut_position(d.length, which), first = t + reach.right + 1;
    if (t < 0 || first >= d.length) continue;
    e.multiplied.push_back({d.start + first, d.start + d.length});
    e.compared.push_back({d.start, d.start + t + 1});
    e.compared_blocks.push_back({d.start, d.start + std::min(t + 1, first / kBlock * kBlock)});
  }
  return e;
}

Experiment look_back(const schedule::Documents& documents, const MaskReach& reach, int which) {
  Experiment e{"look_back", "look_back_blocks", kCutNames[which], true, {kDk, kDv}, {}, {}, {}};
  for (const DocumentRange& d : documents.ranges()) {
    const std::int64_t t = cut_position(d.length, which) + 1, last = t - reach.right;  // queries before `last` do not see key t
    if (t < 1 || last <= 0) continue;
    e.multiplied.push_back({d.start, d.start + last});
    e.compared.push_back({d.start + t, d.start + d.length});
    e.compared_blocks.push_back(
        {d.start + std::min(d.length, std::max(t, (last + kBlock - 1) / kBlock * kBlock)), d.start + d.length});
  }
  return e;
}

Experiment behind_window(const schedule::Documents& documents, const MaskReach& reach, int which) {
  Experiment e{"behind_window", nullptr, kCutNames[which], false, {kO, kDq}, {}, {}, {}};
  for (const DocumentRange& d : documents.ranges()) {
    const std::int64_t t = cut_position(d.length, which) + 1, end = t - reach.left;  // keys before `end` lie behind row t's window
    if (t < 1 || end <= 0) continue;
    e.multiplied.push_back({d.start, d.start + end});
    e.compared.push_back({d.start + t, d.start + d.length});
  }
  return e;
}

std::vector<Experiment> experiments(const Inputs& inputs, const CallOptions& options) {
  const MaskReach reach = schedule::reach_of(options.mask.causal, options.mask.left, options.mask.right);
  std::vector<Experiment> all;
  for (int which = 0; which < 2; ++which) {
    if (reach.right < MaskReach::kUnlimited) all.push_back(earlier(inputs.documents, reach, which));
    if (reach.right < MaskReach::kUnlimited && options.backward) all.push_back(look_back(inputs.documents, reach, which));
    if (reach.left < MaskReach::kUnlimited) all.push_back(behind_window(inputs.documents, reach, which));
  }
  return all;
}

/// The longest document and the last of the others that hold a token.
std::vector<std::size_t> documents_to_multiply(const Inputs& inputs) {
  const auto ranges = inputs.documents.ranges();
  const auto longest =
      std::max_element(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) { return a.length < b.length; });
  std::vector<std::size_t> chosen;
  for (std::size_t b = 0; b < ranges.size(); ++b)
    if (ranges[b].length > 0 && ranges.begin() + static_cast<std::ptrdiff_t>(b) != longest) chosen.assign(1, b);
  if (!chosen.empty()) chosen.insert(chosen.begin(), static_cast<std::size_t>(longest - ranges.begin()));
  return chosen;  // none where there is no other document
}

class Meter {
 public:
  Meter(const Inputs& inputs, const Recipe& recipe, const CallOptions& options, std::vector<LeakRow>* rows)
      : inputs_(inputs), recipe_(recipe), options_(options), rows_(rows) {
    plain_ = inputs;
    options_.deterministic = true;  // else sums in another order would count as leaks
    for (auto member : {&Inputs::q, &Inputs::k, &Inputs::v})
      plain_.*member = host_tensor(to_f32(inputs.*member), (inputs.*member).heads);
    if (inputs.d_o) plain_.d_o = host_tensor(to_f32(*inputs.d_o), inputs.d_o->heads);
  }

  Status base() { return run(plain_, &before_); }

  Status cut(const Experiment& e, float factor) {
    Results after;
    if (Status s = run(multiplied(e.multiplied, factor, e.queries_only), &after); !s.ok()) return s;
    add_row(e.figure, factor, e.cut, e.outputs, e.compared, after);
    if (e.block_figure != nullptr) add_row(e.block_figure, factor, e.cut, e.outputs, e.compared_blocks, after);
    return {};
  }

  Status document(std::size_t b, float factor) {
    const DocumentRange changed = inputs_.documents.ranges()[b];
    Spans others;
    for (const DocumentRange& d : inputs_.documents.ranges())
      if (d.start != changed.start || d.length != changed.length) others.push_back({d.start, d.start + d.length});
    Results after;
    if (Status s = run(multiplied({{changed.start, changed.start + changed.length}}, factor, false), &after); !s.ok()) return s;
    std::vector<Output> outputs{kO};
    if (options_.backward) outputs = {kO, kDq, kDk, kDv};
    add_row("other_documents", factor, "document " + std::to_string(b), outputs, others, after);
    if (options_.backward) rows_->back().d_q_cosine = cosine(kDq, others, after);
    return {};
  }

 private:
  using Results = std::array<std::vector<float>, 4>;

  Status run(const Inputs& inputs, Results* results) {
    CallResult result;
    if (Status s = attend(inputs, recipe_, options_, &result); !s.ok()) return s;
    *results = {output_f32(result), std::move(result.d_q), std::move(result.d_k), std::move(result.d_v)};
    return {};
  }

  Inputs multiplied(const Spans& spans, float factor, bool queries_only) const {
    Inputs made = plain_;
    multiply(spans, factor, &made.q);
    if (made.d_o) multiply(spans, factor, &*made.d_o);
    if (!queries_only) multiply(spans, factor, &made.k), multiply(spans, factor, &made.v);
    return made;
  }

  /// FP32, in which every product is exact; BF16 on a GPU, which takes no FP32.
  HostTensor host_tensor(const std::vector<float>& values, int heads) const {
    return options_.device == Device::cuda ? bf16_from_f32(values, heads) : from_f32(values, heads);
  }

  void multiply(const Spans& spans, float factor, HostTensor* tensor) const {
    std::vector<float> values = to_f32(*tensor);
    const std::int64_t row = std::int64_t{tensor->heads} * inputs_.problem.head_dim;
    for (const Span& span : spans)
      for (std::int64_t i = span.begin * row; i < span.end * row; ++i) values[static_cast<std::size_t>(i)] *= factor;
    *tensor = host_tensor(values, tensor->heads);
  }

  std::int64_t row_size(Output output) const {
    return std::int64_t{output <= kDq ? inputs_.problem.query_heads : inputs_.problem.key_heads} * inputs_.problem.head_dim;
  }

  /// visit(before, after) for every compared element.
  template <class Visit>
  void each(Output output, const Spans& spans, const Results& after, Visit visit) const {
    const std::int64_t row = row_size(output);
    for (const Span& span : spans)
      for (std::int64_t i = span.begin * row; i < span.end * row; ++i)
        visit(before_[output][static_cast<std::size_t>(i)], after[output][static_cast<std::size_t>(i)]);
  }

  void add_row(const char* figure, float factor, std::string cut, const std::vector<Output>& outputs, const Spans& spans,
               const Results& after) {
    LeakRow row{figure, factor, std::move(cut), {}, {}, {}};
    for (const Output output : outputs) {
      if (before_[output].empty()) continue;
      Change change;
      each(output, spans, after, [&](float a, float b) { change.add(a, b); });
      double largest = 0;
      for (const float x : before_[output])
        if (std::isfinite(x)) largest = std::max(largest, std::abs(static_cast<double>(x)));
      row.greatest[output] = change.elements == 0 ? 0.0 : change.greatest / std::max(largest, 1e-300);
      row.elements[output] = change.elements;
    }
    rows_->push_back(std::move(row));
  }

  double cosine(Output output, const Spans& spans, const Results& after) const {
    double dot = 0, a2 = 0, b2 = 0;
    each(output, spans, after, [&](double a, double b) { dot += a * b, a2 += a * a, b2 += b * b; });
    return a2 == 0 && b2 == 0 ? 1 : dot / std::max(std::sqrt(a2) * std::sqrt(b2), 1e-300);
  }

  const Inputs& inputs_;
  const Recipe& recipe_;
  CallOptions options_;
  std::vector<LeakRow>* rows_;
  Inputs plain_;  // inputs as host_tensor makes them
  Results before_;
};

}  // namespace

int leak_runs(const Inputs& inputs, const CallOptions& options, std::size_t factors) {
  return 1 + static_cast<int>(experiments(inputs, options).size() * factors + documents_to_multiply(inputs).size());
}

Status measure_leak(const Inputs& inputs, const Recipe& recipe, const CallOptions& options, const std::vector<float>& factors,
                    const std::function<void(const std::string&)>& step, std::vector<LeakRow>* rows) {
  Meter meter(inputs, recipe, options, rows);
  const std::string name = recipe.name();
  step(name + ", untouched input");
  if (Status s = meter.base(); !s.ok()) return s;
  const std::vector<Experiment> all = experiments(inputs, options);
  for (const Experiment& experiment : all)
    for (const float factor : factors) {
      step(fmt::format("{}, {} x {}", name, experiment.figure, factor));
      if (Status s = meter.cut(experiment, factor); !s.ok()) return s;
    }
  const float greatest = factors.empty() ? 0.f : *std::max_element(factors.begin(), factors.end());
  for (const std::size_t b : documents_to_multiply(inputs)) {
    step(fmt::format("{}, document {} x {}", name, b, greatest));
    if (Status s = meter.document(b, greatest); !s.ok()) return s;
  }
  return {};
}

}  // namespace flamia::cli
