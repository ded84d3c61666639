// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/settings.hpp"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "numerics/hadamard.hpp"
#include "quantize/form.hpp"
#include "recipe/lower.hpp"

namespace flamia::cpu {
namespace {

constexpr int kLargestHeadDim = 256;

Status check_problem(const Problem& p) {
  if (p.tokens < 0) return Status::invalid("tokens = " + std::to_string(p.tokens) + " must not be negative");
  if (p.head_dim <= 0 || p.head_dim % 16 != 0 || p.head_dim > kLargestHeadDim)
    return Status::invalid("head_dim = " + std::to_string(p.head_dim) +
                           ": the CPU backend computes multiples of 16 up to 256; pad the channels with zeros");
  if (p.query_heads <= 0 || p.key_heads <= 0 || p.query_heads % p.key_heads != 0)
    return Status::invalid("query_heads = " + std::to_string(p.query_heads) +
                           " must be a positive multiple of key_heads = " + std::to_string(p.key_heads));
  return {};
}

/// What the tile code can do with a form of Q, K, V or dO.
Status check_operand(const char* name, const Quantisation& form, int dim) {
  if (Status status = quantize::check_form(form, dim); !status.ok())
    return Status(status.code(), std::string(name) + ": " + status.message());
  if (form.scale == ScaleType::f32 && form.group.kind == Group::Kind::blocks && form.group.columns != 0)
    return Status::unsupported(
        std::string(name) +
        " has FP32 scales per group of channels, which the CPU backend does not compute; use all channels, or "
        "scales of type e4m3 or ue8m0");
  return {};
}

/// Tokens over which an operand's FP32 scales are constant, at most a tile.
int scale_piece(const Quantisation& form) {
  const bool blocks = form.group.kind == Group::Kind::blocks && form.scale == ScaleType::f32;
  return blocks ? static_cast<int>(std::min<std::int64_t>(quantize::rows_of(form.group), schedule::kTile)) : schedule::kTile;
}

/// The pieces in which products over tokens are summed, from the operand's scales and from those of P or dS along the contraction.
Status lower_pieces(const Recipe& r, Settings& s) {
  const auto outer = [](const Payload& p) {
    return p.kind == Payload::Kind::blocks && (p.scale == ScaleType::f32 || p.two_level || p.first_level != 1.f);
  };
  const auto along = [](const Payload& p, int extent) {
    return p.kind == Payload::Kind::blocks && p.scale == ScaleType::f32 ? extent : p.line;
  };
  struct Piece {
    const char* product;
    int* piece;
    const Quantisation& form;
    const Payload& payload;
    int extent;     // of the payload's blocks along the contraction
    int promotion;  // -1: none to choose
  };
  const Piece pieces[] = {{"O", &s.o_piece, r.v.first, s.p_first, s.p_first.columns, s.promote_keys},
                          {"dV", &s.d_v_piece, r.d_out.second, s.p_second, s.p_second.rows, s.promote_queries},
                          {"dQ", &s.d_q_piece, r.k.second, s.ds_first, s.ds_first.columns, -1},
                          {"dK", &s.d_k_piece, r.q.second, s.ds_second, s.ds_second.rows, s.promote_queries}};
  for (const Piece& p : pieces) {
    *p.piece = std::min(scale_piece(p.form), along(p.payload, p.extent));
    if (*p.piece < 16 || schedule::kTile % *p.piece != 0)
      return Status::unsupported(std::string(p.product) + ": FP32 scales change every " + std::to_string(*p.piece) +
                                 " tokens along the contraction; the CPU backend takes 16, 32, 64 or 128");
    const bool factors = outer(p.payload) || p.form.rule == ScaleRule::two_level ||
                         (p.form.scale == ScaleType::f32 && p.form.group.kind == Group::Kind::blocks);
    if (p.promotion == 0 && factors)
      return Status::unsupported(
          std::string(p.product) +
          " multiplies every partial sum with FP32 scales, so it is promoted with each; promote=0 is for forms "
          "without");
  }
  return {};
}

Status lower_payload(const char* name, const Quantisation& form, bool is_p, Payload* out) {
  const std::string where = std::string(name) + ": ";
  Payload made;
  made.element = form.element;
  made.scale = form.scale;
  made.two_level = form.rule == ScaleRule::two_level;
  made.first_level = made.two_level ? 1.f : form.tensor_scale;
  made.first_level_log2 = static_cast<float>(std::log2(static_cast<double>(made.first_level)));
  made.floor = form.rule == ScaleRule::floor;
  made.amax = form.rule == ScaleRule::amax;
  switch (form.group.kind) {
    case Group::Kind::none:
      made.kind = Payload::Kind::plain;
      break;
    case Group::Kind::constant:
      made.kind = Payload::Kind::constant;
      break;
    case Group::Kind::tensor:
      made.kind = Payload::Kind::tensor;
      break;
    case Group::Kind::blocks:
      made.kind = Payload::Kind::blocks;
      break;
    case Group::Kind::head:
      return Status::unsupported(where + "one scale per head is not computed for P and dS; use tensor, constant or blocks");
  }
  if ((form.element == Element::bf16) != (made.kind == Payload::Kind::plain))
    return Status::invalid(where + "BF16 goes with group none, and every other element needs a scale group");
  if (form.element == Element::e5m2)
    return Status::unsupported(where + "the CPU backend rounds P and dS to BF16, E4M3, E2M1 or INT8; use one of them");
  if (made.kind == Payload::Kind::tensor && !is_p && form.element != Element::e4m3)
    return Status::unsupported(where + "one scale of dS for the tensor is computed for E4M3 only; use blocks");
  if (is_p && made.kind == Payload::Kind::tensor)
    made.kind = Payload::Kind::constant;  // P <= 1 whatever the input: 2^B is its tensor scale
  if (made.kind == Payload::Kind::blocks) {
    if (form.group.rows > 0) made.rows = form.group.rows;
    if (form.group.columns > 0) made.columns = form.group.columns;
    if (schedule::kTile % made.rows != 0 || schedule::kTile % made.columns != 0)
      return Status::invalid(where + "a block of " + std::to_string(made.rows) + " x " + std::to_string(made.columns) +
                             " does not divide the 128 x 128 tile");
    if (made.scale == ScaleType::ue8m0 && is_p && made.rows != 1 && made.columns != 1)
      return Status::unsupported(where + "blocks of P lie along the contracted axis (1 x n for O, n x 1 for dV)");
  }
  *out = made;
  return {};
}

/// The accumulator model takes values of codes; a scale along the contraction would have to be multiplied in before it.
bool scale_varies_along_contraction(const Recipe& r, const Settings& s) {
  const auto inner = [](const Quantisation& f) { return f.group.kind == Group::Kind::blocks && f.group.columns != 0; };
  for (const OperandPolicy* policy : {&r.q, &r.k, &r.v, &r.d_out})
    for (const Quantisation* form : {&policy->first, &policy->second})
      if ((r.trains || (form == &policy->first && policy != &r.d_out)) &&
          (inner(*form) || (form->element != Element::e4m3 && form->element != Element::e5m2)))
        return true;
  if (!r.trains) return s.p_first.kind != Payload::Kind::constant;
  const bool first = s.widen_k || (s.ds_first.kind == Payload::Kind::blocks && s.ds_first.columns == schedule::kTile);
  const bool second = s.widen_q || (s.ds_second.kind == Payload::Kind::blocks && s.ds_second.rows >= 64);
  const bool one_payload = s.one_ds_payload && !(s.widen_k && s.widen_q);
  return !first || !second || one_payload || s.p_first.kind != Payload::Kind::constant ||
         s.p_second.kind != Payload::Kind::constant;
}

numerics::Exp2Kind exp2_kind(Exp2 kind) {
  switch (kind) {
    case Exp2::polynomial:
      return numerics::Exp2Kind::polynomial;
    case Exp2::mitchell:
      return numerics::Exp2Kind::mitchell;
    case Exp2::schraudolph:
      return numerics::Exp2Kind::schraudolph;
    default:
      return numerics::Exp2Kind::hardware;
  }
}

/// B of a constant scale 2^B of P: P * 2^B stays below the largest code.
int constant_exponent(Element element) {
  if (element == Element::bf16) return 0;
  return element == Element::e2m1 ? 2 : element == Element::int8 ? 6 : numerics::kCodeExponent;
}

LogCodes log_codes(Exp2 kind) {
  switch (kind) {
    case Exp2::direct:
      return LogCodes::direct;
    case Exp2::mitchell:
      return LogCodes::mitchell;
    case Exp2::schraudolph:
      return LogCodes::schraudolph;
    default:
      return LogCodes::none;
  }
}

Status check_fold(const char* field, const Quantisation& form) {
  const bool blocks = form.group.kind == Group::Kind::blocks;
  if (form.element == Element::bf16 || (blocks && form.group.rows == 1)) return {};  // nothing to do
  if (blocks && form.group.columns == 0 && form.scale == ScaleType::ue8m0) return {};
  if (blocks && form.group.columns == 1 && form.group.rows > 0 && schedule::kTile % form.group.rows == 0 &&
      form.tensor_scale == 1.f)
    return {};
  return Status::unsupported(std::string("safety.") + field +
                             " needs a power-of-two exponent per token or token-block of that operand, or scales along its tokens");
}

}  // namespace

int thread_count(int threads) { return threads > 0 ? threads : omp_get_num_procs(); }

Status lower(const Problem& problem, const Recipe& recipe, Settings* settings) {
  if (Status status = check_problem(problem); !status.ok()) return status;
  Settings s;
  s.tokens = problem.tokens;
  s.query_heads = problem.query_heads;
  s.key_heads = problem.key_heads;
  s.head_dim = problem.head_dim;
  s.reach = schedule::reach_of(problem.mask.causal, problem.mask.left, problem.mask.right);
  const double scale =
      problem.scale != 0.f ? static_cast<double>(problem.scale) : 1.0 / std::sqrt(static_cast<double>(problem.head_dim));
  s.scale = static_cast<float>(scale);
  s.scale_log2 = static_cast<float>(static_cast<double>(s.scale) * 1.4426950408889634);

  const std::pair<const char*, const OperandPolicy*> operands[] = {
      {"q", &recipe.q}, {"k", &recipe.k}, {"v", &recipe.v}, {"d_out", &recipe.d_out}};
  for (const auto& [name, policy] : operands)
    for (const Quantisation* form : {&policy->first, &policy->second})
      if (Status status = check_operand(name, *form, problem.head_dim); !status.ok()) return status;
  s.smooth_q = recipe.smoothing.q;
  s.smooth_k = recipe.smoothing.k;
  s.q_mean_rows = recipe.tile.queries;
  s.q_mean_times_codes = recipe.trains;
  if (Status status = recipe::can_mask(recipe, problem.mask); !status.ok()) return status;
  if (Status status = lower_payload("p.first", recipe.p.first, true, &s.p_first); !status.ok()) return status;
  if (s.p_first.two_level) s.p_first.line = recipe.tile.keys;
  if (Status status = lower_payload("p.second", recipe.p.second, true, &s.p_second); !status.ok()) return status;
  s.one_ds_payload = recipe.one_ds_payload;
  if (Status status = lower_payload("d_s.first", recipe.d_s.first, false, &s.ds_first); !status.ok()) return status;
  if (Status status =
          lower_payload("d_s.second", recipe.one_ds_payload ? recipe.d_s.first : recipe.d_s.second, false, &s.ds_second);
      !status.ok())
    return status;
  s.widen_k = s.ds_first.kind == Payload::Kind::plain && recipe.k.second.element != Element::bf16;
  s.widen_v = recipe.d_out_times_v_bf16 && recipe.v.second.element != Element::bf16;
  s.widen_q = s.ds_second.kind == Payload::Kind::plain && recipe.q.second.element != Element::bf16;

  s.reference =
      recipe.softmax.reference == RowReferenceRule::tilesum ? numerics::RowReference::tilesum : numerics::RowReference::phase32;
  s.code_exponent = s.p_first.kind == Payload::Kind::constant ? constant_exponent(recipe.p.first.element) : 0;
  if ((s.p_second.kind == Payload::Kind::constant) != (s.p_first.kind == Payload::Kind::constant))
    return Status::unsupported("p: both products scale P by the same constant, or neither does");
  if (s.reference == numerics::RowReference::tilesum && s.p_first.kind != Payload::Kind::constant)
    return Status::unsupported(
        "softmax.reference = tilesum sums codes of P that carry a constant factor; use phase32 with BF16 or block scales of P");
  s.exp2 = exp2_kind(recipe.softmax.exp2);
  if (s.p_first.kind == Payload::Kind::blocks && s.p_first.element == Element::e2m1) s.log_codes = log_codes(recipe.softmax.exp2);
  if (s.log_codes != LogCodes::none && (s.p_first.rows != 1 || s.p_first.scale == ScaleType::f32))
    return Status::unsupported("p.first: codes from the bits of the scores are made for blocks 1 x n with scales ue8m0 or e4m3");
  s.polynomial_degree = recipe.softmax.polynomial_degree;
  s.polynomial_sixteenths = recipe.softmax.polynomial_sixteenths;
  s.sum_unrounded = recipe.softmax.sum == SumOf::unrounded;
  s.gradient_of_codes = recipe.gradient_p == GradientP::codes;
  s.d_of_scores = recipe.gradient_d == GradientD::scores;
  if (s.gradient_of_codes && s.p_first.kind == Payload::Kind::blocks)
    return Status::unsupported(
        "gradient_p = codes needs codes of P with a constant factor; with block scales use gradient_p = unrounded");
  for (const Quantisation* form : {&recipe.d_out.first, &recipe.d_out.second})
    s.classical = s.classical || form->element == Element::bf16 || form->element == Element::int8;

  s.promote_keys = recipe.accumulation.promote_keys;
  s.promote_queries = recipe.accumulation.promote_queries;
  for (const auto& [name, interval] : {std::pair{"promote_keys", s.promote_keys}, std::pair{"promote_queries", s.promote_queries}})
    if (interval < 0 || (interval > 0 && (interval % 32 != 0 || schedule::kTile % interval != 0)))
      return Status::invalid(std::string("accumulation.") + name + " = " + std::to_string(interval) +
                             "; allowed are 0 (never), 32, 64 and 128");
  if (recipe.accumulation.model == AccumulatorModel::hopper13) {
    s.accumulator = numerics::Accumulator::hopper13;
    s.d_q_accumulator = s.widen_k ? numerics::Accumulator::fp32 : s.accumulator;  // BF16 products are added in FP32
    s.d_k_accumulator = s.widen_q ? numerics::Accumulator::fp32 : s.accumulator;
    if (scale_varies_along_contraction(recipe, s))
      return Status::unsupported(
          "accumulation.model = hopper13 adds products of FP8 codes; this recipe has other operands or scales along the "
          "contraction, which that instruction does not take");
  }
  if (Status status = lower_pieces(recipe, s); !status.ok()) return status;
  s.dq_f16 = recipe.accumulation.dq_f16;
  s.prescale_sequence = recipe.accumulation.dq_prescale == PreScale::sequence;
  if (s.dq_f16 && (recipe.v.second.element == Element::bf16 || recipe.k.second.element == Element::bf16 || s.classical))
    return Status::unsupported(
        "accumulation.dq_f16 takes its pre-scale from the exponents of V, K and dO; BF16 operands have none, so use FP32 (dq=f32)");
  s.fold_v = recipe.safety.fold_v_diagonal;
  s.fold_k = recipe.safety.fold_k;
  if (s.fold_v)
    for (const Quantisation* form : {&recipe.v.first, &recipe.v.second})
      if (Status status = check_fold("fold_v_diagonal", *form); !status.ok()) return status;
  if (s.fold_k)
    if (Status status = check_fold("fold_k", recipe.k.second); !status.ok()) return status;
  s.rotate = recipe.rotate && numerics::rotation_supported(problem.head_dim);
  *settings = s;
  return {};
}

}  // namespace flamia::cpu
