// SPDX-License-Identifier: Apache-2.0
// Every kernel of a call once at a small size, against the CPU: what compute-sanitizer runs (ctest -L sanitizer).
#include "support/attention.hpp"
#include "support/training.hpp"

namespace flamia::test {
namespace {

class GpuSmall : public GpuTest {};

TEST_F(GpuSmall, ForwardCalls) {
  const Shape shapes[] = {
      {{130, 0, 1, 70}, 2, 1, 128, {true, -1, -1}, 5},
      {{200, 33}, 2, 2, 64, {false, -1, -1}, 0},
      {{300}, 1, 1, 128, {true, 60, 0}, 0},
  };
  for (const Shape& shape : shapes)
    for (const char* name :
         {"mxfp8", "mxfp8-exact", "fp8-tensor", "mxfp8-exact ref=phase32", "nvfp4-exact", "sagebwd smooth-k=off", "sage3"}) {
      if (name == std::string("sage3") && shape.mask.left >= 0) continue;  // smoothing has no window
      SCOPED_TRACE(std::string(name) + ", first length " + std::to_string(shape.lengths[0]));
      const Input in = normal_input(shape, fresh_seed());
      RunOptions options;
      options.backward = false;
      const Result cpu = run(in, recipe(name), options);
      const GpuForward gpu = gpu_forward(in, recipe(name));
      EXPECT_LT(relative_l2(gpu.o, cpu.o), 8e-3);
      Input other = in;  // control: one key differs
      for (int c = 0; c < shape.head_dim; ++c) other.k_row(0, 0)[c] = -other.k_row(0, 0)[c];
      EXPECT_GT(relative_l2(gpu_forward(other, recipe(name)).o, cpu.o), 8e-3);
    }
}

TEST_F(GpuSmall, TrainingCalls) {
  for (const int dim : {128, 64})
    for (const char* name : {"mxfp8", "mxfp8-exact", "mxfp8 ds=e4m3", "mxfp8-exact ds=e4m3", "nvfp4-exact", "sagebwd"})
      for (const bool deterministic : {false, true}) {
        SCOPED_TRACE(std::string(name) + ", head dim " + std::to_string(dim) + (deterministic ? ", in order" : ""));
        const Input in = normal_input({{200, 0, 1, 70}, 2, 1, dim, {true, -1, -1}, 5}, fresh_seed());
        TrainingOptions options;
        options.deterministic = deterministic;
        const GradientErrors e = gradient_errors(gpu_training(in, recipe(name), options), cpu_training(in, name));
        EXPECT_LT(std::max({e.d_q, e.d_k, e.d_v}), 5e-2) << e;
        Input other = in;  // control: one key differs
        for (int c = 0; c < dim; ++c) other.k_row(0, 0)[c] = -other.k_row(0, 0)[c];
        const GradientErrors far = gradient_errors(gpu_training(other, recipe(name), options), cpu_training(in, name));
        EXPECT_GT(std::max({far.d_q, far.d_k, far.d_v}), 5e-2) << far;
      }
}

}  // namespace
}  // namespace flamia::test
