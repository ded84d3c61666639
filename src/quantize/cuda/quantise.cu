// SPDX-License-Identifier: Apache-2.0
// Checks, and the kernels of one call in their order: clear the scratch, [find maxima], rotated operands, the others, scan.
#include "quantize/cuda/quantise.hpp"

#include <string>

#include "kernels/cuda/dense_strides.hpp"
#include "kernels/cuda/device_status.hpp"
#include "quantize/cuda/checks.hpp"
#include "quantize/cuda/operand_set.cuh"
#include "quantize/cuda/prefix.cuh"

namespace flamia::quantize::gpu {
namespace {

/// Before the kernels that quantise, which wait for it only when they ask for what is known.
__global__ __launch_bounds__(256) void clear_kernel(uint4* words, std::int64_t count) {
  ptx::let_next_grid_start();
  const std::int64_t i = std::int64_t{256} * blockIdx.x + threadIdx.x;
  if (i < count) words[i] = {0, 0, 0, 0};
}

Status check(const QuantiseParams& p) {
  if (Status s = check_operand(p.input.dtype, p.heads, p.head_dim); !s.ok()) return s;
  if (Status s = check_rows("the quantiser's input", p.input); !s.ok()) return s;
  if (p.exponents == nullptr || !aligned(p.rows, 16) || !aligned(p.rows16, 16) || !aligned(p.transposed, 16) ||
      !aligned(p.exponents, 16))
    return Status::invalid("outputs of the quantiser must be device memory aligned to 16 bytes; exponents may not be null");
  if (p.group == Group::tensor && p.prefix != Prefix::none)
    return Status::invalid("a prefix maximum of exponents needs groups of tokens, not one exponent for the tensor");
  if (p.headroom < 0 || p.headroom > numerics::kMostHeadroom || (p.headroom != 0 && p.prefix != Prefix::sticky))
    return Status::invalid("headroom = " + std::to_string(p.headroom) + "; sticky exponents have 0 to 4 binades, others none");
  if (p.rows16 != nullptr && (p.nvfp4.halves == nullptr || p.prefix == Prefix::sticky))
    return Status::unsupported(
        "values in BF16 are made beside NVFP4 and not of sticky exponents: make them of the codes (dequantise.hpp)");
  if (p.nvfp4.halves != nullptr) {
    const Nvfp4Outputs& out = p.nvfp4;
    if (!p.rotate || p.group == Group::tensor || p.transposed != nullptr)
      return Status::unsupported("NVFP4 is made of rotated values, beside rows of codes with an exponent for groups of tokens");
    if (!aligned(out.halves, 16) || out.exponents == nullptr || !aligned(out.exponents, 16) || !aligned(out.codes, 4) ||
        (out.codes == nullptr) != (out.scales == nullptr))
      return Status::invalid(
          "outputs of NVFP4 must be aligned to 16 bytes; exponents may not be null, codes and scales go together");
  }
  if (p.blocks == nullptr) return Status::invalid("the schedule is missing: blocks is null");
  if (p.prefix != Prefix::none && (p.heads > kMostHeads || !aligned(p.prefix_exponents, 16)))
    return Status::unsupported("prefix maxima need prefix_exponents aligned to 16 bytes and at most " + std::to_string(kMostHeads) +
                               " heads; there are " + std::to_string(p.heads));
  return {};
}

/// What the operands of one call have in common, and the scratch of all of them.
Status check(std::span<const QuantiseParams> operands) {
  if (operands.empty() || operands.size() > kMostOperands)
    return Status::invalid(std::to_string(operands.size()) + " operands in one call of the quantiser; it takes 1 to " +
                           std::to_string(kMostOperands));
  const QuantiseParams& first = operands.front();
  std::int64_t heads = 0;
  for (const QuantiseParams& p : operands) {
    if (Status s = check(p); !s.ok()) return s;
    if (p.input.dtype != first.input.dtype || p.head_dim != first.head_dim || p.slots != first.slots || p.blocks != first.blocks ||
        p.block_capacity != first.block_capacity || p.scratch != first.scratch)
      return Status::invalid("operands of one call must agree in dtype, head_dim, schedule and scratch");
    heads += p.heads;
  }
  if (first.scratch == nullptr || !aligned(first.scratch, 16))
    return Status::invalid("scratch must be device memory of " + std::to_string(scratch_bytes(operands)) + " bytes, aligned to 16");
  return check_grid(first.block_capacity * heads);
}

/// First in the scratch: a counter for each of the launches.
constexpr std::size_t kCounterBytes = 32;

/// Of one operand; multiples of 16 bytes.
std::size_t scratch_of(const QuantiseParams& p) {
  if (p.group == Group::tensor) return sizeof(uint4);
  return p.prefix == Prefix::none ? 0 : PrefixScratch::bytes(p.slots, p.heads);
}

/// Operands that one kernel takes.
template <class Takes>
OperandSet select(std::span<const QuantiseParams> operands, Takes takes) {
  OperandSet set;
  for (const QuantiseParams& p : operands)
    if (takes(p)) set.add(p);
  return set;
}

}  // namespace

std::size_t scratch_bytes(std::span<const QuantiseParams> operands) {
  std::size_t bytes = kCounterBytes;
  for (const QuantiseParams& p : operands) bytes += scratch_of(p);
  return bytes;
}

Status launch_quantise(std::span<const QuantiseParams> operands, cudaStream_t stream) {
  if (Status status = check(operands); !status.ok()) return status;
  QuantiseParams filled[kMostOperands];
  std::size_t at = kCounterBytes;
  for (std::size_t i = 0; i < operands.size(); ++i) {
    filled[i] = operands[i];
    fill_dense_strides(filled[i].input, filled[i].heads, filled[i].head_dim);
    filled[i].scratch = operands[i].scratch + at / sizeof(std::uint32_t);
    at += scratch_of(operands[i]);
  }
  const std::span<const QuantiseParams> all(filled, operands.size());
  Chain chain(stream);
  const auto words = static_cast<std::int64_t>(at / sizeof(uint4));
  chain.launch(clear_kernel, dim3(static_cast<unsigned>((words + 255) / 256)), 256, reinterpret_cast<uint4*>(operands[0].scratch),
               words);
  std::uint32_t* counter = operands[0].scratch;
  struct Step {
    OperandSet set;
    void (*enqueue)(const OperandSet&, Chain&);
  } steps[7];
  int count = 0;
  const auto add = [&](const OperandSet& set, auto enqueue) {
    if (set.count > 0) steps[count++] = {set, enqueue};
  };
  for (const bool find_maximum : {true, false}) {
    const auto kernel = [&](auto takes, auto enqueue) {
      OperandSet set =
          select(all, [&](const QuantiseParams& p) { return takes(p) && (!find_maximum || p.group == Group::tensor); });
      set.find_maximum = find_maximum;
      set.claimed = counter++;
      add(set, enqueue);
    };
    kernel([](const QuantiseParams& p) { return p.rotate && p.nvfp4.halves != nullptr; }, enqueue_nvfp4);
    kernel([](const QuantiseParams& p) { return p.rotate && p.nvfp4.halves == nullptr; }, enqueue_rotated);
    kernel([](const QuantiseParams& p) { return !p.rotate; }, enqueue_plain);
  }
  add(select(all, [](const QuantiseParams& p) { return p.prefix != Prefix::none; }), enqueue_prefix);
  for (int i = 0; i < count; ++i) {
    steps[i].set.followed = i + 1 < count;
    steps[i].set.beside = i > 0 && steps[i].enqueue == enqueue_plain && steps[i - 1].enqueue == enqueue_nvfp4;
    steps[i].enqueue(steps[i].set, chain);
  }
  return device_status(chain.error(), "quantise");
}

}  // namespace flamia::quantize::gpu
