// SPDX-License-Identifier: Apache-2.0
// Small input files, good and bad, and a way to look into results.
#pragma once
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "io/safetensors.hpp"
#include "numerics/format.hpp"

namespace flamia::test {

struct Sample {
  std::uint64_t tokens = 150, heads = 2, key_heads = 1, dim = 64;
  std::vector<std::int32_t> cu_seqlens{0, 40, 41, 140};  // ten tokens after the last document
  bool with_gradient = true;
  bool with_documents = true;
  std::string dtype = "BF16";
  std::string k_dtype;                 // "" = dtype
  std::vector<std::uint64_t> v_shape;  // empty = that of k
  std::string cu_dtype = "I32";
  std::optional<float> poison;  // put into one element of q
  float v_factor = 1.f;

  std::vector<float> values(std::uint64_t n, unsigned seed) const {
    std::mt19937 bits(seed);
    std::normal_distribution<float> normal;
    std::vector<float> made(n);
    for (float& x : made) x = numerics::round_bf16(normal(bits));
    return made;
  }

  static std::vector<std::uint8_t> encode(const std::vector<float>& values, const std::string& type) {
    std::vector<std::uint8_t> bytes;
    for (const float x : values) {
      if (type == "F32") {
        const std::uint32_t u = numerics::bits_of(x);
        for (int i = 0; i < 4; ++i) bytes.push_back(static_cast<std::uint8_t>(u >> 8 * i));
      } else {
        const std::uint16_t h = type == "F16" ? numerics::encode_f16(x) : numerics::encode_bf16(x);
        bytes.push_back(static_cast<std::uint8_t>(h)), bytes.push_back(static_cast<std::uint8_t>(h >> 8));
      }
    }
    return bytes;
  }

  void write(const std::string& path) const {
    std::vector<float> q_values = values(tokens * heads * dim, 1);
    if (poison) q_values[q_values.size() / 2] = *poison;
    const std::string k_type = k_dtype.empty() ? dtype : k_dtype;
    const auto q = encode(q_values, dtype);
    std::vector<float> v_values = values(tokens * key_heads * dim, 3);
    for (float& x : v_values) x *= v_factor;
    const auto k = encode(values(tokens * key_heads * dim, 2), k_type), v = encode(v_values, dtype);
    const auto g = encode(values(tokens * heads * dim, 4), dtype);
    const std::vector<std::uint64_t> shape{tokens, key_heads, dim};
    std::vector<cli::TensorToWrite> tensors{{"q", dtype, {tokens, heads, dim}, q.data()},
                                            {"k", k_type, shape, k.data()},
                                            {"v", dtype, v_shape.empty() ? shape : v_shape, v.data()}};
    if (with_gradient) tensors.push_back({"dout", dtype, {tokens, heads, dim}, g.data()});
    if (with_documents) tensors.push_back({"cu_seqlens", cu_dtype, {cu_seqlens.size()}, cu_seqlens.data()});
    ASSERT_TRUE(cli::write_safetensors(path, tensors, {}).ok());
  }
};

/// A file with this header and `data` bytes of zeros behind it; `length` lies about the header if given.
inline void write_raw(const std::string& path, const std::string& json, std::size_t data,
                      std::optional<std::uint64_t> length = {}) {
  std::ofstream file(path, std::ios::binary);
  const std::uint64_t told = length.value_or(json.size());
  for (int i = 0; i < 8; ++i) file.put(static_cast<char>(told >> 8 * i));
  file << json << std::string(data, '\0');
}

/// A tensor of a result file.
struct Read {
  cli::TensorInfo info;
  std::vector<std::uint8_t> bytes;
  std::vector<float> f32() const {
    std::vector<float> values(bytes.size() / 4);
    std::memcpy(values.data(), bytes.data(), 4 * values.size());
    return values;
  }
};

inline Read read(const std::string& path, const std::string& name) {
  Read result;
  cli::SafetensorsFile file;
  const Status opened = cli::SafetensorsFile::open(path, &file);
  EXPECT_TRUE(opened.ok()) << opened.message();
  const cli::TensorInfo* info = file.find(name);
  EXPECT_NE(info, nullptr) << name << " is not in " << path;
  if (info == nullptr) return result;
  result.info = *info;
  result.bytes.resize(info->bytes());
  EXPECT_TRUE(file.read(*info, result.bytes.data()).ok());
  return result;
}

}  // namespace flamia::test
