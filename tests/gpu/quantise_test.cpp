// SPDX-License-Identifier: Apache-2.0
// The GPU quantiser against the host's: every byte of codes, exponents and prefix maxima, pads and tail included; and the values that are
// made of codes and exponents again.
#include <memory>

#include "quantize/cuda/dequantise.hpp"
#include "support/operand.hpp"

namespace flamia::test {
namespace {

using quantize::gpu::Group;
using quantize::gpu::Prefix;
using quantize::gpu::QuantiseParams;

class Quantise : public GpuTest {};

struct Case {
  DType dtype = DType::bf16;
  int heads = 2, dim = 128;
  bool rotate = true;
  Group group = Group::block;
  Prefix prefix = Prefix::none;
  sm90::TokenOrder order = sm90::TokenOrder::pi;
  bool rows = true, transposed = true;
  bool values_wanted = true;
  bool values() const { return rows && values_wanted; }  // they are made of the rows
  bool fused = false;                                    // the tensor is the middle third of a [tokens][3 * heads][dim] one
  bool wild = true;
  int headroom = 2;  // of sticky exponents
};

std::int64_t first_of(const Case& c) { return c.fused ? c.heads * c.dim : 0; }

QuantiseParams params_of(const Case& c) {
  QuantiseParams p;
  p.input.dtype = c.dtype;
  if (c.fused) p.input.token_stride = 3 * c.heads * c.dim, p.input.head_stride = c.dim;
  p.heads = c.heads;
  p.head_dim = c.dim;
  p.rotate = c.rotate;
  p.group = c.group;
  p.prefix = c.prefix;
  p.headroom = c.prefix == Prefix::sticky ? c.headroom : 0;
  p.order = c.order;
  return p;
}

/// Schedule, input and outputs of one case on the device.
struct OnDevice : DeviceOperand {
  OnDevice(const Case& c, const Packing& packing, const std::vector<std::uint16_t>& data)
      : DeviceOperand(params_of(c), packing, data, first_of(c)),
        rows(c.heads * slots * c.dim),
        rows16(c.heads * slots * c.dim),
        transposed(c.heads * slots * c.dim),
        prefix(c.heads * slots),
        wanted(c.values()) {
    params.rows = c.rows ? rows.get() : nullptr;
    params.transposed = c.transposed ? transposed.get() : nullptr;
    params.prefix_exponents = c.prefix == Prefix::none ? nullptr : prefix.get();
    // both operands of a launch: the first head, and the others
    values.operands[0] = {rows.get(), exponents.get(), rows16.get(), 1};
    values.operands[1] = {rows.get() + slots * c.dim, exponents.get() + slots, rows16.get() + slots * c.dim, c.heads - 1};
    values.head_dim = c.dim;
    values.slots = slots;
    values.used_slots = &view.totals->slots;
  }
  Status enqueue(cudaStream_t stream) {
    if (Status status = schedule(stream); !status.ok()) return status;
    if (Status status = quantize::gpu::launch_quantise(params, stream); !status.ok()) return status;
    return wanted ? quantize::gpu::launch_dequantise(values, stream) : Status();
  }
  DeviceBuffer<std::uint8_t> rows;
  DeviceBuffer<std::uint16_t> rows16;
  DeviceBuffer<std::uint8_t> transposed, prefix;
  quantize::gpu::DequantiseParams values;
  bool wanted;
};

DeviceImage expected(const Case& c, const Packing& packing, const std::vector<std::uint16_t>& data, std::int64_t slots) {
  schedule::Documents documents;
  EXPECT_TRUE(schedule::Documents::create(packing.cu_seqlens, packing.tokens, &documents).ok());
  quantize::QuantiseInput input;
  input.tensor = params_of(c).input;
  input.tensor.data = data.data() + first_of(c);
  input.heads = c.heads;
  input.dim = c.dim;
  input.rotate = c.rotate;
  quantize::QuantisedTensor host;
  const bool sticky = c.prefix == Prefix::sticky;
  const Status status = quantize::quantise(input, documents, form_of(c.group, sticky, sticky ? c.headroom : 0), 0, &host);
  EXPECT_TRUE(status.ok()) << status.message();
  return device_image(host, documents, slots, {c.group, sticky, c.order});
}

std::vector<std::uint16_t> random_input(Random& random, const Case& c, const Packing& packing) {
  return random_tensor(random, c.dtype, packing.tokens, (c.fused ? 3 : 1) * std::int64_t{c.heads} * c.dim, c.dim, c.wild);
}

template <class T>
void expect_equal(const char* what, const std::vector<T>& got, const std::vector<T>& want) {
  const std::int64_t at = first_difference(got, want);
  if (at < 0) return;
  std::int64_t count = 0;
  for (std::size_t i = 0; i < got.size(); ++i) count += got[i] != want[i];
  ADD_FAILURE() << what << ": " << count << " of " << got.size() << " numbers differ, the first at " << at << ": "
                << int{got[static_cast<std::size_t>(at)]} << " for " << int{want[static_cast<std::size_t>(at)]};
}

void expect_image(const Case& c, const OnDevice& setup, const DeviceImage& want) {
  const std::vector<std::uint8_t> untouched_codes(want.rows.size(), kPoison), untouched(want.prefix.size(), kPoison);
  expect_equal("rows", setup.rows.download(), c.rows ? want.rows : untouched_codes);
  const std::vector<std::uint16_t> untouched_values(want.rows16.size(), kPoison * 0x0101u);
  expect_equal("rows16", setup.rows16.download(), c.values() ? want.rows16 : untouched_values);
  expect_equal("transposed", setup.transposed.download(), c.transposed ? want.transposed : untouched_codes);
  expect_equal("exponents", setup.exponents.download(), want.exponents);
  expect_equal("prefix", setup.prefix.download(), c.prefix == Prefix::none ? untouched : want.prefix);
}

void compare(const Case& c, const Packing& packing, Random& random) {
  SCOPED_TRACE(testing::Message() << packing.tokens << " tokens, " << packing.documents() << " documents, dim " << c.dim
                                  << ", heads " << c.heads << ", rotate " << c.rotate << ", group " << static_cast<int>(c.group)
                                  << ", prefix " << static_cast<int>(c.prefix) << ", f16 " << (c.dtype == DType::f16) << ", fused "
                                  << c.fused);
  const auto data = random_input(random, c, packing);
  OnDevice setup(c, packing, data);
  const Status status = setup.enqueue(nullptr);
  ASSERT_TRUE(status.ok()) << status.message();
  cuda_ok(cudaDeviceSynchronize());
  expect_image(c, setup, expected(c, packing, data, setup.slots));
}

TEST_F(Quantise, EveryKernelOnFixedLengths) {
  Random random(1);
  const Packing packing = pack({100, 0, 32, 1, 17, 16, 333, 64}, 9);
  for (const int dim : {64, 128})
    for (const DType dtype : {DType::bf16, DType::f16})
      for (const bool rotate : {false, true})
        for (const Group group : {Group::token, Group::block, Group::tensor})
          for (const Prefix prefix : {Prefix::none, Prefix::record, Prefix::sticky}) {
            if (group == Group::tensor && prefix != Prefix::none) continue;
            for (const bool wild : {false, true}) {  // with NaN a tensor is flagged as a whole
              Case c{dtype, 3, dim, rotate, group, prefix};
              c.wild = wild;
              compare(c, packing, random);
            }
          }
}

TEST_F(Quantise, FuzzedPackings) {
  Random random(2);
  for (int n = 0; n < 150 && !HasFailure(); ++n) {
    Case c;
    c.dtype = below(random, 4) ? DType::bf16 : DType::f16;
    c.heads = 1 + static_cast<int>(below(random, 4));
    c.dim = below(random, 3) ? 128 : 64;
    c.rotate = below(random, 2);
    c.group = below(random, 2) ? Group::token : Group::block;
    c.prefix = static_cast<Prefix>(below(random, 3));
    c.headroom = static_cast<int>(below(random, 5));
    c.order = below(random, 2) ? sm90::TokenOrder::pi : sm90::TokenOrder::rho;
    c.rows = below(random, 4);
    c.transposed = below(random, 4);
    c.fused = below(random, 2);
    c.wild = below(random, 2);
    compare(c, random_packing(random, 1200, 10), random);
  }
}

/// Q, K and V of one call: every operand as if it were alone, whatever the others are.
TEST_F(Quantise, OperandsOfOneCall) {
  Random random(14);
  std::vector<std::int32_t> many(300, 100);  // more units than all warps begin with, and a block table that is not full
  many.resize(500, 0);
  const Packing packings[] = {pack({100, 0, 32, 1, 17, 16, 333, 64}, 9), pack({5000, 40, 1, 700, 2500}, 3), pack(many, 5),
                              pack({})};
  for (const Packing& packing : packings)
    for (const int dim : {64, 128})
      for (const Group group : {Group::token, Group::block, Group::tensor})
        for (const Prefix prefix : {Prefix::none, Prefix::record, Prefix::sticky}) {
          if (group == Group::tensor && prefix != Prefix::none) continue;
          if (packing.documents() == 500 && (dim != 64 || group != Group::token || prefix == Prefix::record))
            continue;  // slow on the host
          Case cases[3] = {{DType::bf16, 4, dim, true, group, Prefix::none},
                           {DType::bf16, 2, dim, true, group, prefix},
                           {DType::bf16, 2, dim, false, group, prefix}};
          cases[0].transposed = cases[1].transposed = below(random, 2);
          cases[2].rows = below(random, 2);
          for (Case& c : cases) c.fused = below(random, 2);
          std::vector<std::vector<std::uint16_t>> data;
          std::vector<std::unique_ptr<OnDevice>> setups;
          QuantiseParams operands[3];
          for (int i = 0; i < 3; ++i) {
            data.push_back(random_input(random, cases[i], packing));
            setups.push_back(std::make_unique<OnDevice>(cases[i], packing, data.back()));
            operands[i] = setups.back()->params;
            operands[i].blocks = operands[0].blocks;
          }
          DeviceBuffer<std::uint32_t> scratch(static_cast<std::int64_t>(quantize::gpu::scratch_bytes(operands) / 4 + 1));
          scratch.poison();
          for (QuantiseParams& p : operands) p.scratch = scratch.get();
          ASSERT_TRUE(setups[0]->schedule(nullptr).ok());
          const Status status = quantize::gpu::launch_quantise(operands, nullptr);
          ASSERT_TRUE(status.ok()) << status.message();
          cuda_ok(cudaDeviceSynchronize());
          for (int i = 0; i < 3; ++i) {
            SCOPED_TRACE(testing::Message() << "operand " << i << ", dim " << dim << ", group " << static_cast<int>(group)
                                            << ", prefix " << static_cast<int>(prefix) << ", " << packing.tokens << " tokens");
            cases[i].values_wanted = false;
            expect_image(cases[i], *setups[static_cast<std::size_t>(i)],
                         expected(cases[i], packing, data[static_cast<std::size_t>(i)], setups[0]->slots));
          }
        }
}

TEST_F(Quantise, LongDocuments) {  // prefix maxima over many tiles
  Random random(4);
  for (const Prefix prefix : {Prefix::record, Prefix::sticky})
    for (const Group group : {Group::token, Group::block}) {
      Case c;
      c.heads = 1;
      c.prefix = prefix;
      c.group = group;
      compare(c, pack({50000}), random);
      c.heads = 4;
      compare(c, pack({9000, 40, 1, 12000}), random);
    }
}

/// Magnitudes that grow with the position, so that the guess of the maximum over earlier tokens is wrong nearly everywhere; and the
/// greatest ones first, so that it never is.
TEST_F(Quantise, PrefixMaximaThatCannotBeGuessed) {
  Random random(13);
  for (const bool rotate : {false, true})
    for (const Group group : {Group::token, Group::block})
      for (const bool grows : {true, false}) {
        Case c{DType::bf16, 2, 128, rotate, group, Prefix::sticky};
        c.wild = false;
        c.headroom = grows == rotate ? 3 : 0;
        const Packing packing = pack({5000, 40, 1, 700, 2500}, 3);
        auto data = random_input(random, c, packing);
        for (std::size_t i = 0; i < data.size(); ++i) {
          const auto token = static_cast<int>(i / static_cast<std::size_t>(c.heads * c.dim));
          const float x = numerics::decode_bf16(data[i]);
          data[i] = numerics::encode_bf16(std::isfinite(x) ? std::ldexp(x, (grows ? token : 9000 - token) / 100 - 40) : x);
        }
        OnDevice setup(c, packing, data);
        ASSERT_TRUE(setup.enqueue(nullptr).ok());
        cuda_ok(cudaDeviceSynchronize());
        SCOPED_TRACE(testing::Message() << "rotate " << rotate << ", group " << static_cast<int>(group) << ", grows " << grows);
        expect_image(c, setup, expected(c, packing, data, setup.slots));
      }
}

TEST_F(Quantise, ManyOneTokenDocuments) {
  Random random(6);
  Case c;
  c.heads = 1;
  c.prefix = Prefix::sticky;
  c.group = Group::token;
  compare(c, pack(std::vector<std::int32_t>(20000, 1), 3), random);
}

TEST_F(Quantise, NothingToDo) {
  Random random(8);
  for (const Packing& packing : {pack({}, 4), pack({0, 0}, 1)}) compare({}, packing, random);
}

TEST_F(Quantise, GraphReplaysWithOtherLengths) {
  Random random(9);
  Case c;
  c.group = Group::token;
  c.prefix = Prefix::sticky;
  const Packing first = pack({100, 0, 700, 3, 1200}, 30);
  const auto data = random_input(random, c, first);
  OnDevice setup(c, first, data);
  Graph graph([&](cudaStream_t stream) { ASSERT_TRUE(setup.enqueue(stream).ok()); });
  for (const std::vector<std::int32_t>& lengths :
       {std::vector<std::int32_t>{100, 0, 700, 3, 1200}, {2033, 0, 0, 0, 0}, {0, 0, 0, 0, 1}, {400, 400, 400, 400, 400}}) {
    Packing packing = pack(lengths);
    packing.tokens = first.tokens;
    setup.lengths.upload(packing.cu_seqlens);
    for (auto* buffer : {&setup.rows, &setup.transposed, &setup.exponents, &setup.prefix}) buffer->poison();
    setup.rows16.poison();
    graph.replay();
    expect_image(c, setup, expected(c, packing, data, setup.slots));
  }
}

TEST_F(Quantise, RepeatsBitForBit) {
  Random random(10);
  Case c;
  c.heads = 4;
  c.prefix = Prefix::sticky;
  c.group = Group::token;
  const Packing packing = random_packing(random, 3000, 8);
  const auto data = random_input(random, c, packing);
  OnDevice setup(c, packing, data);
  std::vector<std::uint8_t> codes, exponents;
  for (int n = 0; n < 50; ++n) {
    ASSERT_TRUE(setup.enqueue(nullptr).ok());
    cuda_ok(cudaDeviceSynchronize());
    if (n == 0) codes = setup.rows.download(), exponents = setup.exponents.download();
    ASSERT_EQ(first_difference(setup.rows.download(), codes), -1);
    ASSERT_EQ(first_difference(setup.exponents.download(), exponents), -1);
  }
}

TEST_F(Quantise, ComparisonNoticesOneBit) {  // the control of every test above
  Random random(11);
  const Case c;
  const Packing packing = pack({70});
  auto data = random_input(random, c, packing);
  OnDevice setup(c, packing, data);
  ASSERT_TRUE(setup.enqueue(nullptr).ok());
  cuda_ok(cudaDeviceSynchronize());
  data[5 * c.heads * c.dim] ^= 0x40;
  const DeviceImage other = expected(c, packing, data, setup.slots);
  EXPECT_NE(first_difference(setup.rows.download(), other.rows), -1);
  EXPECT_NE(first_difference(setup.rows16.download(), other.rows16), -1);
  EXPECT_NE(first_difference(setup.transposed.download(), other.transposed), -1);
}

TEST_F(Quantise, ComparisonNoticesHeadroom) {
  Random random(15);
  for (const Group group : {Group::token, Group::block}) {
    Case c{DType::bf16, 2, 128, true, group, Prefix::sticky};
    c.wild = false;
    const Packing packing = pack({70});
    const auto data = random_input(random, c, packing);
    OnDevice setup(c, packing, data);
    ASSERT_TRUE(setup.enqueue(nullptr).ok());
    cuda_ok(cudaDeviceSynchronize());
    c.headroom = 1;
    const DeviceImage other = expected(c, packing, data, setup.slots);
    EXPECT_NE(first_difference(setup.exponents.download(), other.exponents), -1);
    EXPECT_NE(first_difference(setup.rows.download(), other.rows), -1);
  }
}

TEST_F(Quantise, RefusesWhatItCannotDo) {
  Random random(12);
  Case c;
  const Packing packing = pack({70});
  OnDevice setup(c, packing, random_input(random, c, packing));
  const auto refused = [&](auto change) {
    QuantiseParams p = setup.params;
    change(p);
    return !quantize::gpu::launch_quantise(p, nullptr).ok();
  };
  EXPECT_TRUE(refused([](QuantiseParams& p) { p.head_dim = 96; }));
  EXPECT_TRUE(refused([](QuantiseParams& p) { p.input.dtype = DType::f32; }));
  EXPECT_TRUE(refused([](QuantiseParams& p) { p.input.token_stride = 257; }));
  EXPECT_TRUE(refused([](QuantiseParams& p) { p.input.data = static_cast<const char*>(p.input.data) + 2; }));
  EXPECT_TRUE(refused([](QuantiseParams& p) { p.exponents = nullptr; }));
  EXPECT_TRUE(refused([](QuantiseParams& p) { p.group = Group::tensor, p.prefix = Prefix::sticky; }));
  EXPECT_TRUE(refused([](QuantiseParams& p) { p.prefix = Prefix::sticky, p.scratch = nullptr; }));
  EXPECT_TRUE(refused([](QuantiseParams& p) { p.prefix = Prefix::sticky, p.headroom = 5; }));
  EXPECT_TRUE(refused([](QuantiseParams& p) { p.prefix = Prefix::record, p.headroom = 1; }));
  QuantiseParams four[4] = {setup.params, setup.params, setup.params, setup.params};
  EXPECT_TRUE(quantize::gpu::launch_quantise(std::span(four, 3), nullptr).ok());
  EXPECT_FALSE(quantize::gpu::launch_quantise(four, nullptr).ok());
  EXPECT_FALSE(quantize::gpu::launch_quantise(std::span(four, 0), nullptr).ok());
  four[1].input.dtype = DType::f16;
  EXPECT_FALSE(quantize::gpu::launch_quantise(std::span(four, 2), nullptr).ok());
  EXPECT_FALSE(refused([](QuantiseParams&) {}));
  const auto values_refused = [&](auto change) {
    quantize::gpu::DequantiseParams p = setup.values;
    change(p);
    return !quantize::gpu::launch_dequantise(p, nullptr).ok();
  };
  EXPECT_TRUE(values_refused([](auto& p) { p.head_dim = 96; }));
  EXPECT_TRUE(values_refused([](auto& p) { p.operands[0].heads = p.operands[1].heads = 0; }));
  EXPECT_TRUE(values_refused([](auto& p) { ++p.operands[1].values; }));
  EXPECT_TRUE(values_refused([](auto& p) { p.operands[0].exponents = nullptr; }));
  EXPECT_TRUE(values_refused([](auto& p) { p.used_slots = nullptr; }));
  EXPECT_FALSE(values_refused([](auto&) {}));
}

}  // namespace
}  // namespace flamia::test
