// SPDX-License-Identifier: Apache-2.0
// A recipe says which numbers attention computes with: how each of the six operands is quantised for each of its two uses, how
// the softmax keeps its reference, how products are accumulated. It is data: it prints, parses, hashes and compares.
// One name is one set of numbers on every machine; a variant prints as a variant ("mxfp8 ds=32x32").
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "flamia/status.hpp"

namespace flamia {

enum class Element : std::uint8_t { bf16, e4m3, e5m2, e2m1, int8 };

/// Which elements share one scale: blocks of `rows` x `columns`. For Q, K, V, dO rows are tokens of one document and columns are channels;
/// for P and dS rows are queries and columns are keys, counted inside their 128 x 128 tile. 0 = all of them.
struct Group {
  enum class Kind : std::uint8_t { none, constant, tensor, head, blocks };  // tensor, head: over all tokens and documents
  Kind kind = Kind::none;
  int rows = 0;
  int columns = 0;
  friend bool operator==(const Group&, const Group&) = default;
};

enum class ScaleType : std::uint8_t { none, ue8m0, e4m3, f32 };

/// How a group's scale follows from its greatest magnitude.
enum class ScaleRule : std::uint8_t {
  none,
  ceil,             // least power of two at which nothing saturates
  floor,            // OCP MX reference: saturates
  amax,             // amax / largest value of the element type (NVFP4: E4M3 of amax / 6; INT8: amax / 127)
  amax_or_smaller,  // NVFP4: amax / 6 or amax / 4, whichever has the smaller squared error
  two_level,        // a maximum / (448 * 6) in FP32, then NVFP4: of a tile's line (SageAttention3's P; dS), of 128 tokens (dO)
};

/// One quantised form of an operand.
struct Quantisation {
  Element element = Element::bf16;
  Group group;
  ScaleType scale = ScaleType::none;
  ScaleRule rule = ScaleRule::none;
  bool sticky = false;       // exponent = prefix maximum over the document's earlier groups (K and V only: causal)
  std::int8_t headroom = 0;  // sticky: so many binades are added to the document's first exponent before the maximum, 0 to 4
  float tensor_scale = 1.f;  // NVFP4's constant FP32 factor
  friend bool operator==(const Quantisation&, const Quantisation&) = default;
};

/// An operand in its first and second product (src/recipe/operands.hpp). Equal forms are one copy.
struct OperandPolicy {
  Quantisation first;
  Quantisation second;
  friend bool operator==(const OperandPolicy&, const OperandPolicy&) = default;
};

enum class Exp2 : std::uint8_t { hardware, polynomial, mitchell, schraudolph, direct };
enum class RowReferenceRule : std::uint8_t { phase32, tilesum };
enum class SumOf : std::uint8_t { codes, unrounded };             // what l adds up
enum class GradientP : std::uint8_t { unrounded, codes };         // the P in dS = P o (dP - D)
enum class GradientD : std::uint8_t { output, scores };           // D sums dO o O, or P o dP as dS takes them
enum class PreScale : std::uint8_t { causal_row, sequence };      // FP16 dQ: per row from what the row may see; per sequence leaks
enum class AccumulatorModel : std::uint8_t { native, hopper13 };  // native: FP32 on the CPU, the tensor core's own on a GPU

struct SoftmaxPolicy {
  RowReferenceRule reference = RowReferenceRule::phase32;
  Exp2 exp2 = Exp2::hardware;
  int polynomial_degree = 3;
  int polynomial_sixteenths = 0;  // share of a tile's keys on the polynomial
  SumOf sum = SumOf::codes;
  friend bool operator==(const SoftmaxPolicy&, const SoftmaxPolicy&) = default;
};

struct AccumulationPolicy {
  AccumulatorModel model = AccumulatorModel::native;
  int promote_keys = 128;    // O: partial products join FP32 every so many keys (0: never)
  int promote_queries = 64;  // dK, dV
  bool dq_f16 = false;       // dQ partials are added in FP16 with a power-of-two pre-scale
  PreScale dq_prescale = PreScale::causal_row;
  friend bool operator==(const AccumulationPolicy&, const AccumulationPolicy&) = default;
};

struct SafetyPolicy {
  bool fold_v_diagonal = false;  // per-key V on the diagonal tile, folded into P; the same for V in dP
  bool fold_k = false;           // per-key K on the diagonal tile, folded into dS
  friend bool operator==(const SafetyPolicy&, const SafetyPolicy&) = default;
};

struct SmoothingPolicy {  // SageAttention: subtract means over tokens
  bool q = false;
  bool k = false;
  friend bool operator==(const SmoothingPolicy&, const SmoothingPolicy&) = default;
};

/// Over how many tokens a tile's statistics are taken, in inference: the mean of Q (smoothing) and the first level of a two-level P.
struct TilePolicy {
  int queries = 128;
  int keys = 128;
  friend bool operator==(const TilePolicy&, const TilePolicy&) = default;
};

struct Recipe {
  OperandPolicy q, k, v, d_out, p, d_s;
  bool one_ds_payload = false;  // d_s.first serves both products
  bool rotate = false;          // signs and Hadamard on Q and K
  bool trains = true;           // false: inference only
  GradientP gradient_p = GradientP::unrounded;
  GradientD gradient_d = GradientD::output;
  bool d_out_times_v_bf16 = false;  // sagebwd: dO * Vt in BF16, of V itself or of what its INT8 codes stand for
  SoftmaxPolicy softmax;
  AccumulationPolicy accumulation;
  SafetyPolicy safety;
  SmoothingPolicy smoothing;
  TilePolicy tile;
  friend bool operator==(const Recipe&, const Recipe&) = default;

  /// "mxfp8", or the nearest name and what differs: "mxfp8 ds=32x32 dq=f32".
  std::string name() const;
  /// Reads what name() prints. Unknown names and fields: invalid_argument with the nearest names.
  /// Whether the members make sense together is checked where the recipe is used: Plan::create. (C's and Python's recipes are checked when
  /// they are made.)
  static Status parse(std::string_view text, Recipe* recipe);
  std::string to_json() const;
  static Status from_json(std::string_view json, Recipe* recipe);
  /// Equal recipes have equal hashes, on every machine and in every version that reads the same JSON (FNV-1a of the JSON).
  std::uint64_t hash() const;
};

/// The named recipes in the order of the documentation.
std::vector<std::string> recipe_names();
/// One line about a named recipe: what it is and where it comes from.
std::string recipe_summary(std::string_view name);

}  // namespace flamia
