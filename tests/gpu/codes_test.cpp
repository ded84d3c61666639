// SPDX-License-Identifier: Apache-2.0
// The unfolded codes of P: those of the backward kernel against the forward kernel's own, as docs/numerics.md, section 3 defines equality.
#include <cmath>

#include "kernels/cuda/backend/backward_call.hpp"
#include "kernels/cuda/backend/forward_call.hpp"
#include "support/slots.hpp"
#include "support/training.hpp"

namespace flamia::test {
namespace {

class GpuCodes : public GpuTest {};

/// [query_heads][slots][keys]; keys rounded up to whole tiles.
struct Codes {
  std::int64_t slots, keys;
  std::vector<std::uint8_t> forward, backward;
  std::vector<float> moment;  // [query_heads][slots][keys / 128]: the reference that the forward pass made its codes with
  std::vector<float> final;   // [query_heads][slots]
};

Codes record(const Input& in, const Recipe& recipe, bool deterministic) {
  GpuTraining call(in.problem, recipe, {deterministic, DType::f32});
  const DeviceOperands operands(in);
  std::int64_t longest = 0;
  for (std::size_t b = 1; b < in.cu_seqlens.size(); ++b)
    longest = std::max<std::int64_t>(longest, in.cu_seqlens[b] - in.cu_seqlens[b - 1]);
  Codes codes;
  codes.slots = cuda::slots_of(in.problem);
  codes.keys = (longest + sm90::kKeyTile - 1) / sm90::kKeyTile * sm90::kKeyTile;
  const std::int64_t rows = in.problem.query_heads * codes.slots;
  DeviceBuffer<std::uint8_t> first(rows * codes.keys), second(rows * codes.keys);
  DeviceBuffer<float> moment(rows * codes.keys / sm90::kKeyTile);

  const ForwardTensors forward_tensors = call.forward_tensors(operands);
  const cuda::ForwardCall forward(call.plan(), forward_tensors, call.saved(), call.forward_workspace(), nullptr);
  EXPECT_TRUE(forward.schedule().ok() && forward.quantise().ok());
  sm90::ForwardParams forward_params = forward.params();
  forward_params.recorded_codes = first.get();
  forward_params.recorded_reference = moment.get();
  forward_params.record_keys = static_cast<std::int32_t>(codes.keys);
  sm90::ForwardConfig forward_config = forward.config();
  forward_config.record_codes = true;
  cuda_ok(sm90::launch_forward(forward_params, forward_config, nullptr));

  const BackwardTensors backward_tensors = call.backward_tensors(operands);
  const cuda::BackwardCall backward(call.plan(), backward_tensors, call.saved(), call.backward_workspace(), nullptr);
  EXPECT_TRUE(backward.schedule().ok() && backward.quantise().ok());
  sm90::BackwardParams backward_params = backward.params();
  backward_params.recorded_codes = second.get();
  backward_params.record_keys = static_cast<std::int32_t>(codes.keys);
  sm90::BackwardConfig backward_config = backward.config();
  backward_config.record_codes = true;
  EXPECT_TRUE(backward.run(backward_params, backward_config).ok());
  cuda_ok(cudaDeviceSynchronize());
  codes.forward = first.download(), codes.backward = second.download(), codes.moment = moment.download();
  codes.final = download(forward_params.row_reference, rows);
  return codes;
}

struct Difference {
  std::int64_t pairs = 0, missing = 0, nonzero = 0, normal = 0, subnormal = 0;
  std::int64_t far = 0;  // of the normal ones: by more than one step of E4M3
  double greatest = 0;   // |P| difference of the subnormal ones
};

/// Over the visible pairs. `shift`: compare key j with key j + shift, a control.
Difference difference(const Input& in, const Codes& codes, std::int64_t shift = 0) {
  constexpr double kUnit = 0x1p-8;  // codes carry 2^8
  constexpr float kLeastNormal = 0x1p-6f;
  const schedule::MaskReach reach = schedule::reach_of(in.problem.mask.causal, in.problem.mask.left, in.problem.mask.right);
  Difference d;
  for (int head = 0; head < in.problem.query_heads; ++head) {
    std::int64_t slot_start = 0;
    for (std::size_t b = 1; b < in.cu_seqlens.size(); ++b) {
      const std::int64_t length = in.cu_seqlens[b] - in.cu_seqlens[b - 1];
      for (std::int64_t i = 0; i < length; ++i) {
        const std::int64_t row = head * codes.slots + slot_start + i;
        const schedule::Interval visible = schedule::visible_keys(reach, i, length);
        for (std::int64_t j = visible.begin; j + shift < visible.end; ++j) {
          const std::uint8_t f = codes.forward[static_cast<std::size_t>(row * codes.keys + j)];
          const std::uint8_t g = codes.backward[static_cast<std::size_t>(row * codes.keys + j + shift)];
          ++d.pairs;
          if (f >= 0x7f || g >= 0x7f) {  // a sign or NaN: the poison, or worse
            ++d.missing;
            continue;
          }
          const float moment = codes.moment[static_cast<std::size_t>(row * (codes.keys / sm90::kKeyTile) + j / sm90::kKeyTile)];
          const float x = numerics::decode<numerics::kE4M3>(f) * std::exp2(moment - codes.final[static_cast<std::size_t>(row)]);
          const float y = numerics::decode<numerics::kE4M3>(g);
          d.nonzero += x != 0.f || y != 0.f;
          if (x == y) continue;
          if (std::max(x, y) >= kLeastNormal) {
            ++d.normal;
            d.far += std::abs(x - y) > std::max(x, y) / 8;
          } else {
            ++d.subnormal;
            d.greatest = std::max(d.greatest, kUnit * std::abs(static_cast<double>(x) - static_cast<double>(y)));
          }
        }
      }
      slot_start += padded_slots(length);
    }
  }
  return d;
}

std::ostream& operator<<(std::ostream& out, const Difference& d) {
  return out << d.pairs << " pairs, " << d.missing << " missing, " << d.normal << " normal and " << d.subnormal
             << " subnormal differ of " << d.nonzero << ", " << d.far << " normal ones by more than a step, subnormal ones by "
             << d.greatest << " at most";
}

/// What one recording must show, and a control that it could show the opposite.
void expect_forward_codes(const Input& in, const Codes& codes, bool sharp, bool rises) {
  const Difference d = difference(in, codes);
  EXPECT_EQ(d.missing, 0) << d;
  EXPECT_LE(d.greatest, 8e-6) << d;
  EXPECT_EQ(d.far, 0) << d;
  // One code in a million lies so near a rounding border that t - m, rounded with another m, falls to the other side: two of 700,000 are chance,
  // five are not. Sharp rows move their
  // reference after a tile was made: what was rounded then and is subnormal now is half a step away.
  const auto share = [&](double part) { return static_cast<std::int64_t>(part * static_cast<double>(d.nonzero)); };
  // tilesum (rises): m rises by six steps or more once a row is free; what its first tiles rounded in finer steps then differs likewise.
  EXPECT_LE(d.normal, rises ? share(3e-3) : sharp ? share(2e-3) : share(1e-6) + 4) << d;
  if (!sharp) {
    EXPECT_LE(d.subnormal, rises ? share(3e-2) : share(1e-5) + 2) << d;
  }
  std::cout << "[ codes    ] " << d << std::endl;
  const Difference control = difference(in, codes, 1);  // the neighbouring key's code is another one
  EXPECT_GT(control.far, control.nonzero / 10);
  EXPECT_GT(control.normal, control.nonzero / 10);
}

TEST_F(GpuCodes, BackwardRecomputesTheForwardCodes) {
  for (const char* name : {"mxfp8", "mxfp8-exact", "fp8-tensor", "mxfp8 ds=e4m3", "mxfp8-exact ds=e4m3",
                           "mxfp8-exact headroom=0 ref=phase32", "nvfp4", "nvfp4-exact ref=phase32"})
    for (const int dim : {64, 128})
      for (const Mask mask : {Mask{true, -1, -1}, Mask{false, -1, -1}, Mask{false, 200, 90}})
        for (const float sharp : {1.f, 4.f}) {  // N(0, 1); logits times 16, as in sharp heads
          Input in = normal_input({{37, 700, 0, 1, 450}, 2, 1, dim, mask, 0}, fresh_seed());
          for (auto* x : {&in.q, &in.k})
            for (float& value : *x) value = numerics::round_bf16(value * sharp);
          for (const bool deterministic : {false, true}) {  // sets of kernels of their own
            SCOPED_TRACE(std::string(name) + ", dim " + std::to_string(dim) + ", x" + std::to_string(sharp) +
                         (deterministic ? ", in order" : ""));
            expect_forward_codes(in, record(in, recipe(name), deterministic), sharp != 1.f,
                                 recipe(name).softmax.reference == RowReferenceRule::tilesum);
          }
        }
}

}  // namespace
}  // namespace flamia::test
