// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/block_scaled.hpp"

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <utility>

namespace flamia::cpu {
namespace {

constexpr int kLargestDepth = 256;

Status check(const char* name, const BlockScaledMatrix& x, int k) {
  const std::string who(name);
  if (x.rows < 0) return Status::invalid(who + ".rows = " + std::to_string(x.rows) + " must not be negative");
  if (x.scale != ScaleType::e4m3 && x.scale != ScaleType::ue8m0)
    return Status::invalid(who + ".scale must be e4m3 (NVFP4) or ue8m0 (MXFP4)");
  if (x.group <= 0 || k % x.group != 0)
    return Status::invalid(who + ".group = " + std::to_string(x.group) + " must divide k = " + std::to_string(k));
  if (std::cmp_less(x.codes.size(), x.rows * (k / 2)) || std::cmp_less(x.scales.size(), x.rows * (k / x.group)))
    return Status::invalid(who + ": codes or scales hold fewer bytes than " + std::to_string(x.rows) + " rows of " +
                           std::to_string(k) + " columns need");
  return {};
}

Operand operand_of(const BlockScaledMatrix& x, int k) {
  Operand made;
  made.codes = x.codes.data();
  made.scales = x.scales.data();
  made.element = Element::e2m1;
  made.scale = x.scale;
  made.group = Group::Kind::blocks;
  made.columns = x.group;
  made.column_groups = k / x.group;
  made.heads = 1;
  made.dim = k;
  return made;
}

}  // namespace

Status block_scaled_product(const BlockScaledMatrix& a, const BlockScaledMatrix& b, int k, std::span<float> c, Isa isa) {
  if (k <= 0 || k % 16 != 0 || k > kLargestDepth)
    return Status::invalid("k = " + std::to_string(k) + " must be a multiple of 16 up to " + std::to_string(kLargestDepth));
  if (Status status = check("a", a, k); !status.ok()) return status;
  if (Status status = check("b", b, k); !status.ok()) return status;
  if (std::cmp_less(c.size(), a.rows * b.rows))
    return Status::invalid("c holds " + std::to_string(c.size()) + " numbers, fewer than a.rows * b.rows");
  const TileCode* code = tile_code(isa);
  if (!code) return Status::unsupported("this machine lacks the instruction set that was asked for");
  const std::unique_ptr<float[]> scratch(new (std::nothrow) float[static_cast<std::size_t>(scratch_floats(k)) + 16]);
  if (!scratch) return {StatusCode::out_of_memory, "no memory for one tile"};
  void* start = scratch.get();
  std::size_t room = (static_cast<std::size_t>(scratch_floats(k)) + 16) * sizeof(float);
  auto* aligned = static_cast<float*>(std::align(64, room - 64, start, room));
  const Operand left = operand_of(a, k), right = operand_of(b, k);
  for (std::int64_t i = 0; i < a.rows; i += kTile)
    for (std::int64_t j = 0; j < b.rows; j += kTile)
      code->block_scaled(left, i, static_cast<int>(std::min<std::int64_t>(kTile, a.rows - i)), right, j,
                         static_cast<int>(std::min<std::int64_t>(kTile, b.rows - j)), {aligned}, c.data() + i * b.rows + j, b.rows);
  return {};
}

}  // namespace flamia::cpu
