// SPDX-License-Identifier: Apache-2.0
// The probabilities themselves: unfolded codes of P that the GPU kernel multiplies against those of the CPU backend with the tensor
// core's accumulator. What may differ: exp2's last bit moves a code across a rounding boundary. Share and cause are printed.
#include "kernels/cuda/backend/forward_call.hpp"
#include "support/attention.hpp"
#include "support/slots.hpp"

namespace flamia::test {
namespace {

class ForwardCodes : public GpuTest, public testing::WithParamInterface<const char*> {};

/// codes * 2^(reference they were made with - final reference), [query_heads][tokens][tokens]; 0 for pairs that do not meet.
std::vector<float> gpu_codes(const Input& in, const Recipe& recipe) {
  const Problem& p = in.problem;
  PlanOptions options;
  options.device = Device::cuda;
  options.training = false;
  Plan plan;
  if (const Status s = Plan::create(p, recipe, options, &plan); !s.ok()) throw std::runtime_error(s.message());
  const DeviceOperands operands(in);
  DeviceBuffer<std::uint8_t> workspace(static_cast<std::int64_t>(plan.workspace_bytes(Pass::forward)));
  DeviceBuffer<std::uint16_t> o(p.tokens * p.query_heads * p.head_dim);
  DeviceBuffer<float> lse(p.tokens * p.query_heads);
  ForwardTensors tensors;
  tensors.q = {operands.q.get(), DType::bf16};
  tensors.k = {operands.k.get(), DType::bf16};
  tensors.v = {operands.v.get(), DType::bf16};
  tensors.cu_seqlens = operands.cu_seqlens.get();
  tensors.o = {o.get(), DType::bf16};
  tensors.lse = lse.get();
  const cuda::ForwardCall call(plan, tensors, nullptr, workspace.get(), nullptr);
  EXPECT_TRUE(call.schedule().ok());
  EXPECT_TRUE(call.quantise().ok());

  sm90::ForwardParams params = call.params();
  sm90::ForwardConfig config = call.config();
  const std::int64_t keys = (p.tokens + sm90::kKeyTile - 1) / sm90::kKeyTile * sm90::kKeyTile, tiles = keys / sm90::kKeyTile;
  const std::int64_t rows = p.query_heads * params.slots;
  DeviceBuffer<std::uint8_t> codes(rows * keys);
  DeviceBuffer<float> moment(rows * tiles), final_reference(rows), sum(rows);
  config.record_codes = true;
  params.recorded_codes = codes.get();
  params.recorded_reference = moment.get();
  params.record_keys = static_cast<std::int32_t>(keys);
  params.row_reference = final_reference.get();
  params.row_sum = sum.get();
  cuda_ok(sm90::launch_forward(params, config, nullptr));
  cuda_ok(cudaDeviceSynchronize());

  const std::vector<std::uint8_t> code = codes.download();
  const std::vector<float> then = moment.download(), final = final_reference.download();
  std::vector<float> found(static_cast<std::size_t>(p.query_heads * p.tokens * p.tokens), 0.f);
  const schedule::MaskReach reach = schedule::reach_of(p.mask.causal, p.mask.left, p.mask.right);
  const schedule::Documents documents = in.documents();
  for (std::int64_t head = 0; head < p.query_heads; ++head) {
    std::int64_t slot = 0;
    for (const schedule::DocumentRange& range : documents.ranges()) {
      for (std::int64_t i = 0; i < range.length; ++i) {
        const std::int64_t row = head * params.slots + slot + i;
        const schedule::Interval seen = schedule::visible_keys(reach, i, range.length);
        for (std::int64_t j = seen.begin; j < seen.end; ++j) {
          const float steps =
              then[static_cast<std::size_t>(row * tiles + j / sm90::kKeyTile)] - final[static_cast<std::size_t>(row)];
          found[static_cast<std::size_t>((head * p.tokens + range.start + i) * p.tokens + range.start + j)] =
              numerics::decode<numerics::kE4M3>(code[static_cast<std::size_t>(row * keys + j)]) * std::exp2(steps);
        }
      }
      slot += padded_slots(range.length);
    }
  }
  return found;
}

struct Share {
  std::int64_t pairs = 0, equal = 0, neighbours = 0;  // neighbours: one step of the format apart
  double of_equal() const { return static_cast<double>(equal) / static_cast<double>(pairs); }
};

Share compare(const Input& in, const std::vector<float>& gpu, const std::vector<float>& cpu) {
  Share share;
  const schedule::Documents documents = in.documents();
  const Problem& p = in.problem;
  const schedule::MaskReach reach = schedule::reach_of(p.mask.causal, p.mask.left, p.mask.right);
  for (std::int64_t head = 0; head < p.query_heads; ++head)
    for (const schedule::DocumentRange& range : documents.ranges())
      for (std::int64_t i = 0; i < range.length; ++i) {
        const schedule::Interval seen = schedule::visible_keys(reach, i, range.length);
        for (std::int64_t j = seen.begin; j < seen.end; ++j) {
          const auto at = static_cast<std::size_t>((head * p.tokens + range.start + i) * p.tokens + range.start + j);
          const float a = gpu[at], b = cpu[at];
          ++share.pairs;
          share.equal += a == b;
          share.neighbours += a != b && std::fabs(a - b) <= std::max(std::fabs(a), std::fabs(b)) / 8.f + std::ldexp(1.f, -9);
        }
      }
  return share;
}

std::vector<float> cpu_codes(const Input& in, const std::string& text) {
  cpu::Probe probe;
  probe.record_codes = true;
  RunOptions options;
  options.backward = false;
  options.probe = &probe;
  run(in, recipe(text), options);
  return probe.forward_codes;
}

/// The GPU's codes of `name` against the CPU's of `twin`. `fp32`: of the CPU's without the model of an accumulator; empty: not compared.
void expect_codes(const std::string& name, const std::string& twin, const std::string& fp32, bool causal) {
  const Input in = normal_input({{700, 300, 65, 1}, 2, 1, 128, {causal, -1, -1}, 0}, fresh_seed());
  const std::vector<float> gpu = gpu_codes(in, recipe(name)), cpu = cpu_codes(in, twin);
  const Share share = compare(in, gpu, cpu);
  std::cout << "[ measured ] " << name << (causal ? ", causal: " : ", full: ") << share.equal << " of " << share.pairs
            << " codes equal (" << 100 * share.of_equal() << " %), " << share.neighbours << " one step apart, "
            << share.pairs - share.equal - share.neighbours << " further";
  // A row whose free or careful state hangs on the last bit of a sum (nvfp4: other sums than the CPU's) differs as a whole: .0006 here.
  EXPECT_GE(share.of_equal(), 0.999) << name;
  if (!fp32.empty()) {
    const double without = compare(in, gpu, cpu_codes(in, fp32)).of_equal();
    std::cout << "; with an FP32 accumulator " << 100 * without << " %";
    EXPECT_LT(without, share.of_equal()) << name;  // control: the accumulator's model is what makes them equal
  }
  std::cout << "\n";
  Input other = in;  // control: keys that are not the same
  for (int key = 0; key < 32; ++key)
    for (int c = 0; c < 128; ++c) other.k_row(key, 0)[c] = -other.k_row(key, 0)[c];
  EXPECT_LT(compare(in, gpu_codes(other, recipe(name)), cpu).of_equal(), 0.9995) << name;
}

TEST_P(ForwardCodes, AreThoseOfTheCpu) {
  const std::string name = GetParam();
  for (const bool causal : {true, false}) expect_codes(name, name + " acc=hopper13", name, causal);
}

/// One recipe at a time: the CPU's side, with the tensor core's accumulator, takes its time.
INSTANTIATE_TEST_SUITE_P(Recipes, ForwardCodes,
                         testing::Values("mxfp8", "mxfp8-exact", "fp8-tensor", "mxfp8 ref=phase32", "mxfp8-exact headroom=0",
                                         "mxfp8-exact headroom=0 ref=phase32"));

class ForwardCodesOfNvfp4 : public GpuTest {};

/// Scores in FP16: an accumulator of nearly FP32.
TEST_F(ForwardCodesOfNvfp4, AreThoseOfTheCpu) {
  for (const char* name : {"nvfp4", "nvfp4-exact", "nvfp4-exact headroom=0 ref=phase32"})
    for (const bool causal : {true, false}) expect_codes(name, name, {}, causal);
}

}  // namespace
}  // namespace flamia::test
