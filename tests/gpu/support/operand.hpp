// SPDX-License-Identifier: Apache-2.0
// Inputs that reach every branch of the quantiser, and the device layouts filled from the host quantiser's codes.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "numerics/exponent.hpp"
#include "numerics/format.hpp"
#include "quantize/cuda/quantise.hpp"
#include "quantize/quantize.hpp"
#include "schedule/cuda/schedule.hpp"
#include "schedule/documents.hpp"
#include "support/device.hpp"
#include "support/packing.hpp"
#include "support/slots.hpp"

namespace flamia::test {

/// 16-bit elements, [tokens][stride], of ordinary tokens, tokens of any magnitude, zeros, subnormals and (with `wild`) NaN, infinity
/// and numbers that overflow in the rotation.
inline std::vector<std::uint16_t> random_tensor(Random& random, DType dtype, std::int64_t tokens, std::int64_t row, int dim,
                                                bool wild) {
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> data(static_cast<std::size_t>(tokens * row));
  const auto encode = [&](float x) { return dtype == DType::bf16 ? numerics::encode_bf16(x) : numerics::encode_f16(x); };
  for (std::int64_t at = 0; at < tokens * row; at += dim) {
    const std::int64_t kind = below(random, 24);
    const float scale = kind == 0   ? 0.f
                        : kind == 1 ? std::ldexp(1.f, static_cast<int>(below(random, 250)) - 130)
                        : kind == 2 ? std::ldexp(1.f, -128 - static_cast<int>(below(random, 8)))
                        : kind == 3 ? std::ldexp(1.f, static_cast<int>(below(random, 20)) - 10)
                                    : 1.f;
    for (std::int64_t c = 0; c < dim; ++c) {
      const float x = normal(random) * scale;
      data[static_cast<std::size_t>(at + c)] = encode(dtype == DType::f16 && std::fabs(x) > 60000.f ? 60000.f : x);
    }
    if (!wild || below(random, 40) != 0) continue;
    const float odd[4] = {numerics::quiet_nan(), numerics::infinity(), -numerics::infinity(),
                          dtype == DType::bf16 ? 3.3e38f : 65504.f};
    const float x = odd[below(random, 4)];
    const std::int64_t many = below(random, 2) ? dim : 1, first = below(random, dim - many + 1);
    for (std::int64_t c = first; c < first + many; ++c) data[static_cast<std::size_t>(at + c)] = encode(x);
  }
  return data;
}

/// Schedule, input and scratch of one operand on the device; what it writes is the test's.
struct DeviceOperand {
  /// `form`: heads, head_dim, rotate, group, prefix, order, and the input's type and strides; the input begins at data[first].
  DeviceOperand(const quantize::gpu::QuantiseParams& form, const Packing& packing, const std::vector<std::uint16_t>& data,
                std::int64_t first = 0)
      : shape{packing.tokens, packing.documents(), {}, 128, 0, 64},
        lengths(std::span<const std::int32_t>(packing.cu_seqlens)),
        schedule_memory(static_cast<std::int64_t>(schedule::gpu::workspace_bytes(shape))),
        slots(sm90::slot_capacity(packing.tokens, packing.documents())),
        input(std::span<const std::uint16_t>(data)),
        exponents(form.heads * slots),
        scratch(scratch_words(form, slots)),
        view(schedule::gpu::view(shape, schedule_memory.get())),
        params(form) {
    params.input.data = input.get() + first;
    params.exponents = exponents.get();
    params.slots = slots;
    params.blocks = view.blocks;
    params.block_capacity = view.block_capacity;
    params.scratch = scratch.get();
  }
  static std::int64_t scratch_words(quantize::gpu::QuantiseParams form, std::int64_t slots) {
    form.slots = slots;
    return static_cast<std::int64_t>(quantize::gpu::scratch_bytes(form) / sizeof(std::uint32_t) + 1);
  }
  Status schedule(cudaStream_t stream) { return schedule::gpu::launch(shape, lengths.get(), schedule_memory.get(), stream); }

  schedule::gpu::Shape shape;
  DeviceBuffer<std::int32_t> lengths;
  DeviceBuffer<char> schedule_memory;
  std::int64_t slots;
  DeviceBuffer<std::uint16_t> input;
  DeviceBuffer<std::uint8_t> exponents;
  DeviceBuffer<std::uint32_t> scratch;
  schedule::gpu::View view;
  quantize::gpu::QuantiseParams params;
};

/// Codes and BF16 values of the used slots in every layout, and exponent bytes; slots past the tail keep the poison.
struct DeviceImage {
  std::vector<std::uint8_t> rows, transposed, exponents, prefix;
  std::vector<std::uint16_t> rows16;
};

/// Code times scale as the rows16 layout holds it; 0 for a flagged token.
inline std::uint16_t value16(std::uint8_t code, std::uint8_t byte) {
  if (byte == numerics::kFlagged) return 0;
  const float value = numerics::scale_pow2(numerics::decode<numerics::kE4M3>(code), int{byte} - 127);
  return numerics::encode_bf16(numerics::round_bf16_finite(value));
}

/// How the host's scales map to the exponent bytes of slots.
struct ImageOptions {
  quantize::gpu::Group group = quantize::gpu::Group::block;
  bool sticky = false;
  sm90::TokenOrder order = sm90::TokenOrder::pi;
};

inline DeviceImage device_image(const quantize::QuantisedTensor& host, const schedule::Documents& documents, std::int64_t slots,
                                const ImageOptions& options) {
  const int d = host.dim;
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  DeviceImage image;
  image.rows.assign(size(host.heads * slots * d), kPoison);
  image.transposed = image.rows;
  image.rows16.assign(image.rows.size(), kPoison * 0x0101u);
  image.exponents.assign(size(host.heads * slots), kPoison);
  image.prefix = image.exponents;
  const std::int64_t per = options.group == quantize::gpu::Group::token ? 1 : sm90::kBlock;
  for (std::int64_t head = 0; head < host.heads; ++head) {
    const auto fill = [&](std::int64_t slot, const std::uint8_t* codes, std::uint8_t byte, std::uint8_t prefix) {
      for (int c = 0; c < d; ++c) {
        const std::uint8_t code = codes ? codes[c] : 0;
        image.rows[size(sm90::rows_offset(slots, d, head, slot, c))] = code;
        image.transposed[size(sm90::transposed_offset(slots, d, head, slot, c, options.order))] = code;
        image.rows16[size(sm90::rows16_offset(slots, d, head, slot, c))] = codes ? value16(code, byte) : 0;
      }
      image.exponents[size(head * slots + slot)] = byte;
      image.prefix[size(head * slots + slot)] = prefix;
    };
    std::int64_t slot = 0, block = 0;
    std::uint8_t byte = 0;
    const std::uint8_t whole = host.scales.empty() ? 0 : host.scales[0];
    for (const schedule::DocumentRange& range : documents.ranges()) {
      std::uint8_t greatest = 0;
      const std::int64_t padded = padded_slots(range.length);
      for (std::int64_t p = 0; p < padded; ++p, ++slot) {
        if (p < range.length) {
          if (options.group == quantize::gpu::Group::tensor)
            byte = whole;
          else if (p % per == 0)
            byte = host.scales[size(block++ * host.heads + head)];
          if (byte != numerics::kFlagged) greatest = std::max(greatest, byte);
          fill(slot, host.codes.data() + ((range.start + p) * host.heads + head) * d, byte, greatest);
        } else {  // after the document's end
          const std::uint8_t pad = options.group == quantize::gpu::Group::token ? (options.sticky ? greatest : 0) : byte;
          fill(slot, nullptr, pad, greatest);
        }
      }
    }
    const std::uint8_t tail = options.group == quantize::gpu::Group::tensor ? whole : 0;
    for (int i = 0; i < sm90::kTailSlots; ++i) fill(slot++, nullptr, tail, 0);
  }
  return image;
}

/// The recipe-level form that the GPU's options stand for.
inline Quantisation form_of(quantize::gpu::Group group, bool sticky, int headroom = 0) {
  Quantisation form;
  form.element = Element::e4m3;
  form.scale = ScaleType::ue8m0;
  form.rule = ScaleRule::ceil;
  form.sticky = sticky;
  form.headroom = static_cast<std::int8_t>(headroom);
  form.group.kind = group == quantize::gpu::Group::tensor ? Group::Kind::tensor : Group::Kind::blocks;
  form.group.rows = group == quantize::gpu::Group::token ? 1 : group == quantize::gpu::Group::block ? sm90::kBlock : 0;
  return form;
}

/// Where two buffers differ first, for a message; -1 if nowhere.
template <class T>
std::int64_t first_difference(const std::vector<T>& a, const std::vector<T>& b) {
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i)
    if (a[i] != b[i]) return static_cast<std::int64_t>(i);
  return a.size() == b.size() ? -1 : static_cast<std::int64_t>(std::min(a.size(), b.size()));
}

}  // namespace flamia::test
