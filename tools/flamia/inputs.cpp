// SPDX-License-Identifier: Apache-2.0
#include "inputs.hpp"

#include <cstring>
#include <limits>

#include "numerics/format.hpp"

namespace flamia::cli {
namespace {

constexpr std::uint64_t kMostTokens = std::numeric_limits<std::int32_t>::max();  // cu_seqlens is int32

std::string shape_text(const std::vector<std::uint64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

/// A [tokens, heads, dim] tensor of floating-point numbers.
class Reader {
 public:
  explicit Reader(const SafetensorsFile& file) : file_(file) {}

  Status tensor(const char* name, HostTensor* to, std::vector<std::uint64_t>* shape) const {
    const TensorInfo* info = file_.find(name);
    if (info == nullptr) return Status::invalid(file_.name() + ": has no tensor \"" + name + "\"; q, k and v are needed");
    if (info->dtype == "F32") {
      to->dtype = DType::f32;
    } else if (info->dtype == "F16") {
      to->dtype = DType::f16;
    } else if (info->dtype == "BF16") {
      to->dtype = DType::bf16;
    } else {
      return wrong(*info, "dtype is " + info->dtype + " but must be F32, F16 or BF16");
    }
    if (info->shape.size() != 3)
      return wrong(*info, "shape " + shape_text(info->shape) + " must have three dimensions: tokens, heads, head dim");
    if (info->shape[0] > kMostTokens || info->shape[1] > 65536 || info->shape[2] > 65536)
      return wrong(*info,
                   "shape " + shape_text(info->shape) + " is too large: at most 2^31 - 1 tokens, 65536 heads and 65536 channels");
    to->heads = static_cast<int>(info->shape[1]);
    *shape = info->shape;
    to->bytes.resize(info->bytes());
    return file_.read(*info, to->bytes.data());
  }

  Status same_shape(const char* name, const std::vector<std::uint64_t>& shape, const char* other,
                    const std::vector<std::uint64_t>& expected, bool heads_too) const {
    if (shape[0] == expected[0] && shape[2] == expected[2] && (!heads_too || shape[1] == expected[1])) return {};
    return wrong(*file_.find(name), "shape " + shape_text(shape) + " does not fit " + other + "'s " + shape_text(expected) +
                                        (heads_too ? "; they must be equal" : "; tokens and head dim must be equal"));
  }

  Status same_dtype(const char* name) const {
    if (file_.find(name)->dtype == file_.find("q")->dtype) return {};
    return wrong(*file_.find(name),
                 "dtype is " + file_.find(name)->dtype + " but q's is " + file_.find("q")->dtype + "; q, k and v have one dtype");
  }

  Status offsets(std::int64_t tokens, std::vector<std::int32_t>* to) const {
    const TensorInfo* info = file_.find("cu_seqlens");
    if (info == nullptr) {
      *to = {0, static_cast<std::int32_t>(tokens)};
      return {};
    }
    if (info->dtype != "I32") return wrong(*info, "dtype is " + info->dtype + " but must be I32");
    if (info->shape.size() != 1)
      return wrong(*info, "shape " + shape_text(info->shape) + " must have one dimension: documents + 1");
    to->resize(info->shape[0]);
    return file_.read(*info, to->data());
  }

 private:
  Status wrong(const TensorInfo& info, const std::string& what) const {
    return Status::invalid(file_.name() + ": tensor \"" + info.name + "\": " + what);
  }
  const SafetensorsFile& file_;
};

}  // namespace

Status load_inputs(const std::string& path, Inputs* inputs) {
  SafetensorsFile file;
  if (Status s = SafetensorsFile::open(path, &file); !s.ok()) return s;
  return load_inputs(file, inputs);
}

Status load_inputs(const SafetensorsFile& file, Inputs* inputs) {
  const Reader reader(file);
  Inputs in;
  std::vector<std::uint64_t> q, k, v, d_o;
  if (Status s = reader.tensor("q", &in.q, &q); !s.ok()) return s;
  if (Status s = reader.tensor("k", &in.k, &k); !s.ok()) return s;
  if (Status s = reader.tensor("v", &in.v, &v); !s.ok()) return s;
  if (Status s = reader.same_shape("k", k, "q", q, false); !s.ok()) return s;
  if (Status s = reader.same_shape("v", v, "k", k, true); !s.ok()) return s;
  for (const char* name : {"k", "v"})
    if (Status s = reader.same_dtype(name); !s.ok()) return s;
  if (file.find("dout") != nullptr) {
    in.d_o.emplace();
    if (Status s = reader.tensor("dout", &*in.d_o, &d_o); !s.ok()) return s;
    if (Status s = reader.same_shape("dout", d_o, "q", q, true); !s.ok()) return s;
  }
  in.problem.tokens = static_cast<std::int64_t>(q[0]);
  in.problem.query_heads = in.q.heads;
  in.problem.key_heads = in.k.heads;
  in.problem.head_dim = static_cast<int>(q[2]);
  if (Status s = reader.offsets(in.problem.tokens, &in.cu_seqlens); !s.ok()) return s;
  if (Status s = schedule::Documents::create(in.cu_seqlens, in.problem.tokens, &in.documents); !s.ok())
    return {s.code(), file.name() + ": " + s.message()};
  in.problem.documents = static_cast<std::int64_t>(in.cu_seqlens.size()) - 1;
  *inputs = std::move(in);
  return {};
}

std::vector<float> to_f32(const HostTensor& tensor) {
  std::vector<float> values(tensor.bytes.size() / size_of(tensor.dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (tensor.dtype == DType::f32) {
      std::memcpy(&values[i], tensor.bytes.data() + 4 * i, 4);
      continue;
    }
    std::uint16_t half;
    std::memcpy(&half, tensor.bytes.data() + 2 * i, 2);
    values[i] = tensor.dtype == DType::bf16 ? numerics::decode_bf16(half) : numerics::decode_f16(half);
  }
  return values;
}

HostTensor from_f32(const std::vector<float>& values, int heads) {
  HostTensor tensor;
  tensor.heads = heads;
  tensor.bytes.resize(values.size() * sizeof(float));
  if (!values.empty()) std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  return tensor;
}

HostTensor bf16_from_f32(const std::vector<float>& values, int heads) {
  HostTensor tensor;
  tensor.dtype = DType::bf16;
  tensor.heads = heads;
  tensor.bytes.resize(values.size() * sizeof(std::uint16_t));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint16_t code = numerics::encode_bf16(values[i]);
    std::memcpy(tensor.bytes.data() + sizeof code * i, &code, sizeof code);
  }
  return tensor;
}

}  // namespace flamia::cli
