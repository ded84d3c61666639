// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstring>

#include "mutate.hpp"
#include "targets.hpp"

namespace flamia::fuzz {
namespace {

constexpr int kCases = 100'000;

/// A small file as the program reads it: q, k, v, dout of 4 tokens, 2 heads (1 key head), 2 channels, and cu_seqlens.
Bytes good_file() {
  std::string json =
      R"({"__metadata__":{"format":"pt"},"q":{"dtype":"BF16","shape":[4,2,2],"data_offsets":[0,32]},)"
      R"("k":{"dtype":"BF16","shape":[4,1,2],"data_offsets":[32,48]},"v":{"dtype":"BF16","shape":[4,1,2],"data_offsets":[48,64]},)"
      R"("dout":{"dtype":"F32","shape":[4,2,2],"data_offsets":[64,128]},"cu_seqlens":{"dtype":"I32","shape":[3],"data_offsets":[128,140]}})";
  Bytes bytes(8);
  for (int i = 0; i < 8; ++i) bytes[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(json.size() >> 8 * i);
  bytes.insert(bytes.end(), json.begin(), json.end());
  bytes.resize(bytes.size() + 128, 0x3f);
  for (std::int32_t offset : {0, 1, 4})
    for (int i = 0; i < 4; ++i) bytes.push_back(static_cast<std::uint8_t>(offset >> 8 * i));
  return bytes;
}

/// After a change of the header: make its length right again, so that more cases reach the checks behind it.
void repair_length(Bytes* bytes) {
  if (bytes->size() < 8) return;
  const auto end = std::find(bytes->rbegin(), bytes->rend(), static_cast<std::uint8_t>('}'));
  const std::size_t length =
      static_cast<std::size_t>(bytes->rend() - end) < 8 ? 0 : static_cast<std::size_t>(bytes->rend() - end) - 8;
  for (std::size_t i = 0; i < 8; ++i) (*bytes)[i] = static_cast<std::uint8_t>(length >> 8 * i);
}

TEST(Fuzz, Loader) {
  const std::vector<std::string_view> words{"18446744073709551615",
                                            "9223372036854775808",
                                            "0",
                                            "-1",
                                            "1e9",
                                            "\"q\"",
                                            "\"shape\":[",
                                            "{",
                                            "}",
                                            "]",
                                            "\"dtype\":\"F32\"",
                                            "F8_E4M3",
                                            "I64",
                                            "null",
                                            "\\u0000",
                                            "\xff",
                                            "[4294967296,4294967296,2]",
                                            ",",
                                            "140"};
  const Bytes good = good_file();
  ASSERT_EQ(loader(good.data(), good.size()), Verdict::accepted);
  int accepted = 0;
  for (int n = 0; n < kCases; ++n) {
    Random random(static_cast<std::uint64_t>(n));
    Bytes bytes = good;
    mutate(&bytes, words, &random);
    if (random.below(2) == 0) repair_length(&bytes);
    accepted += loader(bytes.data(), bytes.size()) == Verdict::accepted;
  }
  // Both sides are reached: a change of the data is fine, one of the header hardly ever is.
  EXPECT_GT(accepted, kCases / 100);
  EXPECT_LT(accepted, kCases / 2);
}

TEST(Fuzz, LoaderOnNoise) {
  for (int n = 0; n < kCases; ++n) {
    Random random(static_cast<std::uint64_t>(n));
    Bytes bytes(random.below(64));
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random.next());
    ASSERT_EQ(loader(bytes.data(), bytes.size()), Verdict::rejected);
  }
}

TEST(Fuzz, CuSeqlens) {
  const std::vector<std::string_view> words{
      {"\xff\xff\xff\xff", 4}, {"\x00\x00\x00\x80", 4}, {"\xff\xff\xff\x7f", 4}, {"\x00\x00\x00\x00", 4}, {"\x05\x00\x00\x00", 4}};
  int accepted = 0;
  for (int n = 0; n < kCases; ++n) {
    Random random(static_cast<std::uint64_t>(n));
    Bytes bytes(1, static_cast<std::uint8_t>(random.below(33)));
    std::int32_t offset = 0;
    for (std::size_t b = random.below(6) + 1; b > 0; --b) {
      for (int i = 0; i < 4; ++i) bytes.push_back(static_cast<std::uint8_t>(offset >> 8 * i));
      offset += static_cast<std::int32_t>(random.below(8));
    }
    if (random.below(2) == 0) mutate(&bytes, words, &random);
    accepted += cu_seqlens(bytes.data(), bytes.size()) == Verdict::accepted;
  }
  EXPECT_GT(accepted, kCases / 10);
  EXPECT_LT(accepted, kCases * 9 / 10);
}

}  // namespace
}  // namespace flamia::fuzz
