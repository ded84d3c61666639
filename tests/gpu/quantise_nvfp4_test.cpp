// SPDX-License-Identifier: Apache-2.0
// NVFP4 beside E4M3 in one launch of the GPU quantiser: codes, scales, FP16 values and exponents against the host quantiser, every bit; the
// E4M3 codes and exponents as without NVFP4.
#include "quantize/cuda/dequantise.hpp"
#include "quantize/cuda/expand_nvfp4.hpp"
#include "support/operand.hpp"

namespace flamia::test {
namespace {

using quantize::gpu::Group;
using quantize::gpu::Prefix;
using quantize::gpu::QuantiseParams;

class QuantiseNvfp4 : public GpuTest {};

struct Case {
  DType dtype = DType::bf16;
  int heads = 2, dim = 128;
  Group group = Group::block;
  Prefix prefix = Prefix::none;
  bool codes = true;  // E4M3, and NVFP4's own
  bool values() const { return codes && prefix != Prefix::sticky; }
};

QuantiseParams params_of(const Case& c) {
  QuantiseParams p;
  p.input.dtype = c.dtype;
  p.heads = c.heads;
  p.head_dim = c.dim;
  p.rotate = true;
  p.group = c.group;
  p.prefix = c.prefix;
  p.headroom = c.prefix == Prefix::sticky ? 2 : 0;
  return p;
}

struct OnDevice : DeviceOperand {
  OnDevice(const Case& c, const Packing& packing, const std::vector<std::uint16_t>& data)
      : DeviceOperand(params_of(c), packing, data),
        rows(c.heads * slots * c.dim),
        rows16(c.heads * slots * c.dim),
        halves(c.heads * slots * c.dim),
        nvfp4_exponents(c.heads * slots),
        codes(c.heads * slots * c.dim / 2),
        scales(c.heads * slots * c.dim / 16) {
    params.rows = c.codes ? rows.get() : nullptr;
    params.rows16 = c.values() ? rows16.get() : nullptr;
    params.nvfp4 = {halves.get(), nvfp4_exponents.get(), c.codes ? codes.get() : nullptr, c.codes ? scales.get() : nullptr};
  }
  Status run() {
    if (Status status = schedule(nullptr); !status.ok()) return status;
    if (Status status = quantize::gpu::launch_quantise(params, nullptr); !status.ok()) return status;
    cuda_ok(cudaDeviceSynchronize());
    return {};
  }
  /// Values in FP16 once more, from codes and scales alone.
  std::vector<std::uint16_t> expand(const Case& c) const {
    if (!c.codes) return {};
    DeviceBuffer<std::uint16_t> made(c.heads * slots * c.dim);
    made.poison();
    quantize::gpu::ExpandNvfp4Params p;
    p.codes = codes.get(), p.scales = scales.get(), p.halves = made.get(), p.heads = c.heads;
    p.head_dim = c.dim;
    p.slots = slots;
    p.used_slots = &view.totals->slots;
    return downloaded(quantize::gpu::launch_expand_nvfp4(p, nullptr), made);
  }
  /// Values in BF16, from the E4M3 codes and exponents.
  std::vector<std::uint16_t> dequantise(const Case& c) const {
    DeviceBuffer<std::uint16_t> made(c.heads * slots * c.dim);
    made.poison();
    quantize::gpu::DequantiseParams p;
    p.operands[0] = {rows.get(), params.exponents, made.get(), c.heads};
    p.head_dim = c.dim;
    p.slots = slots;
    p.used_slots = &view.totals->slots;
    return downloaded(quantize::gpu::launch_dequantise(p, nullptr), made);
  }
  static std::vector<std::uint16_t> downloaded(const Status& launched, const DeviceBuffer<std::uint16_t>& made) {
    EXPECT_TRUE(launched.ok()) << launched.message();
    cuda_ok(cudaDeviceSynchronize());
    return made.download();
  }
  DeviceBuffer<std::uint8_t> rows;
  DeviceBuffer<std::uint16_t> rows16, halves;
  DeviceBuffer<std::uint8_t> nvfp4_exponents, codes, scales;
};

/// Counted over the used slots.
struct Wrong {
  std::int64_t tokens = 0, flagged = 0, codes = 0, scales = 0, halves = 0, expanded = 0, exponents = 0;
  std::int64_t sum() const { return codes + scales + halves + expanded + exponents; }
};

Wrong compare(const Case& c, const Packing& packing, const std::vector<std::uint16_t>& data, const OnDevice& device) {
  schedule::Documents documents;
  EXPECT_TRUE(schedule::Documents::create(packing.cu_seqlens, packing.tokens, &documents).ok());
  quantize::QuantiseInput input;
  input.tensor = {data.data(), c.dtype, 0, 0};
  input.heads = c.heads;
  input.dim = c.dim;
  input.rotate = true;
  Quantisation form;
  form.element = Element::e2m1;
  form.group = {flamia::Group::Kind::blocks, 1, 16};
  form.scale = ScaleType::e4m3;
  form.rule = ScaleRule::amax_or_smaller;
  quantize::QuantisedTensor host;
  const Status status = quantize::quantise(input, documents, form, 0, &host);
  EXPECT_TRUE(status.ok()) << status.message();
  const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  const std::vector<std::uint8_t> codes = device.codes.download(), scales = device.scales.download();
  const std::vector<std::uint8_t> exponents = device.nvfp4_exponents.download();
  const std::vector<std::uint16_t> halves = device.halves.download(), expanded = device.expand(c);
  const int groups = c.dim / 16;
  Wrong wrong;
  for (std::int64_t head = 0; head < c.heads; ++head) {
    std::int64_t slot = 0;
    for (const schedule::DocumentRange& range : documents.ranges()) {
      const std::int64_t padded = padded_slots(range.length);
      for (std::int64_t p = 0; p < padded; ++p, ++slot) {
        const std::int64_t row = (range.start + p) * c.heads + head, here = head * device.slots + slot;
        const bool token = p < range.length;
        const bool flagged = token && host.scales[at(row * groups)] == 0x7f;
        wrong.tokens += token, wrong.flagged += flagged;
        wrong.exponents += exponents[at(here)] != (flagged ? 255 : 127);
        for (int channel = 0; channel < c.dim; ++channel) {
          const std::uint32_t byte = token ? host.codes[at((row * c.dim + channel) / 2)] : 0u;
          const std::uint32_t code = byte >> 4 * (channel % 2) & 15u;
          const std::uint8_t scale = token ? host.scales[at(row * groups + channel / 16)] : std::uint8_t{0};
          if (c.codes) {
            wrong.codes += (codes[at((here * c.dim + channel) / 2)] >> 4 * (channel % 2) & 15u) != code;
            wrong.scales += scales[at(here * groups + channel / 16)] != scale;
          }
          const float value =
              flagged ? 0.f : numerics::mul(numerics::decode<numerics::kE2M1>(code), numerics::decode<numerics::kE4M3>(scale));
          EXPECT_EQ(numerics::decode_f16(numerics::encode_f16(value)), value);  // FP16 holds it
          const std::size_t element = at(quantize::gpu::rows_f16_offset(device.slots, c.dim, head, slot, channel));
          wrong.halves += halves[element] != numerics::encode_f16(value);
          wrong.expanded += c.codes && expanded[element] != numerics::encode_f16(value);
        }
      }
    }
  }
  return wrong;
}

void check(const Case& c, const Packing& packing, Random& random) {
  SCOPED_TRACE(testing::Message() << packing.tokens << " tokens, dim " << c.dim << ", heads " << c.heads << ", group "
                                  << static_cast<int>(c.group) << ", prefix " << static_cast<int>(c.prefix) << ", f16 "
                                  << (c.dtype == DType::f16) << ", codes " << c.codes);
  auto data = random_tensor(random, c.dtype, packing.tokens, std::int64_t{c.heads} * c.dim, c.dim, true);
  OnDevice device(c, packing, data);
  const Status status = device.run();
  ASSERT_TRUE(status.ok()) << status.message();
  const Wrong wrong = compare(c, packing, data, device);
  EXPECT_EQ(wrong.codes, 0);
  EXPECT_EQ(wrong.scales, 0);
  EXPECT_EQ(wrong.halves, 0);
  EXPECT_EQ(wrong.expanded, 0);
  EXPECT_EQ(wrong.exponents, 0);

  OnDevice plain(c, packing, data);
  plain.params.nvfp4 = {};
  plain.params.rows16 = nullptr;
  ASSERT_TRUE(plain.run().ok());
  EXPECT_EQ(first_difference(device.rows.download(), plain.rows.download()), -1);
  EXPECT_EQ(first_difference(device.exponents.download(), plain.exponents.download()), -1);
  if (c.values()) {
    const std::vector<std::uint16_t> values = device.rows16.download(), expected = plain.dequantise(c);
    std::int64_t used = 0, different = 0;
    for (std::size_t d = 1; d < packing.cu_seqlens.size(); ++d)
      used += padded_slots(packing.cu_seqlens[d] - packing.cu_seqlens[d - 1]);
    for (std::int64_t head = 0; head < c.heads; ++head)
      for (std::int64_t i = head * device.slots * c.dim; i < (head * device.slots + used) * c.dim; ++i)
        different += values[static_cast<std::size_t>(i)] != expected[static_cast<std::size_t>(i)];
    EXPECT_EQ(different, 0);
  }

  if (packing.tokens < 60) return;
  for (std::size_t i = 0; i < data.size(); i += 5) data[i] ^= 0x8000;  // control
  EXPECT_GT(compare(c, packing, data, device).sum(), 0);
}

TEST_F(QuantiseNvfp4, EqualsTheHostInEveryBit) {
  Random random(31);
  const Packing packing = pack({100, 0, 32, 1, 17, 16, 333, 64}, 9);
  for (const int dim : {64, 128})
    for (const DType dtype : {DType::bf16, DType::f16})
      for (const Group group : {Group::token, Group::block})
        for (const Prefix prefix : {Prefix::none, Prefix::record, Prefix::sticky})
          for (const bool codes : {true, false}) check({dtype, 3, dim, group, prefix, codes}, packing, random);
}

TEST_F(QuantiseNvfp4, FuzzedPackings) {
  Random random(31);
  for (int n = 0; n < 40 && !HasFailure(); ++n) {
    Case c;
    c.heads = 1 + static_cast<int>(below(random, 4));
    c.dim = below(random, 3) ? 128 : 64;
    c.group = below(random, 2) ? Group::token : Group::block;
    c.prefix = static_cast<Prefix>(below(random, 3));
    check(c, random_packing(random, 1200, 10), random);
  }
}

TEST_F(QuantiseNvfp4, RefusesWhatItCannotDo) {
  Random random(31);
  const Case c;
  const Packing packing = pack({70});
  OnDevice device(c, packing, random_tensor(random, c.dtype, 70, 256, 128, false));
  const auto refused = [&](auto change) {
    QuantiseParams p = device.params;
    change(p);
    return !quantize::gpu::launch_quantise(p, nullptr).ok();
  };
  EXPECT_TRUE(refused([](QuantiseParams& p) { p.rotate = false; }));
  EXPECT_TRUE(refused([](QuantiseParams& p) { p.group = Group::tensor; }));
  EXPECT_TRUE(refused([](QuantiseParams& p) { p.transposed = p.rows, p.rows = nullptr; }));
  EXPECT_TRUE(refused([](QuantiseParams& p) { p.nvfp4.exponents = nullptr; }));
  EXPECT_TRUE(refused([](QuantiseParams& p) { p.nvfp4 = {}; }));
  EXPECT_TRUE(refused([](QuantiseParams& p) { p.prefix = Prefix::sticky; }));
  EXPECT_TRUE(refused([](QuantiseParams& p) { p.nvfp4.scales = nullptr; }));
  EXPECT_TRUE(refused([](QuantiseParams& p) { p.nvfp4.halves += 1; }));
  EXPECT_TRUE(device.run().ok());
}

}  // namespace
}  // namespace flamia::test
