// SPDX-License-Identifier: Apache-2.0
// The dO pass against the host quantiser: codes, exponents, D' and the scale of dQ bit for bit, the cleared accumulator.
#include <cmath>
#include <cstring>

#include "quantize/cuda/gradient.hpp"
#include "quantize/cuda/prescale.hpp"
#include "support/operand.hpp"

namespace flamia::test {
namespace {

using quantize::gpu::GradientParams;
using quantize::gpu::Group;

class Gradient : public GpuTest {};

struct Case {
  DType dtype = DType::bf16, o_dtype = DType::bf16;
  int heads = 2, key_heads = 1, dim = 128;
  Group group = Group::block;
  schedule::MaskReach reach = schedule::reach_of(true, -1, -1);
  int accumulator_bytes = 2;
  std::int64_t untouched_tokens = -1;  // documents of at most so many keep their accumulator as it was
};

struct Inputs {
  std::vector<std::uint16_t> d_o;
  std::vector<float> o;                                // as F32, not rounded
  std::vector<float> l;                                // [heads][tokens]
  std::vector<std::uint8_t> key_prefix, value_prefix;  // [key_heads][slots]
};

Inputs random_inputs(Random& random, const Case& c, const Packing& packing, std::int64_t slots, bool wild) {
  std::normal_distribution<float> normal;
  Inputs in;
  const std::int64_t row = std::int64_t{c.heads} * c.dim;
  in.d_o = random_tensor(random, c.dtype, packing.tokens, row, c.dim, wild);
  for (std::int64_t i = 0; i < packing.tokens * row; ++i) in.o.push_back(normal(random));
  for (std::int64_t i = 0; i < packing.tokens * c.heads; ++i) {
    const std::int64_t kind = below(random, 20);
    in.l.push_back(kind == 0 ? 0.f : kind == 1 ? numerics::infinity() : kind == 2 ? 1.f : 0.3f + std::fabs(normal(random)) * 300.f);
  }
  for (auto* prefix : {&in.key_prefix, &in.value_prefix})
    for (std::int64_t i = 0; i < c.key_heads * slots; ++i) prefix->push_back(static_cast<std::uint8_t>(below(random, 250)));
  return in;
}

/// D' and z of one row, with the additions in the kernel's order: a lane's channels, then lanes 1 and 2 apart.
struct RowResult {
  float d_prime;
  int z;
};
RowResult row_result(const std::uint8_t* codes, const float* o, int dim, int exponent, float l, int e_k, int e_v) {
  constexpr int kLanes = 4;
  float with_output[kLanes], squares[kLanes];
  for (int j = 0; j < kLanes; ++j) {
    with_output[j] = squares[j] = 0.f;
    for (int octet = j; octet < dim / 8; octet += kLanes)
      for (int c = 8 * octet; c < 8 * octet + 8; ++c) {
        const float x = numerics::decode<numerics::kE4M3>(codes[c]);
        with_output[j] = std::fma(x, numerics::round_bf16(o[c]), with_output[j]);
        squares[j] = std::fma(x, x, squares[j]);
      }
  }
  for (int distance = 1; distance < kLanes; distance *= 2)
    for (float* sums : {with_output, squares}) {
      float next[kLanes];
      for (int j = 0; j < kLanes; ++j) next[j] = sums[j] + sums[j ^ distance];
      std::copy_n(next, kLanes, sums);
    }
  return {numerics::scale_pow2(with_output[0], exponent), quantize::dq_exponent(squares[0], l, dim, exponent, e_k, e_v)};
}

struct Results {
  DeviceImage image;
  std::vector<float> d_prime;
  std::vector<std::int16_t> z;
};

Results expected(const Case& c, const Packing& packing, const Inputs& in, std::int64_t slots) {
  schedule::Documents documents;
  EXPECT_TRUE(schedule::Documents::create(packing.cu_seqlens, packing.tokens, &documents).ok());
  quantize::QuantiseInput input;
  input.tensor = {in.d_o.data(), c.dtype, 0, 0};
  input.heads = c.heads;
  input.dim = c.dim;
  input.divide_by = in.l.data();
  quantize::QuantisedTensor host;
  const Status status = quantize::quantise(input, documents, form_of(c.group, false), 0, &host);
  EXPECT_TRUE(status.ok()) << status.message();
  Results want{device_image(host, documents, slots, {c.group, false, sm90::TokenOrder::pi}), {}, {}};
  float poison;
  std::memset(&poison, kPoison, sizeof poison);
  want.d_prime.assign(static_cast<std::size_t>(c.heads * slots), poison);
  want.z.assign(static_cast<std::size_t>(c.heads * slots), static_cast<std::int16_t>(0xa5a5));
  for (std::int64_t head = 0; head < c.heads; ++head) {
    std::int64_t start = 0;
    const auto put = [&](std::int64_t slot, RowResult r) {
      want.d_prime[static_cast<std::size_t>(head * slots + slot)] = r.d_prime;
      want.z[static_cast<std::size_t>(head * slots + slot)] = static_cast<std::int16_t>(r.z);
    };
    for (const schedule::DocumentRange& range : documents.ranges()) {
      const std::int64_t padded = padded_slots(range.length);
      for (std::int64_t p = 0; p < padded; ++p) {
        if (p >= range.length) {
          put(start + p, {0.f, 0});
          continue;
        }
        const std::int64_t token = range.start + p, row = (token * c.heads + head) * c.dim;
        const auto byte = want.image.exponents[static_cast<std::size_t>(head * slots + start + p)];
        const std::int64_t last = schedule::visible_keys(c.reach, p, range.length).end - 1;
        const auto at = static_cast<std::size_t>(head / (c.heads / c.key_heads) * slots + start + last);
        put(start + p, row_result(host.codes.data() + row, in.o.data() + row, c.dim, numerics::decode_ue8m0(byte),
                                  in.l[static_cast<std::size_t>(head * packing.tokens + token)], in.key_prefix[at] - 127,
                                  in.value_prefix[at] - 127));
      }
      start += padded;
    }
    for (int i = 0; i < sm90::kTailSlots; ++i) put(start + i, {0.f, 0});
  }
  return want;
}

/// l where the kernel looks for it: by slots.
std::vector<float> by_slot(const Case& c, const Packing& packing, const std::vector<float>& l, std::int64_t slots) {
  std::vector<float> moved(static_cast<std::size_t>(c.heads * slots), numerics::quiet_nan());
  for (std::int64_t head = 0; head < c.heads; ++head) {
    std::int64_t start = 0;
    for (std::int64_t b = 0; b < packing.documents(); ++b) {
      const std::int64_t first = packing.cu_seqlens[static_cast<std::size_t>(b)];
      const std::int64_t length = packing.cu_seqlens[static_cast<std::size_t>(b + 1)] - first;
      for (std::int64_t p = 0; p < length; ++p)
        moved[static_cast<std::size_t>(head * slots + start + p)] = l[static_cast<std::size_t>(head * packing.tokens + first + p)];
      start += padded_slots(length);
    }
  }
  return moved;
}

template <class T>
std::int64_t differing_bits(const std::vector<T>& a, const std::vector<T>& b) {
  std::int64_t count = 0;
  for (std::size_t i = 0; i < a.size(); ++i) count += std::memcmp(&a[i], &b[i], sizeof(T)) != 0;
  return a.size() == b.size() ? count : -1;
}

void compare(const Case& c, const Packing& packing, Random& random, bool wild = true) {
  SCOPED_TRACE(testing::Message() << packing.tokens << " tokens, dim " << c.dim << ", heads " << c.heads << ", group "
                                  << static_cast<int>(c.group));
  const std::int64_t slots = sm90::slot_capacity(packing.tokens, packing.documents());
  const Inputs in = random_inputs(random, c, packing, slots, wild);
  schedule::gpu::Shape shape{packing.tokens, packing.documents(), {}, 128, 0, 64};
  DeviceBuffer<std::int32_t> lengths{std::span<const std::int32_t>(packing.cu_seqlens)};
  DeviceBuffer<char> memory(static_cast<std::int64_t>(schedule::gpu::workspace_bytes(shape)));
  DeviceBuffer<std::uint16_t> d_o{std::span<const std::uint16_t>(in.d_o)};
  std::vector<std::uint16_t> rounded;
  for (const float x : in.o) rounded.push_back(numerics::encode_bf16(x));
  DeviceBuffer<std::uint16_t> o16{std::span<const std::uint16_t>(rounded)};
  DeviceBuffer<float> o32{std::span<const float>(in.o)};
  const std::vector<float> l = by_slot(c, packing, in.l, slots);
  DeviceBuffer<float> row_sum{std::span<const float>(l)}, d_prime(c.heads * slots);
  DeviceBuffer<std::uint8_t> key_prefix{std::span<const std::uint8_t>(in.key_prefix)};
  DeviceBuffer<std::uint8_t> value_prefix{std::span<const std::uint8_t>(in.value_prefix)};
  DeviceBuffer<std::uint8_t> rows(c.heads * slots * c.dim), transposed(c.heads * slots * c.dim), exponents(c.heads * slots);
  DeviceBuffer<std::int16_t> z(c.heads * slots);
  DeviceBuffer<std::uint8_t> accumulator(c.heads * slots * c.dim * c.accumulator_bytes);
  DeviceBuffer<std::uint32_t> scratch(1);

  ASSERT_TRUE(schedule::gpu::launch(shape, lengths.get(), memory.get(), nullptr).ok());
  const schedule::gpu::View v = schedule::gpu::view(shape, memory.get());
  GradientParams p;
  p.d_o = {d_o.get(), c.dtype, 0, 0};
  p.o = c.o_dtype == DType::bf16 ? TensorView{o16.get(), DType::bf16, 0, 0} : TensorView{o32.get(), DType::f32, 0, 0};
  p.heads = c.heads;
  p.key_heads = c.key_heads;
  p.head_dim = c.dim;
  p.group = c.group;
  p.row_sum = row_sum.get();
  p.reach = c.reach;
  p.rows = rows.get();
  p.transposed = transposed.get();
  p.exponents = exponents.get();
  p.d_prime = d_prime.get();
  p.key_prefix = key_prefix.get();
  p.value_prefix = value_prefix.get();
  p.dq_exponent = z.get();
  p.dq_accumulator = accumulator.get();
  p.dq_accumulator_bytes = c.accumulator_bytes;
  p.dq_untouched_tokens = c.untouched_tokens;
  p.slots = slots;
  p.blocks = v.blocks;
  p.block_capacity = v.block_capacity;
  p.scratch = scratch.get();
  const Status status = quantize::gpu::launch_gradient(p, nullptr);
  ASSERT_TRUE(status.ok()) << status.message();
  cuda_ok(cudaDeviceSynchronize());

  const Results want = expected(c, packing, in, slots);
  EXPECT_EQ(first_difference(rows.download(), want.image.rows), -1);
  EXPECT_EQ(first_difference(transposed.download(), want.image.transposed), -1);
  EXPECT_EQ(first_difference(exponents.download(), want.image.exponents), -1);
  EXPECT_EQ(differing_bits(d_prime.download(), want.d_prime), 0);
  EXPECT_EQ(differing_bits(z.download(), want.z), 0);
  constexpr std::uint8_t kKept = kPoison, kCleared = 0;
  std::vector<std::uint8_t> wanted_bytes;  // of one head's accumulator, a slot each
  for (std::size_t b = 1; b < packing.cu_seqlens.size(); ++b) {
    const std::int64_t length = packing.cu_seqlens[b] - packing.cu_seqlens[b - 1];
    wanted_bytes.insert(wanted_bytes.end(), static_cast<std::size_t>(padded_slots(length)),
                        length > c.untouched_tokens ? kCleared : kKept);
  }
  wanted_bytes.insert(wanted_bytes.end(), sm90::kTailSlots, c.untouched_tokens < 0 ? kCleared : kKept);
  wanted_bytes.resize(static_cast<std::size_t>(slots), kKept);
  const std::int64_t bytes = c.dim * c.accumulator_bytes;
  const auto cleared = accumulator.download();
  for (std::int64_t head = 0; head < c.heads; ++head)
    for (std::int64_t i = 0; i < slots * bytes; ++i)
      ASSERT_EQ(cleared[static_cast<std::size_t>(head * slots * bytes + i)], wanted_bytes[static_cast<std::size_t>(i / bytes)])
          << head << ' ' << i;
  if (packing.tokens > 400 && c.group == Group::token && !wild) {  // control: another O must show in D'
    Inputs other = in;
    for (float& x : other.o) x += 0.25f;
    EXPECT_GT(differing_bits(d_prime.download(), expected(c, packing, other, slots).d_prime), packing.tokens / 4);
  }
}

TEST_F(Gradient, EveryKernelOnFixedLengths) {
  Random random(21);
  for (const int dim : {64, 128})
    for (const DType dtype : {DType::bf16, DType::f16})
      for (const DType o_dtype : {DType::bf16, DType::f32})
        for (const Group group : {Group::token, Group::block, Group::tensor})
          for (const bool wild : {false, true}) {
            Case c{dtype, o_dtype, 4, 2, dim, group};
            c.accumulator_bytes = o_dtype == DType::bf16 ? 2 : 4;
            compare(c, pack({100, 0, 32, 1, 17, 16, 333}, 9), random, wild);
          }
}

TEST_F(Gradient, FuzzedPackingsAndMasks) {
  Random random(22);
  const schedule::MaskReach reaches[] = {schedule::reach_of(true, -1, -1), schedule::reach_of(false, -1, -1),
                                         schedule::reach_of(false, 50, 30), schedule::reach_of(true, 70, -1)};
  for (int n = 0; n < 60 && !HasFailure(); ++n) {
    Case c;
    c.key_heads = 1 + static_cast<int>(below(random, 2));
    c.heads = c.key_heads * (1 + static_cast<int>(below(random, 3)));
    c.dim = below(random, 2) ? 128 : 64;
    c.group = below(random, 2) ? Group::token : Group::block;
    c.reach = reaches[below(random, 4)];
    c.untouched_tokens = below(random, 2) ? -1 : below(random, 200);
    compare(c, random_packing(random, 700, 8), random, below(random, 2));
  }
}

TEST(GradientScale, BoundsTheRowWithinOneBinade) {  // host: 2^(15 - z) in (bound, 2 * bound]
  Random random(23);
  for (int n = 0; n < 20000; ++n) {
    const float squares =
        std::ldexp(1.f + static_cast<float>(below(random, 1000)) / 1000.f, static_cast<int>(below(random, 40)) - 18);
    const float l = 0.1f + static_cast<float>(below(random, 100000)) / 10.f;
    const int d = below(random, 2) ? 128 : 64, e = static_cast<int>(below(random, 60)) - 30;
    const double bound = 2.002 * 448.0 * 448.0 * std::sqrt(static_cast<double>(squares) * d) * l * std::ldexp(1.0, e);
    const double reach = std::ldexp(1.0, 15 - quantize::dq_exponent(squares, l, d, e, 3, -3));
    ASSERT_GT(reach, bound * (1 - 1e-6));
    ASSERT_LE(reach, 2 * bound * (1 + 1e-6));
  }
  EXPECT_EQ(quantize::dq_exponent(0.f, 1.f, 128, 5, 5, 5), 0);
}

}  // namespace
}  // namespace flamia::test
