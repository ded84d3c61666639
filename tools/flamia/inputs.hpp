// SPDX-License-Identifier: Apache-2.0
// What the program's commands work on: q [T, H, d], k and v [T, Hkv, d], dout [T, H, d] (optional), cu_seqlens int32 [B + 1] (optional).
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flamia/attention.hpp"
#include "io/safetensors.hpp"
#include "schedule/documents.hpp"

namespace flamia::cli {

/// A dense [tokens, heads, dim] tensor in host memory.
struct HostTensor {
  DType dtype = DType::f32;
  int heads = 0;
  std::vector<std::uint8_t> bytes;
  TensorView view() const { return {bytes.data(), dtype, 0, 0}; }
};

struct Inputs {
  Problem problem;  // dimensions; mask and scale are the command's
  HostTensor q, k, v;
  std::optional<HostTensor> d_o;
  std::vector<std::int32_t> cu_seqlens;  // one document of all tokens where the file has none
  schedule::Documents documents;
};

/// Reads and checks `path`. Messages name the file, the tensor and the field.
Status load_inputs(const std::string& path, Inputs* inputs);
Status load_inputs(const SafetensorsFile& file, Inputs* inputs);

/// The same values as FP32, in which every amplification of `flamia leak` is exact.
std::vector<float> to_f32(const HostTensor& tensor);
HostTensor from_f32(const std::vector<float>& values, int heads);
HostTensor bf16_from_f32(const std::vector<float>& values, int heads);

}  // namespace flamia::cli
