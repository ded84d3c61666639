// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "io/output_file.hpp"
#include "io/safetensors.hpp"
#include "json.hpp"

namespace flamia::cli {

Status write_safetensors(const std::string& path, std::vector<TensorToWrite> tensors, const Metadata& metadata) {
  // Wide elements first, so that every tensor is aligned to its element (the reference implementation's order).
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const auto& a, const auto& b) { return bits_of_dtype(a.dtype) > bits_of_dtype(b.dtype); });
  Json header = Json::object();
  if (!metadata.empty()) header.set("__metadata__", metadata);
  std::vector<std::uint64_t> sizes;
  std::uint64_t end = 0;
  for (const TensorToWrite& tensor : tensors) {
    std::uint64_t bytes = bits_of_dtype(tensor.dtype) / 8;
    for (const std::uint64_t dimension : tensor.shape) bytes *= dimension;
    Json entry = Json::object();
    entry.set("dtype", tensor.dtype).set("shape", tensor.shape).set("data_offsets", std::vector{end, end + bytes});
    header.set(tensor.name, std::move(entry));
    sizes.push_back(bytes);
    end += bytes;
  }
  std::string json = header.line();
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
