// SPDX-License-Identifier: Apache-2.0
// Gradients on the GPU where the data is unkind: outliers, sinks, ties, zeros, magnitudes at both ends. The CPU backend is the measure, row by row.
#include <algorithm>
#include <functional>

#include "support/training.hpp"

namespace flamia::test {
namespace {

class GpuGradientsEdge : public GpuTest {};

using Change = std::function<void(Input&)>;

void scale_tokens(std::vector<float>& x, const Input& in, int heads, std::int64_t begin, std::int64_t end, float factor) {
  for (std::int64_t i = begin * heads * in.problem.head_dim; i < end * heads * in.problem.head_dim; ++i)
    x[static_cast<std::size_t>(i)] = numerics::round_bf16(x[static_cast<std::size_t>(i)] * factor);
}
void scale_q(Input& in, std::int64_t begin, std::int64_t end, float f) {
  scale_tokens(in.q, in, in.problem.query_heads, begin, end, f);
}
void scale_k(Input& in, std::int64_t begin, std::int64_t end, float f) {
  scale_tokens(in.k, in, in.problem.key_heads, begin, end, f);
}
void scale_v(Input& in, std::int64_t begin, std::int64_t end, float f) {
  scale_tokens(in.v, in, in.problem.key_heads, begin, end, f);
}
void scale_d_o(Input& in, std::int64_t begin, std::int64_t end, float f) {
  scale_tokens(in.d_o, in, in.problem.query_heads, begin, end, f);
}

/// Half of the queries lean on key `at`, whose value is small.
void make_sink(Input& in, std::int64_t at, float value) {
  for (int head = 0; head < in.problem.key_heads; ++head)
    for (int c = 0; c < in.problem.head_dim; ++c) in.k_row(at, head)[c] = 3.f;
  scale_v(in, at, at + 1, value);
}

/// Error of each row relative to its own norm, or to a quarter of the median row where it is less (a small row is a difference of
/// large terms): an outlier elsewhere lends no room.
struct RowErrors {
  double median, of_99_percent, worst;
};
RowErrors row_errors(const std::vector<float>& got, const std::vector<float>& want, int dim) {
  std::vector<double> norm, error;
  for (std::size_t row = 0; row < want.size(); row += static_cast<std::size_t>(dim)) {
    double n = 0, e = 0;
    for (std::size_t i = row; i < row + static_cast<std::size_t>(dim); ++i) {
      const double a = static_cast<double>(got[i]), b = static_cast<double>(want[i]);
      n += b * b, e += (a - b) * (a - b);
    }
    norm.push_back(std::sqrt(n));
    error.push_back(std::isnan(e) ? 1e300 : std::sqrt(e));
  }
  std::vector<double> sorted = norm;
  std::sort(sorted.begin(), sorted.end());
  const double least = std::max(0.25 * sorted[sorted.size() / 2], 1e-300);
  for (std::size_t i = 0; i < error.size(); ++i) error[i] /= std::max(norm[i], least);
  std::sort(error.begin(), error.end());
  return {error[error.size() / 2], error[error.size() * 99 / 100], error.back()};
}

constexpr RowErrors kBars{2e-2, 0.15, 0.5};

struct Case {
  const char* name;
  Change change;
  /// Rows that lean on one key have a dQ that is what an accumulator leaves of a difference: there the CPU must have the tensor core's, and
  /// the bars are the median's alone.
  bool peaked = false;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {"plain", [](Input&) {}},
      {"one dO x 10^4",  // of a query with next to no scores: else its row reference may lie at a step's edge, where the CPU and the GPU have another D'
       [](Input& in) { scale_q(in, 250, 251, 0x1p-10f), scale_d_o(in, 250, 251, 1e4f); }},
      {"sinks with small V",
       [](Input& in) {
         make_sink(in, 0, 0x1p-14f);
         make_sink(in, 200, 0x1p-18f);
       },
       true},
      {"sink with V = 0", [](Input& in) { make_sink(in, 200, 0.f); }, true},
      {"tied maxima",
       [](Input& in) {  // keys of the second document come again 140 positions later, in another tile
         for (std::int64_t t = 340; t < in.problem.tokens; ++t)
           for (int head = 0; head < in.problem.key_heads; ++head)
             std::copy_n(in.k_row(t - 140, head), in.problem.head_dim, in.k_row(t, head));
       }},
      {"all-zero blocks",
       [](Input& in) {
         scale_q(in, 32, 64, 0.f), scale_k(in, 64, 96, 0.f), scale_v(in, 96, 128, 0.f), scale_d_o(in, 128, 160, 0.f);
         scale_k(in, 200, 328, 0.f), scale_v(in, 328, 456, 0.f), scale_q(in, 500, 501, 0.f);  // whole tiles of keys and of values
       }},
      {"unseen V x 2^10", [](Input& in) { scale_v(in, 450, 451, 1024.f); }, true},
      {"Q and K at 2^-118", [](Input& in) { scale_q(in, 0, 100, 0x1p-118f), scale_k(in, 0, 560, 0x1p-118f); }},
      {"K at 2^-118, Q at 2^118", [](Input& in) { scale_k(in, 0, 560, 0x1p-118f), scale_q(in, 0, 560, 0x1p118f); }},
      {"V at 2^-80, dO at 2^60", [](Input& in) { scale_v(in, 0, 560, 0x1p-80f), scale_d_o(in, 0, 560, 0x1p60f); }},
      {"Q at 2^110, dO at 2^40",  // dS in units of Q's and dO's codes is beyond FP32, dS and dK are not
       [](Input& in) {
         scale_q(in, 0, 560, 0x1p110f), scale_k(in, 0, 560, 0x1p-110f);
         scale_d_o(in, 0, 560, 0x1p40f), scale_v(in, 0, 560, 0x1p-40f);
       }},
      {"Q at 2^-90, dO at 2^-60",
       [](Input& in) {
         scale_q(in, 0, 560, 0x1p-90f), scale_k(in, 0, 560, 0x1p90f);
         scale_d_o(in, 0, 560, 0x1p-60f), scale_v(in, 0, 560, 0x1p60f);
       }},
      {"dO at 2^-70", [](Input& in) { scale_d_o(in, 0, 560, 0x1p-70f); }},
      {"subnormal BF16 in dO", [](Input& in) { scale_d_o(in, 200, 300, 0x1p-128f); }},
      {"logits x 36", [](Input& in) { scale_q(in, 0, 560, 6.f), scale_k(in, 0, 560, 6.f); }, true},
  };
  return all;
}

/// One recipe at a time: the CPU with the tensor core's accumulator takes its time.
class GpuGradientsEdgeOf : public GpuGradientsEdge, public testing::WithParamInterface<const char*> {};

TEST_P(GpuGradientsEdgeOf, AgreesWithTheCpuRowByRow) {
  const std::string name = GetParam();
  const bool modelled = name.rfind("nvfp4", 0) != 0;  // the model of the accumulator is for FP8 products alone
  for (const auto& [what, change, peaked] : cases()) {
    if (peaked && !modelled) continue;
    for (const Mask mask : {Mask{true, -1, -1}, Mask{false, -1, -1}}) {
      Input in = normal_input({{200, 360}, 2, 1, 128, mask, 0}, fresh_seed());
      change(in);
      const Result cpu = cpu_training(in, name + (peaked ? " acc=hopper13" : ""));
      for (const bool deterministic : {false, true}) {  // sets of kernels of their own
        SCOPED_TRACE(name + ", " + what + (mask.causal ? ", causal" : ", full") + (deterministic ? ", in order" : ""));
        const Result gpu = gpu_training(in, recipe(name), {deterministic, DType::f32});
        const std::pair<const char*, RowErrors> all[] = {{"dQ", row_errors(gpu.d_q, cpu.d_q, 128)},
                                                         {"dK", row_errors(gpu.d_k, cpu.d_k, 128)},
                                                         {"dV", row_errors(gpu.d_v, cpu.d_v, 128)}};
        for (const auto& [gradient, e] : all) {
          EXPECT_LT(e.median, kBars.median) << gradient;
          if (peaked) continue;
          EXPECT_LT(e.of_99_percent, kBars.of_99_percent) << gradient;
          EXPECT_LT(e.worst, kBars.worst) << gradient;
        }
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Recipes, GpuGradientsEdgeOf,
                         testing::Values("mxfp8", "mxfp8-exact", "fp8-tensor", "mxfp8 ds=e4m3", "mxfp8-exact ds=e4m3", "nvfp4",
                                         "nvfp4-exact"));

/// Control: rows that are off by a tenth, one that is gone, and another rounding do not pass.
TEST_F(GpuGradientsEdge, RowErrorsNotice) {
  const Input in = normal_input({{200, 360}, 2, 1, 128, {true, -1, -1}, 0}, fresh_seed());
  const Result cpu = cpu_training(in, "mxfp8");
  Result damaged = cpu;
  std::fill_n(damaged.d_q.begin() + 300 * 256, 128, 0.f);
  EXPECT_GT(row_errors(damaged.d_q, cpu.d_q, 128).worst, kBars.worst);
  const Result other = gpu_training(in, recipe("mxfp8 rotate=off"));
  EXPECT_GT(row_errors(other.d_q, cpu.d_q, 128).median, kBars.median);
  EXPECT_GT(row_errors(other.d_k, cpu.d_k, 128).median, kBars.median);
  Input outlier = in;
  scale_d_o(outlier, 250, 251, 1e4f);  // a relative L2 alone would drown 199 rows of dK in it
  EXPECT_GT(row_errors(gpu_training(outlier, recipe("mxfp8")).d_k, cpu.d_k, 128).of_99_percent, kBars.of_99_percent);
}

}  // namespace
}  // namespace flamia::test
