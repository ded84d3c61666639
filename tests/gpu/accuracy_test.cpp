// SPDX-License-Identifier: Apache-2.0
// The forward pass on the GPU at real sizes against float64 attention on the GPU: accuracy, promotion of sums, a thousand packings.
#include <random>

#include "numerics/accumulate.hpp"
#include "support/packed_call.hpp"

namespace flamia::test {
namespace {

class GpuAccuracy : public GpuTest {};

/// 4 documents of 4096 tokens, 16 heads, d = 128: the bars of docs/numerics.md. Control: the same output held against the other mask.
TEST_F(GpuAccuracy, FourTimesFourThousandTokens) {
  constexpr std::int64_t kElements = std::int64_t{4} * 4096 * 16 * 128;
  const NormalPool pool(3 * kElements, fresh_seed());
  for (const bool causal : {true, false})
    for (const char* name : {"mxfp8", "mxfp8-exact", "mxfp8 ref=phase32", "mxfp8-exact ref=phase32", "nvfp4", "nvfp4-exact"}) {
      PackedCall call({{4096, 4096, 4096, 4096}, 16, 16, 128, {causal, -1, -1}, 0}, recipe(name), pool.all(),
                      pool.all() + kElements, pool.all() + 2 * kElements);
      const Status status = call.run();
      ASSERT_TRUE(status.ok()) << status.message();
      const Comparison c = summarise(call.compare(), 16);
      std::cout << "[ measured ] " << name << (causal ? ", causal" : ", full") << ": mean cosine " << c.cosine << ", relative L2 "
                << c.relative_l2 << ", worst row " << c.worst_row << ", LSE off by " << c.worst_lse << "\n";
      const bool nvfp4 = std::string(name).rfind("nvfp4", 0) == 0;
      const double bar = nvfp4 ? (causal ? .9920 : .9890) : causal ? .9987 : .9983;
      EXPECT_GE(c.cosine, bar) << name;
      EXPECT_LT(c.worst_row, nvfp4 ? 0.6 : 0.3) << name;
      EXPECT_EQ(c.wrong_rows, 0) << name;
      Problem other = call.problem();
      other.mask.causal = !causal;
      EXPECT_LT(summarise(call.compare(other, call.offsets()), 16).cosine, bar) << name;
    }
}

/// What the tensor core makes of a row of O when its partial sums never join FP32 (interval 0) or every `interval` keys: the published
/// model of its accumulator on the row's own codes. Greatest relative error over some channels.
double emulated_error(const std::vector<std::uint16_t>& q, const std::vector<std::uint16_t>& k, const std::vector<std::uint16_t>& v,
                      std::size_t keys, std::size_t interval) {
  constexpr std::size_t kDim = 128, kChannels = 8;
  std::vector<double> score(keys);
  double greatest = -1e300, sum = 0, code_sum = 0;
  const double scale = 1. / std::sqrt(double{kDim});
  for (std::size_t j = 0; j < keys; ++j) {
    for (std::size_t c = 0; c < kDim; ++c)
      score[j] += double{numerics::decode_bf16(q[(keys - 1) * kDim + c])} * numerics::decode_bf16(k[j * kDim + c]) * scale;
    greatest = std::max(greatest, score[j]);
  }
  std::vector<float> p(keys), values(keys);
  for (std::size_t j = 0; j < keys; ++j) {
    const double weight = std::exp(score[j] - greatest);
    sum += weight;
    p[j] = numerics::round_e4m3(static_cast<float>(256. * weight));
    code_sum += double{p[j]};
  }
  double worst = 0;
  for (std::size_t c = 0; c < kChannels; ++c) {
    double exact = 0, promoted = 0;
    float partial = 0;
    for (std::size_t j = 0; j < keys; ++j) {
      values[j] = numerics::round_e4m3(numerics::decode_bf16(v[j * kDim + c]) * 64.f);
      exact += std::exp(score[j] - greatest) / sum * double{numerics::decode_bf16(v[j * kDim + c])};
    }
    for (std::size_t j = 0; j < keys; j += numerics::kHopperGroup) {
      partial = numerics::hopper_dot(partial, p.data() + j, 1, values.data() + j, 1, numerics::kHopperGroup);
      if (interval != 0 && (j + numerics::kHopperGroup) % interval == 0) promoted += double{partial}, partial = 0;
    }
    worst = std::max(worst, std::fabs((promoted + double{partial}) / code_sum / 64. / exact - 1));
  }
  return worst;
}

/// 65,536 keys, V ~ N(1, 1), so that sums grow: every element of the last 8,192 rows within 1 %. Control: the accumulator's model without
/// promotion is not (and with it, is).
TEST_F(GpuAccuracy, SumsArePromotedOver65536Keys) {
  constexpr std::int64_t kKeys = 65536, kElements = kKeys * 128;
  const NormalPool pool(3 * kElements, fresh_seed());
  std::vector<std::uint16_t> v = download(pool.all() + 2 * kElements, kElements);
  for (std::uint16_t& x : v) x = numerics::encode_bf16(numerics::decode_bf16(x) + 1.f);
  const DeviceBuffer<std::uint16_t> values{std::span<const std::uint16_t>(v)};
  for (const char* name : {"mxfp8", "mxfp8-exact", "fp8-tensor"}) {
    PackedCall call({{kKeys}, 1, 1, 128, {true, -1, -1}, 0}, recipe(name), pool.all(), pool.all() + kElements, values.get());
    const Status status = call.run();
    ASSERT_TRUE(status.ok()) << status.message();
    const Comparison c = summarise(call.compare(), 1, kKeys - 8192);
    std::cout << "[ measured ] " << name << ": worst element " << c.worst_element << ", cosine " << c.cosine << "\n";
    EXPECT_LT(c.worst_element, 0.01) << name;
    EXPECT_EQ(c.wrong_rows, 0) << name;
  }
  const std::vector<std::uint16_t> q = download(pool.all(), kElements), k = download(pool.all() + kElements, kElements);
  const double without = emulated_error(q, k, v, kKeys, 0), with = emulated_error(q, k, v, kKeys, 128);
  std::cout << "[ measured ] accumulator's model: without promotion " << without << ", every 128 keys " << with << "\n";
  EXPECT_GT(without, 0.01);
  EXPECT_LT(with, 0.01);
}

/// E4M3 moves a score of independent N(0, 1) operands by .0375 (standard deviation, d = 64 and 128); of a row with few keys the LSE moves as
/// far, and rounding its codes adds .03. Six deviations for the 10^5 such rows.
constexpr double kLseBar = 0.3;

/// Control: Q = K. Every row meets itself, |q|^2 moves by .092, and among 16,000 rows of one key some lie beyond the bar.
TEST_F(GpuAccuracy, TheBarOfLseNoticesTwiceTheRounding) {
  const Shape shape{std::vector<std::int64_t>(4000, 1), 4, 4, 128, {true, -1, -1}, 0};
  const NormalPool pool(std::int64_t{3} * 4000 * 4 * 128, fresh_seed());
  const auto worst_lse = [&](int key_third) {
    PackedCall call(shape, recipe("mxfp8"), pool.at(0, 0, std::int64_t{4000} * 4 * 128),
                    pool.at(key_third, 0, std::int64_t{4000} * 4 * 128), pool.at(2, 0, std::int64_t{4000} * 4 * 128));
    EXPECT_TRUE(call.run().ok());
    return summarise(call.compare(), 4).worst_lse;
  };
  EXPECT_LT(worst_lse(1), kLseBar);
  EXPECT_GT(worst_lse(0), kLseBar);
}

/// Documents of 1 ... 4,000 tokens, empty and one-token ones, tokens left over; every row of each call.
TEST_F(GpuAccuracy, AThousandRandomPackings) {
  std::mt19937 random(fresh_seed());
  const NormalPool pool(std::int64_t{1} << 25, random());
  const char* const names[] = {"mxfp8", "mxfp8-exact", "fp8-tensor", "mxfp8-exact ref=phase32"};
  int controls = 0;
  double worst_row = 0, worst_lse = 0, worst_l2 = 0;
  for (int i = 0; i < 1000; ++i) {
    Shape shape;
    shape.head_dim = random() % 4 == 0 ? 64 : 128;
    shape.query_heads = random() % 2 == 0 ? 2 : 4;
    shape.key_heads = random() % 2 == 0 ? 2 : 1;
    shape.tail = static_cast<std::int64_t>(random() % 3 == 0 ? random() % 300 : 0);
    std::int64_t left = 4000;  // tokens of the packing
    for (std::size_t b = 0, n = 1 + random() % 12; b < n; ++b) {
      const std::int64_t most = 1 + static_cast<std::int64_t>(random() % static_cast<unsigned>(left));
      const unsigned kind = static_cast<unsigned>(random() % 6);
      const std::int64_t length = kind == 0 ? 0 : kind == 1 ? 1 : kind == 2 ? std::min<std::int64_t>(most, 40) : most;
      shape.lengths.push_back(length);
      left = std::max<std::int64_t>(left - length, 1);
    }
    switch (random() % 4) {
      case 0:
        shape.mask = {false, -1, -1};
        break;
      case 1:
        shape.mask = {random() % 2 == 0, static_cast<std::int64_t>(random() % 700), static_cast<std::int64_t>(random() % 300)};
        break;
      default:
        shape.mask = {true, -1, -1};
    }
    const std::string name = names[random() % 4];
    std::string what = name + ", packing " + std::to_string(i) + ", lengths";
    for (const std::int64_t length : shape.lengths) what += " " + std::to_string(length);
    SCOPED_TRACE(what);
    const std::int64_t tokens = std::accumulate(shape.lengths.begin(), shape.lengths.end(), shape.tail);
    if (tokens == 0) continue;
    const std::int64_t most_elements = tokens * shape.query_heads * shape.head_dim;
    PackedCall call(shape, recipe(name), pool.at(0, random(), most_elements), pool.at(1, random(), most_elements),
                    pool.at(2, random(), most_elements));
    const Status status = call.run();
    ASSERT_TRUE(status.ok()) << status.message();
    const Comparison c = summarise(call.compare(), shape.query_heads);
    worst_row = std::max(worst_row, c.worst_row), worst_lse = std::max(worst_lse, c.worst_lse);
    worst_l2 = std::max(worst_l2, c.relative_l2);
    ASSERT_EQ(c.wrong_rows, 0);
    ASSERT_LT(c.worst_row, 0.4);
    ASSERT_LT(c.relative_l2, 0.06);
    ASSERT_LT(c.worst_lse, kLseBar);
    if (i % 25 != 0) continue;  // control: a document's end one token further must show
    std::vector<std::int32_t> moved = call.offsets();
    const std::size_t b = 1 + random() % (moved.size() - 1);
    // a document that gives its only token away, to one that had none, leaves the same attention behind
    const std::int64_t next = b + 1 < moved.size() ? moved[b + 1] : tokens;
    if (moved[b] == moved[b - 1] || next - moved[b] < 2) continue;
    ++moved[b];
    const Comparison other = summarise(call.compare(call.problem(), moved), shape.query_heads);
    EXPECT_TRUE(other.worst_row > 0.4 || other.worst_lse > kLseBar || other.wrong_rows > 0);
    ++controls;
  }
  std::cout << "[ measured ] worst row " << worst_row << ", worst relative L2 of a packing " << worst_l2 << ", worst LSE "
            << worst_lse << ", " << controls << " controls\n";
  EXPECT_GT(controls, 5);
}

}  // namespace
}  // namespace flamia::test
