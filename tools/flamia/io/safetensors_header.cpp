// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "io/safetensors.hpp"

namespace flamia::cli {

unsigned bits_of_dtype(std::string_view dtype) {
  static constexpr std::pair<std::string_view, unsigned> kBits[] = {
      {"BOOL", 8},    {"U8", 8},      {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F4", 4},
      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"I16", 16}, {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},
      {"U32", 32},    {"F32", 32},    {"F64", 64}, {"I64", 64},    {"U64", 64},    {"C64", 64}};
  for (const auto& [name, bits] : kBits)
    if (name == dtype) return bits;
  return 0;
}

namespace {

using Json = nlohmann::json;

std::string printable(std::string_view text) {
  // control characters and invalid bytes of a hostile header do not reach the terminal
  return Json(text).dump(-1, ' ', true, Json::error_handler_t::replace);
}

/// Builds the header while it is parsed, so that a name or field given twice is seen and nothing deep is ever built.
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  HeaderReader(SafetensorsHeader* header, std::string* error) : header_(header), error_(error) {}

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_integer(number_integer_t value) override { return unexpected(std::to_string(value)); }
  bool number_float(number_float_t, const string_t& text) override { return unexpected(text); }
  bool binary(binary_t&) override { return unexpected("binary data"); }
  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::array) return unexpected(std::to_string(value));
    if (field_ == "shape") {
      if (tensor_.shape.size() == kMostDimensions)
        return fail("shape has more than " + std::to_string(kMostDimensions) + " dimensions");
      tensor_.shape.push_back(value);
    } else {
      if (offsets_ == 2) return fail("data_offsets has more than two entries; it is [begin, end]");
      (offsets_++ == 0 ? tensor_.begin : tensor_.end) = value;
    }
    return true;
  }
  bool string(string_t& value) override {
    if (place_ == Place::metadata) {
      header_->metadata.emplace(field_, value);
      return true;
    }
    if (place_ != Place::tensor || field_ != "dtype") return unexpected(printable(value));
    tensor_.dtype = value;
    return true;
  }
  bool start_object(std::size_t) override {
    if (place_ == Place::outside) {
      place_ = Place::top;
    } else if (place_ == Place::top) {
      place_ = name_ == "__metadata__" ? Place::metadata : Place::tensor;
      tensor_ = {};
      tensor_.name = name_;
      fields_.clear();
      offsets_ = 0;
    } else {
      return unexpected("an object");
    }
    return true;
  }
  bool key(string_t& value) override {
    if (place_ == Place::top) {
      name_ = value;
      if (!names_.insert(value).second) return fail("is in the header twice; every tensor has one entry");
      return true;
    }
    field_ = value;
    if (!fields_.insert(value).second) return fail(printable(value) + " is given twice");
    if (place_ == Place::tensor && value != "dtype" && value != "shape" && value != "data_offsets")
      return fail("has an unknown field " + printable(value) + "; dtype, shape and data_offsets are allowed");
    return true;
  }
  bool end_object() override {
    if (place_ == Place::top) {
      place_ = Place::outside;
      return true;
    }
    if (place_ == Place::tensor) {
      for (const char* needed : {"dtype", "shape", "data_offsets"})
        if (!fields_.count(needed)) return fail("has no " + std::string(needed));
      if (offsets_ != 2) return fail("data_offsets has " + std::to_string(offsets_) + " entries; it is [begin, end]");
      header_->tensors.push_back(std::move(tensor_));
    }
    place_ = Place::top;
    return true;
  }
  bool start_array(std::size_t) override {
    if (place_ != Place::tensor || field_ == "dtype") return unexpected("an array");
    place_ = Place::array;
    return true;
  }
  bool end_array() override {
    place_ = Place::tensor;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    (void)error;  // its text repeats bytes of the file
    *error_ = "the header is no valid JSON at byte " + std::to_string(position);
    return false;
  }

 private:
  enum class Place { outside, top, tensor, metadata, array };
  static constexpr std::size_t kMostDimensions = 16;

  bool fail(const std::string& what) {
    *error_ = (name_ == "__metadata__" ? "__metadata__" : "tensor " + printable(name_)) + ": " + what;
    return false;
  }
  bool unexpected(const std::string& what) {
    switch (place_) {
      case Place::outside:
        *error_ = "the header must be a JSON object but holds " + what;
        return false;
      case Place::top:
        return fail("must be an object with dtype, shape and data_offsets but is " + what);
      case Place::metadata:
        return fail(printable(field_) + " must be a string but is " + what);
      case Place::array:
        return fail(field_ + " holds " + what + "; whole numbers from 0 to 2^64 - 1 are allowed");
      case Place::tensor:
        return fail(field_ + " must be " + (field_ == "dtype" ? "a string" : "an array") + " but is " + what);
    }
    return false;
  }

  SafetensorsHeader* header_;
  std::string* error_;
  Place place_ = Place::outside;
  std::string name_, field_;
  std::set<std::string> names_, fields_;
  TensorInfo tensor_;
  int offsets_ = 0;
};

/// The tensor's size by dtype and shape, or what is wrong with them.
std::string size_of_tensor(const TensorInfo& tensor, std::uint64_t* bytes) {
  const unsigned bits = bits_of_dtype(tensor.dtype);
  if (bits == 0)
    return "dtype " + printable(tensor.dtype) + " is not known; F32, F16, BF16, F8_E4M3, F8_E8M0, I8, U8, I32, ... are";
  std::uint64_t total = bits;
  // a product of 0 may hide a factor that overflows nothing: zero dimensions are looked at first
  if (std::find(tensor.shape.begin(), tensor.shape.end(), 0u) != tensor.shape.end()) total = 0;
  for (const std::uint64_t dimension : tensor.shape)
    if (total != 0 && __builtin_mul_overflow(total, dimension, &total))
      return "shape: the product of its dimensions exceeds 64 bits";
  if (total % 8 != 0) return "shape: " + std::to_string(total) + " bits of " + tensor.dtype + " are no whole number of bytes";
  *bytes = total / 8;
  return {};
}

std::string check_tensor(const TensorInfo& tensor, std::uint64_t data_bytes) {
  const std::string offsets = "data_offsets [" + std::to_string(tensor.begin) + ", " + std::to_string(tensor.end) + "]";
  if (tensor.begin > tensor.end) return offsets + " end before they begin";
  if (tensor.end > data_bytes) return offsets + " reach beyond the " + std::to_string(data_bytes) + " bytes of data in the file";
  std::uint64_t bytes = 0;
  if (std::string wrong = size_of_tensor(tensor, &bytes); !wrong.empty()) return wrong;
  if (bytes != tensor.bytes())
    return offsets + " hold " + std::to_string(tensor.bytes()) + " bytes but dtype and shape need " + std::to_string(bytes);
  return {};
}

}  // namespace

Status parse_header(const std::string& file, std::string_view json, std::uint64_t data_bytes, SafetensorsHeader* header) {
  SafetensorsHeader made;
  std::string error;
  HeaderReader reader(&made, &error);
  if (!Json::sax_parse(json.begin(), json.end(), &reader)) return Status::invalid(file + ": " + error);
  std::stable_sort(made.tensors.begin(), made.tensors.end(),
                   [](const TensorInfo& a, const TensorInfo& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  std::uint64_t end = 0;
  const TensorInfo* before = nullptr;
  for (const TensorInfo& tensor : made.tensors) {
    const std::string start = file + ": tensor " + printable(tensor.name) + ": ";
    if (std::string wrong = check_tensor(tensor, data_bytes); !wrong.empty()) return Status::invalid(start + wrong);
    if (tensor.begin < end)
      return Status::invalid(start + "data_offsets begin at " + std::to_string(tensor.begin) + " inside tensor " +
                             printable(before->name) + ", which ends at " + std::to_string(end) + "; tensors must not overlap");
    if (tensor.begin > end)
      return Status::invalid(start + "data_offsets begin at " + std::to_string(tensor.begin) + " but the data before ends at " +
                             std::to_string(end) + "; the format allows no holes");
    end = tensor.end;
    before = &tensor;
  }
  if (end != data_bytes)
    return Status::invalid(file + ": the tensors cover " + std::to_string(end) + " bytes of data but the file holds " +
                           std::to_string(data_bytes) + "; the format allows none that belong to no tensor");
  *header = std::move(made);
  return {};
}

}  // namespace flamia::cli
