// SPDX-License-Identifier: Apache-2.0
// Each kind of bad input gets an exit code and a message that names what is wrong; no output appears and the old one stays.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "files.hpp"
#include "program.hpp"

namespace flamia::test {
namespace {

using testing::HasSubstr;
using testing::Not;

class BadInput : public testing::Test {
 protected:
  /// Runs attend on `in` and expects exit code `code`, `words` in the message, and the old output as it was.
  void refused(const std::string& in, int code, const std::vector<std::string>& words, const std::vector<std::string>& more = {}) {
    const std::string out = folder / "out";
    std::ofstream(out) << "old";
    std::vector<std::string> arguments{"attend", in, "--recipe", "bf16", "--out", out};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const std::vector<std::string> before = folder.names();
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.code, code) << outcome.err;
    for (const std::string& word : words) EXPECT_THAT(outcome.err, HasSubstr(word));
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(contents(out), "old");
    EXPECT_EQ(folder.names(), before) << "something was left behind";
  }
  void refused(const Sample& sample, int code, const std::vector<std::string>& words, const std::vector<std::string>& more = {}) {
    sample.write(folder / "in");
    refused(folder / "in", code, words, more);
  }
  void refused_header(const std::string& json, std::size_t data, const std::vector<std::string>& words,
                      std::optional<std::uint64_t> length = {}) {
    write_raw(folder / "in", json, data, length);
    refused(folder / "in", 2, words);
  }
  Folder folder;
};

TEST_F(BadInput, TheControlIsAccepted) {
  Sample().write(folder / "in");
  const Outcome outcome = run({"attend", folder / "in", "--recipe", "bf16", "--out", folder / "out", "--backward"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
}

TEST_F(BadInput, DocumentOffsets) {
  const auto with = [](std::vector<std::int32_t> offsets) {
    Sample sample;
    sample.cu_seqlens = std::move(offsets);
    return sample;
  };
  refused(with({1, 40, 140}), 2, {"cu_seqlens[0] = 1", "must be 0"});
  refused(with({0, 40, 39, 140}), 2, {"cu_seqlens[2] = 39", "cu_seqlens[1] = 40"});
  refused(with({0, 40, 151}), 2, {"cu_seqlens[2] = 151", "150 tokens"});
  refused(with({0, -5, 140}), 2, {"cu_seqlens[1] = -5"});
  refused(with({0, 40, std::numeric_limits<std::int32_t>::max()}), 2, {"cu_seqlens[2] = 2147483647"});
  refused(with({0, 40, std::numeric_limits<std::int32_t>::min()}), 2, {"cu_seqlens[2] = -2147483648"});
  refused(with({}), 2, {"cu_seqlens"});
  Sample wrong_dtype;
  wrong_dtype.cu_dtype = "F32";
  refused(wrong_dtype, 2, {"tensor \"cu_seqlens\"", "F32", "I32"});
}

TEST_F(BadInput, Shapes) {
  Sample heads;
  heads.heads = 3, heads.key_heads = 2;
  refused(heads, 2, {"query_heads = 3", "key_heads = 2"});
  Sample dim;
  dim.dim = 24;
  refused(dim, 2, {"head_dim = 24", "16"});
  dim.dim = 0;
  refused(dim, 2, {"head_dim = 0"});
  dim.dim = 272;
  refused(dim, 2, {"head_dim = 272", "256"});
  Sample no_heads;
  no_heads.heads = 0;
  refused(no_heads, 2, {"query_heads = 0"});
  Sample rank;
  rank.v_shape = {150, 64};
  refused(rank, 2, {"tensor \"v\"", "[150, 64]", "three dimensions"});
  Sample other_tokens;
  other_tokens.v_shape = {75, 2, 64};
  refused(other_tokens, 2, {"tensor \"v\"", "[75, 2, 64]", "[150, 1, 64]"});
  Sample mixed;
  mixed.k_dtype = "F32";
  refused(mixed, 2, {"tensor \"k\"", "F32", "BF16"});
}

TEST_F(BadInput, Headers) {
  const std::string q = R"("q":{"dtype":"F32","shape":[1,1,16],"data_offsets":[0,64]})",
                    k = R"("k":{"dtype":"F32","shape":[1,1,16],"data_offsets":[64,128]})",
                    v = R"("v":{"dtype":"F32","shape":[1,1,16],"data_offsets":[128,192]})";
  const auto file = [&](const std::string& third) { return "{" + q + "," + k + "," + third + "}"; };
  write_raw(folder / "in", file(v), 192);
  ASSERT_EQ(run({"attend", folder / "in", "--recipe", "bf16", "--out", folder / "control"}).code, 0);
  refused_header(file(v), 191, {"tensor \"v\"", "data_offsets [128, 192]", "191 bytes"});  // truncated data
  refused_header(file(v), 200, {"192 bytes", "200"});                                      // bytes of nobody
  refused_header(file(v).substr(0, 90), 0, {"no valid JSON"});                             // truncated header
  refused_header(file(v), 192, {"header length 18446744073709551615"}, std::numeric_limits<std::uint64_t>::max());
  refused_header(file(v), 192, {"header length 9223372036854775808"}, std::uint64_t{1} << 63);
  refused_header(file(R"("v":{"dtype":"F32","shape":[1,1,16],"data_offsets":[100,164]})"), 164,
                 {"tensor \"v\"", "data_offsets", "overlap"});
  refused_header(file(R"("v":{"dtype":"F32","shape":[1,1,16],"data_offsets":[136,200]})"), 200, {"tensor \"v\"", "holes"});
  refused_header(file(R"("v":{"dtype":"F32","shape":[1,1,16],"data_offsets":[192,128]})"), 192,
                 {"tensor \"v\"", "end before they begin"});
  refused_header(file(R"("v":{"dtype":"F32","shape":[18446744073709551615,18446744073709551615,2],"data_offsets":[128,192]})"), 192,
                 {"tensor \"v\"", "shape", "64 bits"});
  refused_header(file(R"("v":{"dtype":"F32","shape":[18446744073709551616,1,16],"data_offsets":[128,192]})"), 192,
                 {"tensor \"v\"", "shape"});
  refused_header(file(R"("v":{"dtype":"F32","shape":[18446744073709551615,0,16],"data_offsets":[128,128]})"), 128,
                 {"tensor \"v\"", "too large"});
  refused_header(file(R"("v":{"dtype":"F32","shape":[-1,1,16],"data_offsets":[128,192]})"), 192, {"tensor \"v\"", "shape", "-1"});
  refused_header(file(R"("v":{"dtype":"F32","shape":[1,1,17],"data_offsets":[128,192]})"), 192, {"tensor \"v\"", "64 bytes", "68"});
  refused_header(file(R"("v":{"dtype":"F33","shape":[1,1,16],"data_offsets":[128,192]})"), 192, {"tensor \"v\"", "dtype", "F33"});
  refused_header(file(R"("v":{"dtype":"I32","shape":[1,1,16],"data_offsets":[128,192]})"), 192, {"tensor \"v\"", "dtype is I32"});
  refused_header(file(R"("v":{"dtype":"F32","shape":[1,1,16]})"), 192, {"tensor \"v\"", "no data_offsets"});
  refused_header(file(R"("v":{"dtype":"F32","shape":[1,1,16],"data_offsets":[128]})"), 192, {"tensor \"v\"", "data_offsets"});
  refused_header(file(R"("v":{"dtype":"F32","shape":[1,1,16],"data_offsets":[128,192],"dtype":"F32"})"), 192,
                 {"tensor \"v\"", "twice"});
  refused_header(file(R"("k":{"dtype":"F32","shape":[1,1,16],"data_offsets":[128,192]})"), 192, {"tensor \"k\"", "twice"});
  refused_header("{" + q + "," + k + "}", 128, {"no tensor \"v\""});
  refused_header("[1,2]", 0, {"JSON object"});
  refused_header("", 0, {"no valid JSON"});
  std::ofstream(folder / "in") << "abc";
  refused(folder / "in", 2, {"3 bytes"});
}

TEST_F(BadInput, Usage) {
  Sample().write(folder / "in");
  const std::string in = folder / "in";
  refused(in, 2, {"--causal", "--full"}, {"--causal", "--full"});
  refused(in, 2, {"--window", "-2"}, {"--window", "-2,0"});
  refused(in, 2, {"--window", "two whole numbers"}, {"--window", "5"});
  refused(in, 2, {"--window", "two whole numbers"}, {"--window", "99999999999999999999,0"});
  refused(in, 2, {"--window", "no value"}, {"--window", ""});  // of a script's empty variable
  refused(in, 2, {"--scale", "above 0"}, {"--scale", "0"});
  refused(in, 2, {"--scale 1e-50", "2^-100"}, {"--scale", "1e-50"});  // 0 as a float, which means the default
  refused(in, 2, {"--scale 1e+39", "2^100"}, {"--scale", "1e39"});
  refused(in, 2, {"--scale"}, {"--scale", "nan"});
  refused(in, 2, {"--scale"}, {"--scale", "-1"});
  refused(in, 2, {"--threads"}, {"--threads", "-1"});
  refused(in, 2, {"--device", "tpu", "cpu", "cuda"}, {"--device", "tpu"});
  refused(in, 2, {"--out-dtype", "f64", "bf16"}, {"--out-dtype", "f64"});
  refused(in, 2, {"--nonsense"}, {"--nonsense"});
#if !defined(FLAMIA_TESTS_WITH_CUDA)
  refused(in, 3, {"cuda"}, {"--device", "cuda"});
#endif
  Sample no_gradient;
  no_gradient.with_gradient = false;
  refused(no_gradient, 2, {"--backward", "dout"}, {"--backward"});
  EXPECT_EQ(run({}).code, 2);
  const Outcome unknown = run({"attnd"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_THAT(unknown.err, HasSubstr("\"attnd\"; there are attend, quantize"));
  EXPECT_EQ(run({"attend"}).code, 2);
}

TEST_F(BadInput, Recipes) {
  Sample().write(folder / "in");
  const Outcome unknown = run({"attend", folder / "in", "--recipe", "mxfp9", "--out", folder / "out"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_THAT(unknown.err, HasSubstr("mxfp9"));
  EXPECT_THAT(unknown.err, HasSubstr("mxfp8"));  // the nearest name is offered
  const Outcome escape = run({"attend", folder / "in", "--recipe", "mx\x1b[31m", "--out", folder / "out"});
  EXPECT_EQ(escape.code, 2);
  EXPECT_THAT(escape.err, Not(HasSubstr("\x1b")));  // nothing that a terminal would obey
  EXPECT_THAT(escape.err, HasSubstr("\\x1b[31m"));
  EXPECT_THAT(run({"\x1b[2J"}).err, Not(HasSubstr("\x1b")));
  const Outcome inference = run({"attend", folder / "in", "--recipe", "sage3", "--backward", "--out", folder / "out"});
  EXPECT_EQ(inference.code, 3);
  EXPECT_THAT(inference.err, HasSubstr("sage3"));
  EXPECT_EQ(run({"accuracy", folder / "in", "--recipes", "mxfp8,,bf16"}).code, 2);
  EXPECT_EQ(run({"leak", folder / "in", "--recipes", "mxfp8", "--factors", "16,x"}).code, 2);
  EXPECT_EQ(run({"leak", folder / "in", "--recipes", "mxfp8", "--factors", "inf"}).code, 2);
}

TEST_F(BadInput, Files) {
  refused(folder / "missing", 4, {"missing", "No such file"});
  refused(folder / ".", 4, {"folder"});
  refused("/dev/zero", 2, {"/dev/zero", "JSON"});  // which never ends
}

#if defined(FLAMIA_TESTS_WITH_CUDA)
TEST_F(BadInput, Workloads) {  // all of it is said before a GPU is asked for
  for (const char* lengths : {"", "x", "-1", "2147483647x2", "16777217x0", "0x9999999,0x9999999", "99999999999999999999"})
    EXPECT_EQ(run({"bench", "--lengths", lengths}).code, 2) << lengths;
  EXPECT_EQ(run({"bench", "--workload-file", folder / "."}).code, 4);
  EXPECT_EQ(run({"bench", "--workload-file", "/dev/zero"}).code, 2);
  EXPECT_EQ(run({"bench", "--lengths", "64", "--csv", folder / "no/such/folder"}).code, 4);
}
#endif

TEST_F(BadInput, NotANumberIsADefinedResult) {
  for (const float poison :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    Sample clean, poisoned;
    poisoned.poison = poison;
    clean.write(folder / "clean"), poisoned.write(folder / "poisoned");
    for (const char* name : {"clean", "poisoned"})
      ASSERT_EQ(run({"attend", folder / name, "--recipe", "mxfp8-exact", "--out", folder / (std::string(name) + "-out")}).code, 0);
    const std::vector<float> a = read(folder / "clean-out", "out").f32(), b = read(folder / "poisoned-out", "out").f32();
    std::size_t changed = 0;
    const std::size_t token = a.size() / 2 / 128, head = a.size() / 2 / 64 % 2;  // [150, 2, 64]
    for (std::size_t i = 0; i < a.size(); ++i) {
      const bool own = i / 128 == token && i / 64 % 2 == head;
      EXPECT_EQ(std::isnan(b[i]), own);
      changed += !own && numerics::bits_of(a[i]) != numerics::bits_of(b[i]);
    }
    EXPECT_EQ(changed, 0u);
  }
}

}  // namespace
}  // namespace flamia::test
