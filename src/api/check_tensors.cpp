// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <string>
#include <vector>

#include "api/check.hpp"
#include "api/regions.hpp"

namespace flamia::api {
namespace {

enum class Use { read, write };

/// Collects what a call touches; the first thing found wrong is kept.
class Arguments {
 public:
  explicit Arguments(const Problem& problem) : problem_(problem) {}

  void tensor(const char* name, const void* data, DType dtype, std::int64_t token_stride, std::int64_t head_stride, int heads,
              Use use) {
    if (!status_.ok()) return;
    if (static_cast<int>(dtype) > static_cast<int>(DType::bf16))
      return fail(std::string(name) + ".dtype = " + std::to_string(static_cast<int>(dtype)) + " but must be f32, f16 or bf16");
    if (use == Use::write && dtype == DType::f16)
      return fail(std::string(name) + ".dtype = f16 but results are written as f32 or bf16; ask for one of them and convert");
    if (token_stride < 0 || head_stride < 0)
      return fail(std::string(name) + " has token_stride " + std::to_string(token_stride) + " and head_stride " +
                  std::to_string(head_stride) + "; strides are positive numbers of elements, or 0 for dense");
    if (problem_.tokens == 0) return;
    if (!address(name, data, size_of(dtype))) return;
    Region region;
    region.name = name;
    region.address = reinterpret_cast<std::uintptr_t>(data);
    region.write = use == Use::write;
    if (!region.shape(problem_.tokens, heads, problem_.head_dim, static_cast<std::int64_t>(size_of(dtype)), token_stride,
                      head_stride))
      return fail(std::string(name) + " with token_stride " + std::to_string(token_stride) + " and head_stride " +
                  std::to_string(head_stride) + " reaches beyond 2^62 bytes; check the strides, they count elements");
    if (region.write && region.overlaps_itself())
      return fail(std::string(name) + " with token_stride " + std::to_string(token_stride) + " and head_stride " +
                  std::to_string(head_stride) + " would write some elements twice; use strides that keep " +
                  std::to_string(problem_.head_dim) + " channels of every token and head apart");
    regions_.push_back(region);
  }
  template <class Void>
  void tensor(const char* name, const BasicTensor<Void>& t, int heads, Use use) {
    tensor(name, t.data, t.dtype, t.token_stride, t.head_stride, heads, use);
  }

  void buffer(const char* name, const void* data, std::int64_t bytes, std::size_t alignment, Use use) {
    if (!status_.ok() || bytes == 0 || !address(name, data, alignment)) return;
    Region region;
    region.name = name;
    region.address = reinterpret_cast<std::uintptr_t>(data);
    region.write = use == Use::write;
    region.bytes = bytes;
    regions_.push_back(region);
  }

  /// What the forward pass reads.
  void inputs(const ForwardTensors& t) {
    tensor("q", t.q, problem_.query_heads, Use::read);
    tensor("k", t.k, problem_.key_heads, Use::read);
    tensor("v", t.v, problem_.key_heads, Use::read);
    same_dtype("q", t.q.dtype, "k", t.k.dtype);
    same_dtype("q", t.q.dtype, "v", t.v.dtype);
    cu_seqlens(t.cu_seqlens);
  }
  void cu_seqlens(const std::int32_t* data) {
    buffer("cu_seqlens", data, (problem_.documents + 1) * static_cast<std::int64_t>(sizeof(std::int32_t)), alignof(std::int32_t),
           Use::read);
  }

  void same_dtype(const char* a, DType type_a, const char* b, DType type_b) {
    if (status_.ok() && type_a != type_b)
      fail(std::string(b) + ".dtype differs from " + a + ".dtype; q, k and v have one dtype, so convert one of them");
  }

  Status finish() {
    for (std::size_t i = 0; i < regions_.size() && status_.ok(); ++i)
      for (std::size_t j = 0; j < i && status_.ok(); ++j)
        if ((regions_[i].write || regions_[j].write) && regions_[i].overlaps(regions_[j]))
          fail(std::string(regions_[j].name) + " and " + regions_[i].name + " share memory and one of them is written; give " +
               regions_[i].name + " memory of its own");
    return status_;
  }

 private:
  void fail(std::string message) { status_ = Status::invalid(std::move(message)); }
  bool address(const char* name, const void* data, std::size_t alignment) {
    if (data == nullptr) {
      fail(std::string(name) + " is null; give it memory of the size that the plan says");
    } else if (reinterpret_cast<std::uintptr_t>(data) % alignment != 0) {
      fail(std::string(name) + " is not aligned to " + std::to_string(alignment) + " bytes");
    }
    return status_.ok();
  }

  const Problem& problem_;
  Status status_;
  std::vector<Region> regions_;
};

}  // namespace

Status check_forward(const Plan& plan, const ForwardTensors& t, const void* saved, const void* workspace) {
  const Problem& p = plan.problem();
  Arguments args(p);
  args.inputs(t);
  args.tensor("o", t.o, p.query_heads, Use::write);
  args.buffer("lse", t.lse, p.tokens * p.query_heads * static_cast<std::int64_t>(sizeof(float)), alignof(float), Use::write);
  args.buffer("saved", saved, static_cast<std::int64_t>(plan.saved_bytes()), kBufferAlignment, Use::write);
  args.buffer("workspace", workspace, static_cast<std::int64_t>(plan.workspace_bytes(Pass::forward)), kBufferAlignment, Use::write);
  return args.finish();
}

Status check_backward(const Plan& plan, const BackwardTensors& t, const void* saved, const void* workspace) {
  const Problem& p = plan.problem();
  Arguments args(p);
  args.tensor("o", t.o, p.query_heads, Use::read);
  args.tensor("d_o", t.d_o, p.query_heads, Use::read);
  args.cu_seqlens(t.cu_seqlens);
  args.tensor("d_q", t.d_q, p.query_heads, Use::write);
  args.tensor("d_k", t.d_k, p.key_heads, Use::write);
  args.tensor("d_v", t.d_v, p.key_heads, Use::write);
  args.buffer("saved", saved, static_cast<std::int64_t>(plan.saved_bytes()), kBufferAlignment, Use::read);
  args.buffer("workspace", workspace, static_cast<std::int64_t>(plan.workspace_bytes(Pass::backward)), kBufferAlignment,
              Use::write);
  return args.finish();
}

Status check_inputs(const Problem& problem, const ForwardTensors& t, const TensorView* d_out) {
  Arguments args(problem);
  args.inputs(t);
  if (d_out != nullptr) args.tensor("d_out", *d_out, problem.query_heads, Use::read);
  return args.finish();
}

}  // namespace flamia::api
