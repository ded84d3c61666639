// SPDX-License-Identifier: Apache-2.0
// Correctness of the Hopper forward kernel on the GPU. Usage: check [tilesum] [quick] [mitchell|schraudolph] [seed N]
#include <cstring>
#include <ctime>
#include <string>

#include "reference.cuh"

namespace bench {

using flamia::sm90::forward::Exponential;

int failures = 0;
void expect(bool good, const char* what) {
  if (!good) {
    ++failures;
    std::printf("    FAILED: %s\n", what);
  }
}

struct Options {
  bool tilesum = false, quick = false, tiny = false;
  Exponential kind = Exponential::hardware;
  std::uint64_t seed = 0;
};

void run(Problem& problem, const Options& options) {
  ForwardConfig config = problem.config();
  config.reference = options.tilesum ? flamia::sm90::RowReference::tilesum : flamia::sm90::RowReference::phase32;
  problem.poison_outputs();
  CUDA_CHECK(cudaDeviceSynchronize());
  CUDA_CHECK(options.kind == Exponential::hardware ? flamia::sm90::launch_forward(problem.params(), config, nullptr)
                                                   : launch_line(problem.params(), config.scale_group, options.kind, nullptr));
  CUDA_CHECK(cudaDeviceSynchronize());
}

/// Sampled rows (all rows of short documents, edges and random ones of long ones) against both references.
void check(const char* name, const Shape& shape, Scales scales, int left, int right, const Data& data, const Options& options,
           double bar_recipe = 8e-3, double bar_exact = 4e-2, bool control = false) {
  ForwardConfig config;
  config.head_dim = shape.head_dim;
  Problem problem(shape, scales, left, right, flamia::sm90::query_tile(config));
  problem.make_operands(data);
  run(problem, options);
  const auto first_output = problem.output.host();
  const auto first_lse = problem.lse.host();
  run(problem, options);
  const auto output = problem.output.host();
  const bool repeats = std::memcmp(first_output.data(), output.data(), output.size() * 2) == 0 &&
                       std::memcmp(first_lse.data(), problem.lse.host().data(), first_lse.size() * 4) == 0;
  std::vector<int> docs, rows;
  std::uint64_t state = data.seed;
  for (int i = 0; i < static_cast<int>(shape.lengths.size()); ++i) {
    const int length = shape.lengths[i], wanted = options.quick ? 24 : 96;
    for (int k = 0; k < std::min(length, wanted); ++k) {
      state = mix(state + k + 1);
      const int row = length <= wanted ? k
                      : k < 8          ? k
                      : k < 24         ? length - 1 - (k - 8) * 7 % length
                                       : static_cast<int>(state % length);
      docs.push_back(i);
      rows.push_back(row);
    }
    if (data.poison_operand >= 0 && data.poison_document == i) {
      for (int row = data.poison_position / 32 * 32 - 2; row < std::min(length, data.poison_position / 32 * 32 + 34); ++row) {
        docs.push_back(i);
        rows.push_back(row);
      }
    }
  }
  Buffer<int> doc_table(docs.size()), row_table(rows.size());
  doc_table.from(docs);
  row_table.from(rows);
  Buffer<RowError> errors(docs.size() * shape.query_heads);
  const Inputs inputs{problem.params(), shape.head_dim, options.tilesum, control ? Exponential::hardware : options.kind,
                      problem.config().scale_group};
  check_rows<<<dim3(docs.size(), shape.query_heads), 128>>>(inputs, doc_table.data, row_table.data, errors.data);
  CUDA_CHECK(cudaGetLastError());
  double ee = 0, en = 0, re = 0, rn = 0, worst = 0, lse = 0, m = 0, l = 0, bias = 0;
  long long nans = 0, moved = 0;  // lse, l: mean over the rows whose reference agrees
  const auto all = errors.host();
  long long nan_rows = 0;
  for (const RowError& e : all) nan_rows += !(e.recipe_norm > 0);
  for (const RowError& e : all) {
    ee += e.exact_error, en += e.exact_norm, re += e.recipe_error, rn += e.recipe_norm, bias += e.bias, nans += e.nan_mismatch;
    if (e.recipe_norm > 0) worst = std::max(worst, std::sqrt(e.recipe_error / e.recipe_norm));
    m = std::max(m, e.reference);
    if (e.reference > 1e-3)
      ++moved;  // the accumulator cuts bits off a score: a maximum on the 1/32 grid may land one step away
    else
      lse += e.lse / all.size(), l += e.sum / all.size();
  }
  const double exact = std::sqrt(ee / en), recipe = std::sqrt(re / rn);
  std::printf(
      "  %-44s exact %.2e recipe %.2e worst row %.2e lse %.1e l %.1e m off %lld/%zu (max %.2g) bias %+.1e nan %lld (of %lld) %s\n",
      name, exact, recipe, worst, lse, l, moved, all.size(), m, bias / all.size() / shape.head_dim, nans, nan_rows,
      repeats ? "repeats" : "VARIES");
  if (control) return expect(recipe > bar_recipe, "the reference for exp2 does not notice the line");
  expect(recipe < bar_recipe, "recipe error");
  expect(exact < bar_exact, "exact error");
  expect(nans == 0, "NaN pattern");
  expect(repeats, "bit-equal repetition");
  expect(lse < 4e-3 && l < 4e-3, "lse");
  expect(moved * 12 < static_cast<long long>(all.size()), "row references");
  std::fflush(stdout);
}

/// Test mode: recorded codes must add up to l, row by row, and recording must not change a result.
void recorded(const char* name, Scales scales, int left, int right, const Options& options) {
  const Shape shape{{300, 700, 64}, 2, 1, 128};
  const int keys = 768;
  ForwardConfig config;
  Problem problem(shape, scales, left, right, flamia::sm90::query_tile(config));
  Data data;
  data.seed = options.seed + 5;
  data.uneven = true;
  problem.make_operands(data);
  run(problem, options);
  const auto before = problem.output.host();
  Buffer<std::uint8_t> codes(static_cast<std::size_t>(shape.query_heads) * problem.slots * keys);
  Buffer<float> references(static_cast<std::size_t>(shape.query_heads) * problem.slots * (keys / 128));
  codes.fill(0);
  references.fill(0);
  config = problem.config();
  config.reference = options.tilesum ? flamia::sm90::RowReference::tilesum : flamia::sm90::RowReference::phase32;
  config.record_codes = true;
  ForwardParams params = problem.params();
  params.recorded_codes = codes.data;
  params.recorded_reference = references.data;
  params.record_keys = keys;
  problem.poison_outputs();
  CUDA_CHECK(flamia::sm90::launch_forward(params, config, nullptr));
  CUDA_CHECK(cudaDeviceSynchronize());
  const auto after = problem.output.host();
  const auto code = codes.host();
  const auto moment = references.host(), final = problem.reference.host(), sum = problem.sum.host();
  double worst = 0;
  for (int head = 0; head < shape.query_heads; ++head) {
    for (const Document& doc : problem.documents) {
      for (int i = 0; i < doc.length; ++i) {
        const std::size_t row = static_cast<std::size_t>(head) * problem.slots + doc.slot_start + i;
        double total = 0;
        for (int j = 0; j < keys; ++j) {
          const __half value = __half(__nv_cvt_fp8_to_halfraw(code[row * keys + j], __NV_E4M3));
          total += static_cast<double>(__half2float(value)) * std::exp2(moment[row * (keys / 128) + j / 128] - final[row] - 8);
        }
        worst = std::max(worst, std::fabs(total - sum[row]) / sum[row]);
      }
    }
  }
  const bool same = std::memcmp(before.data(), after.data(), before.size() * 2) == 0;
  std::printf("  %-44s recorded codes add up to l within %.1e, results %s\n", name, worst, same ? "unchanged" : "CHANGED");
  expect(same && worst < 2e-2, "recorded codes");
}

/// Of the shorter one's elements.
long long differences(const std::vector<__nv_bfloat16>& a, const std::vector<__nv_bfloat16>& b) {
  long long count = 0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) count += std::memcmp(&a[i], &b[i], 2) != 0;
  return count;
}

/// Amplifies the later tokens of a document; earlier rows and other documents must not change in any bit.
void exactness(const char* name, Scales scales, int from, int left, int right, int d, const Options& options) {
  const Shape shape{{300, 700, 64, 1000}, 2, 1, d};
  ForwardConfig config;
  config.head_dim = d;
  Problem problem(shape, scales, left, right, flamia::sm90::query_tile(config));
  Data data;
  data.seed = options.seed + 17;
  data.uneven = true;
  problem.make_operands(data);
  run(problem, options);
  const auto before = problem.output.host();
  const auto lse_before = problem.lse.host();
  for (float factor : {16.0f, 1024.0f, 10000.0f}) {
    data.amplify = factor;
    data.amplify_from = from;
    data.amplify_document = 1;
    problem.make_operands(data);
    run(problem, options);
    const auto after = problem.output.host();
    const auto lse_after = problem.lse.host();
    long long early = 0, elsewhere = 0, later = 0;
    const int guard = has_token_blocks(scales) ? from / 32 * 32 : from;
    for (std::size_t i = 0; i < after.size(); ++i) {
      const std::int64_t token = i / (shape.query_heads * d);
      const bool same = std::memcmp(&before[i], &after[i], 2) == 0;
      const bool in_document = token >= 300 && token < 1000;
      (in_document ? token - 300 < guard ? early : later : elsewhere) += !same;
    }
    for (std::size_t i = 0; i < lse_after.size(); ++i) {
      const std::int64_t token = i % problem.tokens;
      if ((token < 300 + guard || token >= 1000) && std::memcmp(&lse_before[i], &lse_after[i], 4) != 0) ++early;
    }
    std::printf("  %-44s x%-6g earlier rows changed %lld, other documents %lld, later (control) %lld\n", name, factor, early,
                elsewhere, later);
    expect(early == 0 && elsewhere == 0 && later > 0, "exactness");
  }
}

/// A line instead of exp2: the same row references and folds, other codes. The control is the reference for exp2.
int check_line(const Options& options) {
  Data plain, uneven, peaked;
  plain.seed = uneven.seed = peaked.seed = options.seed;
  uneven.uneven = true;
  peaked.query_gain = 6;
  const Shape shape{{1, 2, 64, 127, 129, 193, 256, 500, 1024, 1500}, 4, 2, 128};
  for (const auto& [scales, name] : {std::pair{Scales::tensor, "tensor"}, {Scales::block, "block"}, {Scales::token, "token"}}) {
    const std::string n = name;
    check((n + " causal").c_str(), shape, scales, -1, 0, plain, options, 8e-3);
    check((n + " full uneven").c_str(), shape, scales, -1, -1, uneven, options, 8e-3);
    check((n + " causal peaked").c_str(), shape, scales, -1, 0, peaked, options, 8e-3);
    check((n + " causal, for exp2").c_str(), shape, scales, -1, 0, plain, options, 8e-3, 4e-2, true);
    exactness(name, scales, 333, -1, 0, 128, options);
  }
  std::printf("%s: %d failures\n", failures ? "FAILED" : "ok", failures);
  return failures != 0;
}

/// Rows of a document against the same rows of its beginning alone: items lie otherwise then, rows meet tiles in other company.
void beginnings(const char* name, Scales scales, int d, const Options& options) {
  Data data;
  data.seed = options.seed + 23;
  data.uneven = true;
  ForwardConfig config;
  config.head_dim = d;
  const auto output = [&](int length) {
    Problem problem({{length}, 2, 1, d}, scales, -1, 0, flamia::sm90::query_tile(config));
    problem.make_operands(data);
    run(problem, options);
    return problem.output.host();
  };
  const auto whole = output(1500);
  long long changed = 0;
  for (int length = 64; length < 1500; length += 64) changed += differences(output(length), whole);
  Problem full({{704}, 2, 1, d}, scales, -1, -1, flamia::sm90::query_tile(config));
  full.make_operands(data);
  run(full, options);
  const long long full_changed = differences(full.output.host(), whole);
  std::printf("  %-44s elements changed by what comes after them %lld, without a mask (control) %lld\n", name, changed,
              full_changed);
  expect(changed == 0 && full_changed > 0, "beginnings");
}

}  // namespace bench

int main(int argc, char** argv) {
  using namespace bench;
  Options options;
  for (int i = 1; i < argc; ++i) {
    options.tilesum |= std::strcmp(argv[i], "tilesum") == 0;
    options.tiny |= std::strcmp(argv[i], "tiny") == 0;
    options.quick |= std::strcmp(argv[i], "quick") == 0;
  }
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "mitchell") == 0) options.kind = Exponential::mitchell;
    if (std::strcmp(argv[i], "schraudolph") == 0) options.kind = Exponential::schraudolph;
  }
  options.tilesum |= options.kind != Exponential::hardware;
  options.seed = static_cast<std::uint64_t>(std::time(nullptr));
  for (int i = 1; i + 1 < argc; ++i)
    if (std::strcmp(argv[i], "seed") == 0) options.seed = std::strtoull(argv[i + 1], nullptr, 10);
  std::printf("seed %llu, %s\n", static_cast<unsigned long long>(options.seed), options.tilesum ? "tilesum" : "phase32");
  Data plain, uneven, peaked, sink;
  plain.seed = uneven.seed = peaked.seed = sink.seed = options.seed;
  uneven.uneven = true;
  peaked.query_gain = 6;
  sink.sink = true;
  const std::vector<int> ragged = {1, 2, 64, 127, 128, 129, 191, 192, 193, 200, 255, 256, 383, 384, 500, 1024, 1500};
  if (options.kind != Exponential::hardware) return check_line(options);
  if (options.tiny) {  // for the sanitizer
    check("block causal", {{1, 130, 300}, 2, 1, 128}, Scales::block, -1, 0, uneven, options);
    check("token window 100, 20", {{300, 70}, 2, 2, 64}, Scales::token, 100, 20, uneven, options);
    return failures != 0;
  }
  recorded("token causal", Scales::token, -1, 0, options);
  recorded("block causal", Scales::block, -1, 0, options);
  recorded("block window 100, 30", Scales::block, 100, 30, options);
  recorded("nvfp4b causal", Scales::nvfp4_block, -1, 0, options);
  const struct {
    Scales scales;
    const char* name;
  } kinds[] = {{Scales::tensor, "tensor"}, {Scales::block, "block"}, {Scales::sticky_block, "sticky"},
               {Scales::token, "token"},   {Scales::nvfp4, "nvfp4"}, {Scales::nvfp4_block, "nvfp4b"}};
  for (int d : {128, 64}) {
    for (const auto& kind : kinds) {
      const std::string n = std::string(kind.name) + " d" + std::to_string(d);
      const Shape shape{ragged, 4, 2, d};
      check((n + " causal").c_str(), shape, kind.scales, -1, 0, plain, options);
      if (options.quick) continue;
      check((n + " full").c_str(), shape, kind.scales, -1, -1, plain, options);
      check((n + " causal uneven").c_str(), shape, kind.scales, -1, 0, uneven, options);
      check((n + " full uneven").c_str(), shape, kind.scales, -1, -1, uneven, options);
      check((n + " window 100, 0 uneven").c_str(), shape, kind.scales, 100, 0, uneven, options);
      check((n + " window 300, 40").c_str(), shape, kind.scales, 300, 40, uneven, options);
      check((n + " window 0, 130").c_str(), shape, kind.scales, 0, 130, plain, options);
      check((n + " causal peaked").c_str(), shape, kind.scales, -1, 0, peaked, options);
      check((n + " causal sink").c_str(), shape, kind.scales, -1, 0, sink, options);
    }
    if (options.quick) break;
  }
  if (!options.quick) {
    Data mean = plain;
    mean.value_mean = 1;
    check("16k keys, V ~ N(1,1), block", {{16384}, 1, 1, 128}, Scales::block, -1, 0, mean, options, 3e-3, 1e-2);
    check("64k keys, V ~ N(1,1), token", {{65536}, 1, 1, 128}, Scales::token, -1, 0, mean, options, 3e-3, 1e-2);
    for (int operand = 0; operand < 3; ++operand) {
      for (float bad : {NAN, INFINITY, -INFINITY}) {
        for (int position : {128, 200, 255}) {
          Data data = uneven;
          data.poison = bad;
          data.poison_operand = operand;
          data.poison_document = 1;
          data.poison_position = position;
          const std::string name =
              "poison " + std::to_string(operand) + " at " + std::to_string(position) + " by " + std::to_string(bad);
          check((name + " token").c_str(), {{300, 700}, 4, 2, 128}, Scales::token, -1, 0, data, options);
          if (position == 200) check((name + " block").c_str(), {{300, 700}, 4, 2, 128}, Scales::block, -1, 0, data, options);
        }
      }
    }
  }
  for (int d : {128, 64}) {
    for (int from : {70, 200, 333}) exactness("token causal", Scales::token, from, -1, 0, d, options);
    exactness("token window 150, 0", Scales::token, 333, 150, 0, d, options);
    exactness("block causal (from the block on)", Scales::block, 333, -1, 0, d, options);
    beginnings("block causal", Scales::block, d, options);
    beginnings("token causal", Scales::token, d, options);
    exactness("nvfp4 causal", Scales::nvfp4, 333, -1, 0, d, options);
    exactness("nvfp4b causal (from the block on)", Scales::nvfp4_block, 333, -1, 0, d, options);
    beginnings("nvfp4b causal", Scales::nvfp4_block, d, options);
  }
  std::printf("%s: %d failures\n", failures ? "FAILED" : "ok", failures);
  return failures != 0;
}
