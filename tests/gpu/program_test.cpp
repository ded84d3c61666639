// SPDX-License-Identifier: Apache-2.0
// The program on a GPU: gradients of attend against the CPU's, leak and accuracy with gradients.
#include <cmath>
#include <nlohmann/json.hpp>

#include "cli/files.hpp"
#include "cli/program.hpp"
#include "support/device.hpp"

namespace flamia::test {
namespace {

using nlohmann::json;

class GpuProgram : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    sample.write(folder / "in");
  }
  json run_json(std::vector<std::string> arguments) {
    arguments.emplace_back("--json");
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.code == 0 ? json::parse(outcome.out) : json();
  }
  Sample sample;
  Folder folder;
};

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    difference += d * d, norm += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  return std::sqrt(difference / norm);
}

TEST_F(GpuProgram, AttendWritesTheGradientsOfTheCpu) {
  const auto attend = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"attend", folder / "in", "--backward", "--recipe"});
    const Outcome outcome = run(more);
    ASSERT_EQ(outcome.code, 0) << outcome.err;
  };
  for (const char* device : {"cpu", "cuda"})
    attend({"mxfp8-exact acc=hopper13", "--deterministic", "--device", device, "--out", folder / device});
  attend({"mxfp8-exact rotate=off", "--out", folder / "control"});
  for (const char* name : {"dq", "dk", "dv", "out"})
    EXPECT_LT(distance(read(folder / "cuda", name).f32(), read(folder / "cpu", name).f32()), 2e-2) << name;
  for (const char* name : {"dq", "dk"})
    EXPECT_GT(distance(read(folder / "control", name).f32(), read(folder / "cpu", name).f32()), 2e-2) << name;
}

TEST_F(GpuProgram, LeakFindsWhatTheRecipesPromise) {
  for (const json& row : run_json({"leak", folder / "in", "--recipes", "mxfp8-exact", "--device", "cuda"}))
    for (const char* output : {"o", "dq", "dk", "dv"})
      if (!row[output].is_null()) {
        EXPECT_EQ(row[output].get<double>(), 0.0) << row;
      }
  double greatest = 0;
  for (const json& row : run_json({"leak", folder / "in", "--recipes", "fp8-tensor", "--device", "cuda"}))
    for (const char* output : {"o", "dq", "dk", "dv"})
      if (!row[output].is_null()) greatest = std::max(greatest, row[output].get<double>());
  EXPECT_GT(greatest, 1e-3);
}

TEST_F(GpuProgram, AccuracyLeavesSharesBlank) {
  const json rows = run_json({"accuracy", folder / "in", "--recipes", "mxfp8", "--device", "cuda"});
  ASSERT_FALSE(rows.empty());
  for (const json& row : rows) {
    if (row["head"] == "all") {
      EXPECT_GT(row["dq_cosine"].get<double>(), 0.99);
    }
    EXPECT_TRUE(row["ds_zero_q"].is_null());
  }
}

TEST_F(GpuProgram, RefusesARecipeWithoutABackwardPass) {
  const Outcome outcome =
      run({"attend", folder / "in", "--recipe", "mxfp8 dk=64x32", "--backward", "--device", "cuda", "--out", folder / "out"});
  EXPECT_EQ(outcome.code, 3);
  EXPECT_NE(outcome.err.find("dk=key64"), std::string::npos) << outcome.err;
}

}  // namespace
}  // namespace flamia::test
