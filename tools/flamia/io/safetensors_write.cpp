// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <nlohmann/json.hpp>

#include "io/output_file.hpp"
#include "io/safetensors.hpp"

namespace flamia::cli {

Status write_safetensors(const std::string& path, std::vector<TensorToWrite> tensors, const Metadata& metadata) {
  // Wide elements first, so that every tensor is aligned to its element (the reference implementation's order).
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const auto& a, const auto& b) { return bits_of_dtype(a.dtype) > bits_of_dtype(b.dtype); });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::vector<std::uint64_t> sizes;
  std::uint64_t end = 0;
  for (const TensorToWrite& tensor : tensors) {
    std::uint64_t bytes = bits_of_dtype(tensor.dtype) / 8;
    for (const std::uint64_t dimension : tensor.shape) bytes *= dimension;
    header[tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {end, end + bytes}}};
    sizes.push_back(bytes);
    end += bytes;
  }
  std::string json = header.dump();
  json.append((8 - json.size() % 8) % 8, ' ');
  std::uint8_t prefix[8];
  for (int i = 0; i < 8; ++i) prefix[i] = static_cast<std::uint8_t>(json.size() >> 8 * i);

  OutputFile out;
  if (Status s = out.open(path); !s.ok()) return s;
  if (Status s = out.write(prefix, sizeof prefix); !s.ok()) return s;
  if (Status s = out.write(json.data(), json.size()); !s.ok()) return s;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (Status s = out.write(tensors[i].data, sizes[i]); !s.ok()) return s;
  return out.commit();
}

}  // namespace flamia::cli
