// SPDX-License-Identifier: Apache-2.0
// Safetensors files: 8 bytes of header length (little endian), a JSON header, then the tensors' bytes without holes
// (https://github.com/huggingface/safetensors, "Format"). The reader believes nothing that the header says before it is checked
// against the file, and allocates only what the file really holds.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flamia/status.hpp"

namespace flamia::cli {

struct TensorInfo {
  std::string name;
  std::string dtype;  // "F32", "BF16", "F8_E4M3", ...
  std::vector<std::uint64_t> shape;
  std::uint64_t begin = 0, end = 0;  // bytes, from the end of the header
  std::uint64_t bytes() const { return end - begin; }
};

using Metadata = std::map<std::string, std::string>;

/// Bits of one element; 0 for a dtype that the format does not know.
unsigned bits_of_dtype(std::string_view dtype);

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // in the order of their data
  Metadata metadata;
};

/// Reads and checks a header for `data_bytes` bytes of tensor data: known dtypes, shapes that fit 64 bits and match their offsets, no
/// overlap, no hole, nothing beyond the data, no name twice. Messages begin with `file` and name the tensor and the field.
Status parse_header(const std::string& file, std::string_view json, std::uint64_t data_bytes, SafetensorsHeader* header);

class ByteSource;  // a file that can be read anywhere, or bytes in memory

class SafetensorsFile {
 public:
  /// A regular file is read tensor by tensor; a pipe or device is read to its end first. io_error: the file cannot be opened or read.
  static Status open(const std::string& path, SafetensorsFile* file);
  static Status from_bytes(std::string name, std::vector<std::uint8_t> bytes, SafetensorsFile* file);

  const std::string& name() const { return name_; }
  std::span<const TensorInfo> tensors() const { return header_.tensors; }
  const Metadata& metadata() const { return header_.metadata; }
  const TensorInfo* find(std::string_view tensor) const;  // null where there is none
  /// `into`: tensor.bytes() bytes.
  Status read(const TensorInfo& tensor, void* into) const;

 private:
  static Status load(std::string name, std::shared_ptr<ByteSource> source, SafetensorsFile* file);

  std::string name_;
  std::shared_ptr<ByteSource> source_;
  std::uint64_t data_begin_ = 0;
  SafetensorsHeader header_;
};

struct TensorToWrite {
  std::string name;
  std::string dtype;
  std::vector<std::uint64_t> shape;
  const void* data = nullptr;  // dense, little endian
};

/// Writes all or nothing (OutputFile).
Status write_safetensors(const std::string& path, std::vector<TensorToWrite> tensors, const Metadata& metadata);

}  // namespace flamia::cli
