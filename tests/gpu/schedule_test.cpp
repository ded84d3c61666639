// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "schedule/cuda/clear.hpp"
#include "schedule/cuda/schedule.hpp"
#include "support/device.hpp"
#include "support/packing.hpp"
#include "support/schedule_model.hpp"

namespace flamia::test {
namespace {

using namespace schedule::gpu;
using schedule::MaskReach;
using schedule::reach_of;

class Schedule : public GpuTest {};

template <class T>
bool equal_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// One schedule on the device, in poisoned memory.
struct Built {
  Built(const Shape& s, const std::vector<std::int32_t>& cu_seqlens)
      : shape(s), lengths(std::span<const std::int32_t>(cu_seqlens)), workspace(static_cast<std::int64_t>(workspace_bytes(s))) {}
  void run() {
    const Status status = launch(shape, lengths.get(), workspace.get(), nullptr);
    ASSERT_TRUE(status.ok()) << status.message();
    cuda_ok(cudaDeviceSynchronize());
  }
  View get() const { return view(shape, workspace.get()); }
  Shape shape;
  DeviceBuffer<std::int32_t> lengths;
  DeviceBuffer<char> workspace;
};

void expect_matches(const Built& built, const ScheduleModel& model) {
  const View v = built.get();
  const Totals totals = download(v.totals, 1)[0];
  EXPECT_TRUE(totals == model.totals) << "slots " << totals.slots << " for " << model.totals.slots << ", items "
                                      << totals.forward.items << " for " << model.totals.forward.items << ", cost "
                                      << totals.forward.total_cost << " for " << model.totals.forward.total_cost << ", violations "
                                      << totals.violations << " for " << model.totals.violations;
  EXPECT_TRUE(equal_bytes(download(v.documents, static_cast<std::int64_t>(model.documents.size())), model.documents))
      << "documents";
  EXPECT_TRUE(equal_bytes(download(v.blocks, static_cast<std::int64_t>(model.blocks.size())), model.blocks)) << "token blocks";
  for (const TokenBlock& rest :
       download(v.blocks + model.blocks.size(), v.block_capacity - static_cast<std::int64_t>(model.blocks.size())))
    EXPECT_EQ(rest.length, -1);
  EXPECT_TRUE(equal_bytes(download(v.forward, static_cast<std::int64_t>(model.forward.size())), model.forward)) << "forward list";
  EXPECT_TRUE(equal_bytes(download(v.backward, static_cast<std::int64_t>(model.backward.size())), model.backward))
      << "backward list";
  for (const std::int32_t word : download(v.counters, kCounters)) EXPECT_EQ(word, 0);
}

Shape shape_of(const Packing& packing, MaskReach reach, int forward_tile, int backward_tile) {
  Shape shape;
  shape.tokens = packing.tokens;
  shape.documents = packing.documents();
  shape.reach = reach;
  shape.forward_tile = forward_tile;
  shape.backward_tile = backward_tile;
  return shape;
}

void build_and_compare(const Packing& packing, MaskReach reach, int forward_tile = 192, int backward_tile = 128) {
  Built built(shape_of(packing, reach, forward_tile, backward_tile), packing.cu_seqlens);
  built.run();
  expect_matches(built, model_schedule(built.shape, packing.cu_seqlens));
}

MaskReach random_reach(Random& random) {
  switch (below(random, 4)) {
    case 0:
      return reach_of(true, -1, -1);
    case 1:
      return reach_of(false, -1, -1);
    case 2:
      return reach_of(true, below(random, 600), -1);
    default:
      return reach_of(false, below(random, 400), below(random, 400));
  }
}

TEST_F(Schedule, FuzzedPackings) {
  Random random(7);
  for (int n = 0; n < 1000 && !HasFailure(); ++n)
    build_and_compare(random_packing(random, 4000, 30), random_reach(random), below(random, 2) ? 192 : 128,
                      below(random, 4) ? 128 : 0);
}

TEST_F(Schedule, NoTokensNoDocuments) {
  for (const Packing& packing : {pack({}), pack({}, 5), pack({0}), pack({0, 0, 0}, 40), pack({1})})
    build_and_compare(packing, reach_of(true, -1, -1));
}

TEST_F(Schedule, ManyShortDocuments) {  // past the block sort
  build_and_compare(pack(std::vector<std::int32_t>(131072, 1)), reach_of(true, -1, -1));
  Random random(3);
  std::vector<std::int32_t> lengths(9000);
  for (std::int32_t& length : lengths) length = static_cast<std::int32_t>(below(random, 200));
  lengths[4000] = 30000;
  build_and_compare(pack(lengths, 17), reach_of(true, -1, -1));
  build_and_compare(pack(lengths), reach_of(false, 300, 20), 128, 0);
}

TEST_F(Schedule, OneLongDocument) {
  build_and_compare(pack({65536}), reach_of(true, -1, -1));
  build_and_compare(pack({600000}), reach_of(true, 5000, -1));
}

TEST_F(Schedule, UntrustedLengths) {
  const std::vector<std::vector<std::int32_t>> rows = {
      {3, 10, 20},          {0, 50, 20, 60},       {0, 1 << 30, 20},       {-5, 10, 2147483647},
      {-2147483647, -1, 7}, {0, 100, 101, -3, 40}, {2147483647, 0, 0, 99}, {0, 30, 30, 100}};
  for (const auto& row : rows) {
    const Packing packing{row, 100};
    build_and_compare(packing, reach_of(true, -1, -1));
  }
  Random random(5);
  for (int n = 0; n < 200 && !HasFailure(); ++n) {
    Packing packing{std::vector<std::int32_t>(static_cast<std::size_t>(1 + below(random, 3000))), 5000};
    for (std::int32_t& entry : packing.cu_seqlens) entry = static_cast<std::int32_t>(random());
    build_and_compare(packing, random_reach(random));
  }
}

TEST_F(Schedule, GraphReplaysWithOtherLengths) {
  const Packing first = pack({100, 0, 700, 3, 1200}, 30);
  Built built(shape_of(first, reach_of(true, -1, -1), 192, 128), first.cu_seqlens);
  Graph graph(
      [&](cudaStream_t stream) { ASSERT_TRUE(launch(built.shape, built.lengths.get(), built.workspace.get(), stream).ok()); });
  for (const std::vector<std::int32_t>& lengths :
       {std::vector<std::int32_t>{100, 0, 700, 3, 1200}, {2033, 0, 0, 0, 0}, {0, 0, 0, 0, 1}, {400, 400, 400, 400, 400}}) {
    const Packing packing = pack(lengths);
    built.lengths.upload(packing.cu_seqlens);
    graph.replay();
    expect_matches(built, model_schedule(built.shape, packing.cu_seqlens));
  }
}

TEST_F(Schedule, ModelNoticesAWrongMask) {  // the comparison above can fail
  const Packing packing = pack({1000, 300});
  Built built(shape_of(packing, reach_of(true, -1, -1), 192, 128), packing.cu_seqlens);
  built.run();
  Shape other = built.shape;
  other.reach = reach_of(true, 100, -1);
  const ScheduleModel model = model_schedule(other, packing.cu_seqlens);
  const View v = built.get();
  EXPECT_FALSE(equal_bytes(download(v.forward, static_cast<std::int64_t>(model.forward.size())), model.forward));
}

TEST(ScheduleShape, NamesWhatIsWrong) {  // host only
  Shape shape;
  shape.tokens = std::int64_t{1} << 31;
  EXPECT_EQ(check(shape).code(), StatusCode::invalid_argument);
  shape.tokens = 2147483647;
  EXPECT_EQ(check(shape).code(), StatusCode::unsupported);
  shape.tokens = 100;
  shape.forward_tile = 100;
  EXPECT_EQ(check(shape).code(), StatusCode::invalid_argument);
}

TEST_F(Schedule, ClearsRowsOutsideDocuments) {
  constexpr int kHeads = 3, kDim = 64;
  const Packing packing{{40, 90, 200}, 300};
  Built built(shape_of(packing, reach_of(true, -1, -1), 192, 0), packing.cu_seqlens);
  built.run();
  DeviceBuffer<std::uint16_t> o(300 * 4 * kHeads * kDim);  // rows four times as wide as needed: what lies between stays poisoned
  DeviceBuffer<float> wide(300 * kHeads * kDim), lse(300 * kHeads);
  ClearParams params;
  params.tensors[0] = {{o.get(), DType::bf16, 4 * kHeads * kDim, 2 * kDim}, kHeads};
  params.tensors[1] = {{wide.get(), DType::f32, 0, 0}, kHeads};
  params.lse = lse.get();
  params.head_dim = kDim;
  params.tokens = 300;
  ASSERT_TRUE(launch_clear_uncovered(params, built.get().totals, nullptr).ok());
  const auto got_o = o.download();
  const auto got_wide = wide.download(), got_lse = lse.download();
  const float poison = [] {
    float x;
    std::memset(&x, kPoison, sizeof x);
    return x;
  }();
  for (std::int64_t t = 0; t < 300; ++t) {
    const bool covered = t >= 40 && t < 200;
    for (std::int64_t h = 0; h < kHeads; ++h) {
      EXPECT_EQ(got_lse[static_cast<std::size_t>(h * 300 + t)], covered ? poison : std::numeric_limits<float>::infinity());
      for (std::int64_t c = 0; c < kDim; ++c)
        ASSERT_EQ(got_wide[static_cast<std::size_t>((t * kHeads + h) * kDim + c)], covered ? poison : 0.f) << t;
    }
    for (std::int64_t i = 0; i < 4 * kHeads * kDim; ++i) {
      const bool inside = i / kDim % 2 == 0 && i / kDim < 2 * kHeads;
      ASSERT_EQ(got_o[static_cast<std::size_t>(t * 4 * kHeads * kDim + i)], covered || !inside ? 0xa5a5 : 0) << t << ' ' << i;
    }
  }
}

}  // namespace
}  // namespace flamia::test
