// SPDX-License-Identifier: Apache-2.0
#include "leakage.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "recipe/guarantee.hpp"
#include "schedule/mask.hpp"

namespace flamia::cli {
namespace {

using schedule::DocumentRange;
using schedule::MaskReach;

struct Span {  // tokens of the packed row
  std::int64_t begin, end;
};
using Spans = std::vector<Span>;

std::int64_t rounded_down(std::int64_t x, std::int64_t step) { return x <= 0 ? 0 : x / step * step; }
std::int64_t rounded_up(std::int64_t x, std::int64_t step) { return x <= 0 ? 0 : (x + step - 1) / step * step; }

/// Where the multiplied tokens begin or end, near `wanted`: once at an odd position, inside every block of more than one token, once at the end of a
/// block of 32 tokens, so that a scale shared by a block shows in the first and its limits show in the second.
std::int64_t cut_near(std::int64_t wanted, std::int64_t length, int which) {
  constexpr std::int64_t kBlock = 32, kInside = 21;
  if (wanted < 0) return 0;
  if (length < 2 * kBlock) return which == 0 ? wanted | 1 : wanted;
  return rounded_down(wanted, kBlock) + (which == 0 ? kInside : 0);
}
std::int64_t fraction(std::int64_t length, int which) { return (which + 1) * length / 3; }
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

Experiment earlier(const schedule::Documents& documents, const MaskReach& reach, int which, std::int64_t block) {
  Experiment e{"earlier", "earlier_blocks", kCutNames[which], false, {kO, kDq}, {}, {}, {}};
  for (const DocumentRange& d : documents.ranges()) {
    const std::int64_t first = cut_near(fraction(d.length, which) + reach.right, d.length, which), end = first - reach.right;
    if (end <= 0 || first >= d.length) continue;
    e.multiplied.push_back({d.start + first, d.start + d.length});
    e.compared.push_back({d.start, d.start + end});
    // the block of the first row that sees a token of the changed token's block
    e.compared_blocks.push_back({d.start, d.start + rounded_down(rounded_down(first, block) - reach.right, block)});
  }
  return e;
}

Experiment look_back(const schedule::Documents& documents, const MaskReach& reach, int which, std::int64_t block) {
  Experiment e{"look_back", "look_back_blocks", kCutNames[which], true, {kDk, kDv}, {}, {}, {}};
  for (const DocumentRange& d : documents.ranges()) {
    const std::int64_t last = cut_near(fraction(d.length, which) - reach.right, d.length, which);  // queries before it do not see
    const std::int64_t first = last + reach.right;                                                 // keys from here on
    if (last <= 0 || first >= d.length) continue;
    e.multiplied.push_back({d.start, d.start + last});
    e.compared.push_back({d.start + first, d.start + d.length});
    e.compared_blocks.push_back(
        {d.start + std::min(d.length, rounded_up(rounded_up(last, block) + reach.right, block)), d.start + d.length});
  }
  return e;
}

Experiment behind_window(const schedule::Documents& documents, const MaskReach& reach, int which) {
  Experiment e{"behind_window", nullptr, kCutNames[which], false, {kO, kDq}, {}, {}, {}};
  for (const DocumentRange& d : documents.ranges()) {
    const std::int64_t end = cut_near(fraction(d.length, which) - reach.left, d.length, which);  // keys before it lie behind
    const std::int64_t first = end + reach.left;                                                 // the windows of rows from here on
    if (end <= 0 || first >= d.length) continue;
    e.multiplied.push_back({d.start, d.start + end});
    e.compared.push_back({d.start + first, d.start + d.length});
  }
  return e;
}

/// The tokens of the block within which a recipe promises to stay; 32 where it promises none or all.
std::int64_t tokens_of(const recipe::Reach& reach) { return reach.kind == recipe::Reach::Kind::block ? reach.tokens : 32; }

std::vector<Experiment> experiments(const Inputs& inputs, const CallOptions& options, const Recipe& recipe) {
  const recipe::Guarantee promise = recipe::guarantee(recipe);
  const std::int64_t block = tokens_of(options.backward ? farther(promise.outputs, promise.d_q) : promise.outputs);
  const MaskReach reach = schedule::reach_of(options.mask.causal, options.mask.left, options.mask.right);
  std::vector<Experiment> all;
  for (int which = 0; which < 2; ++which) {
    if (reach.right < MaskReach::kUnlimited) all.push_back(earlier(inputs.documents, reach, which, block));
    if (reach.right < MaskReach::kUnlimited && options.backward)
      all.push_back(look_back(inputs.documents, reach, which, tokens_of(promise.look_back)));
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
    std::int64_t compared = 0;
    for (const Span& span : spans) compared += span.end - span.begin;
    for (const Output output : outputs) {
      if (before_[output].empty() || compared == 0) continue;  // of nothing there is no figure
      Change change;
      each(output, spans, after, [&](float a, float b) { change.add(a, b); });
      double largest = 0;
      for (const float x : before_[output])
        if (std::isfinite(x)) largest = std::max(largest, std::abs(static_cast<double>(x)));
      row.greatest[output] = change.elements == 0 ? 0.0 : change.greatest / largest;  // inf where the output was 0 all over
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
  return 1 + static_cast<int>(experiments(inputs, options, Recipe{}).size() * factors + documents_to_multiply(inputs).size());
}

Status measure_leak(const Inputs& inputs, const Recipe& recipe, const CallOptions& options, const std::vector<float>& factors,
                    const std::function<void(const std::string&)>& step, std::vector<LeakRow>* rows) {
  Meter meter(inputs, recipe, options, rows);
  const std::string name = recipe.name();
  step(name + ", untouched input");
  if (Status s = meter.base(); !s.ok()) return s;
  const std::vector<Experiment> all = experiments(inputs, options, recipe);
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
