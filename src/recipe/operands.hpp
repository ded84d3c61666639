// SPDX-License-Identifier: Apache-2.0
// The operand table: six operands, six products, and the axis each use contracts over. Everything about copies, layouts and where a
// scale may sit is derived from it.
#pragma once
#include <array>
#include <cstdint>

namespace flamia::recipe {

enum class Operand : std::uint8_t { q, k, v, d_out, p, d_s };
enum class Product : std::uint8_t { s, o, d_p, d_v, d_q, d_k };
enum class Axis : std::uint8_t { channels, queries, keys };

struct Use {
  Product product;
  Axis contracts;  // the axis summed over; a scale group must not vary along it unless the MMA applies scales or it is folded away
};

struct OperandRow {
  Operand operand;
  const char* name;
  Axis rows, columns;  // the operand as a matrix
  Use first, second;
};

//   S = Q Kt      O = P V      dP = dO Vt      dV = Pt dO      dQ = dS K      dK = dSt Q
inline constexpr std::array<OperandRow, 6> kOperands{{
    {Operand::q, "Q", Axis::queries, Axis::channels, {Product::s, Axis::channels}, {Product::d_k, Axis::queries}},
    {Operand::k, "K", Axis::keys, Axis::channels, {Product::s, Axis::channels}, {Product::d_q, Axis::keys}},
    {Operand::v, "V", Axis::keys, Axis::channels, {Product::o, Axis::keys}, {Product::d_p, Axis::channels}},
    {Operand::d_out, "dO", Axis::queries, Axis::channels, {Product::d_p, Axis::channels}, {Product::d_v, Axis::queries}},
    {Operand::p, "P", Axis::queries, Axis::keys, {Product::o, Axis::keys}, {Product::d_v, Axis::queries}},
    {Operand::d_s, "dS", Axis::queries, Axis::keys, {Product::d_q, Axis::keys}, {Product::d_k, Axis::queries}},
}};

constexpr const OperandRow& row_of(Operand operand) { return kOperands[static_cast<std::size_t>(operand)]; }

namespace check {
constexpr bool every_use_contracts_an_own_axis() {
  for (const OperandRow& row : kOperands)
    for (const Use& use : {row.first, row.second})
      if (use.contracts != row.rows && use.contracts != row.columns) return false;
  return true;
}
constexpr bool every_operand_is_contracted_along_both_axes() {
  for (const OperandRow& row : kOperands)
    if (row.first.contracts == row.second.contracts) return false;
  return true;
}
constexpr bool every_product_has_two_operands_that_agree_on_the_axis() {
  for (int p = 0; p < 6; ++p) {
    int uses = 0;
    Axis axis{};
    for (const OperandRow& row : kOperands)
      for (const Use& use : {row.first, row.second})
        if (static_cast<int>(use.product) == p) {
          if (uses == 1 && use.contracts != axis) return false;
          axis = use.contracts;
          ++uses;
        }
    if (uses != 2) return false;
  }
  return true;
}
constexpr bool rows_are_in_enum_order() {
  for (std::size_t i = 0; i < kOperands.size(); ++i)
    if (static_cast<std::size_t>(kOperands[i].operand) != i) return false;
  return true;
}
}  // namespace check
static_assert(check::rows_are_in_enum_order());
static_assert(check::every_use_contracts_an_own_axis());
static_assert(check::every_operand_is_contracted_along_both_axes());
static_assert(check::every_product_has_two_operands_that_agree_on_the_axis());

}  // namespace flamia::recipe
