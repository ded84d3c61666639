// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "io/safetensors.hpp"

namespace flamia::cli {

namespace {

constexpr std::uint64_t kMostHeaderBytes = 100'000'000;  // the format's own limit

std::uint64_t header_length(const std::uint8_t* bytes) {
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | bytes[i];
  return length;
}

Status io_error(const std::string& file, const std::string& what) {
  return {StatusCode::io_error, file + ": " + what + ": " + std::strerror(errno)};
}

}  // namespace

class ByteSource {
 public:
  ByteSource() = default;
  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;
  ~ByteSource() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }

  Status open(const std::string& path) {
    descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor_ < 0) return io_error(path, "cannot be opened for reading");
    struct stat facts;
    if (::fstat(descriptor_, &facts) != 0) return io_error(path, "cannot be examined");
    if (S_ISDIR(facts.st_mode)) return {StatusCode::io_error, path + ": is a folder; name a safetensors file"};
    if (S_ISREG(facts.st_mode)) {
      size_ = static_cast<std::uint64_t>(facts.st_size);
      return {};
    }
    return read_all(path);
  }

  void take(std::vector<std::uint8_t> bytes) {
    bytes_ = std::move(bytes);
    size_ = bytes_.size();
  }

  std::uint64_t size() const { return size_; }

  /// The caller has checked offset + count <= size().
  Status read(const std::string& path, std::uint64_t offset, std::uint64_t count, void* into) const {
    auto* to = static_cast<std::uint8_t*>(into);
    if (descriptor_ < 0) {
      if (count > 0) std::memcpy(to, bytes_.data() + offset, count);
      return {};
    }
    while (count > 0) {
      const ssize_t got = ::pread(descriptor_, to, std::min<std::uint64_t>(count, 1u << 30), static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return io_error(path, "cannot be read");
      if (got == 0) return {StatusCode::io_error, path + ": became shorter while it was read"};
      to += got, offset += static_cast<std::uint64_t>(got), count -= static_cast<std::uint64_t>(got);
    }
    return {};
  }

 private:
  Status read_all(const std::string& path) {
    std::vector<std::uint8_t> bytes;
    std::size_t filled = 0;
    for (;;) {
      if (filled == bytes.size()) bytes.resize(std::max<std::size_t>(1 << 20, bytes.size() * 2));
      const ssize_t got = ::read(descriptor_, bytes.data() + filled, bytes.size() - filled);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return io_error(path, "cannot be read");
      if (got == 0) break;
      filled += static_cast<std::size_t>(got);
      // A device may never end: what cannot begin a file is not read further, and load() says why.
      if (filled >= 8 && (header_length(bytes.data()) == 0 || header_length(bytes.data()) > kMostHeaderBytes)) break;
    }
    bytes.resize(filled);
    ::close(descriptor_);
    descriptor_ = -1;
    take(std::move(bytes));
    return {};
  }

  int descriptor_ = -1;
  std::vector<std::uint8_t> bytes_;
  std::uint64_t size_ = 0;
};

Status SafetensorsFile::load(std::string name, std::shared_ptr<ByteSource> source, SafetensorsFile* file) {
  const std::uint64_t size = source->size();
  if (size < 8)
    return Status::invalid(name + ": has " + std::to_string(size) +
                           " bytes; a safetensors file begins with 8 bytes of header length");
  std::uint8_t prefix[8];
  if (Status s = source->read(name, 0, 8, prefix); !s.ok()) return s;
  const std::uint64_t length = header_length(prefix);
  if (length > size - 8)
    return Status::invalid(name + ": header length " + std::to_string(length) + " exceeds the " + std::to_string(size - 8) +
                           " bytes that follow it; the file is cut short or no safetensors file");
  if (length > kMostHeaderBytes)
    return Status::invalid(name + ": header length " + std::to_string(length) + " exceeds the format's limit of 100000000 bytes");
  std::string json(length, ' ');
  if (Status s = source->read(name, 8, length, json.data()); !s.ok()) return s;
  SafetensorsFile made;
  if (Status s = parse_header(name, json, size - 8 - length, &made.header_); !s.ok()) return s;
  made.name_ = std::move(name);
  made.source_ = std::move(source);
  made.data_begin_ = 8 + length;
  *file = std::move(made);
  return {};
}

Status SafetensorsFile::open(const std::string& path, SafetensorsFile* file) {
  auto source = std::make_shared<ByteSource>();
  if (Status s = source->open(path); !s.ok()) return s;
  return load(path, std::move(source), file);
}

Status SafetensorsFile::from_bytes(std::string name, std::vector<std::uint8_t> bytes, SafetensorsFile* file) {
  auto source = std::make_shared<ByteSource>();
  source->take(std::move(bytes));
  return load(std::move(name), std::move(source), file);
}

const TensorInfo* SafetensorsFile::find(std::string_view tensor) const {
  for (const TensorInfo& info : header_.tensors)
    if (info.name == tensor) return &info;
  return nullptr;
}

Status SafetensorsFile::read(const TensorInfo& tensor, void* into) const {
  return source_->read(name_, data_begin_ + tensor.begin, tensor.bytes(), into);
}

}  // namespace flamia::cli
