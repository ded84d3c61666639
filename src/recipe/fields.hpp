// SPDX-License-Identifier: Apache-2.0
// Every member of a recipe with its name: visit(x, v) calls v(name, member) for the members of x in a fixed order. JSON in and out
// are two visitors; a new member is added here and nowhere else for them.
#pragma once
#include <concepts>
#include <type_traits>

#include "flamia/recipe.hpp"

namespace flamia::recipe {

template <class T, class Of>
concept MaybeConst = std::same_as<std::remove_const_t<T>, Of>;

template <MaybeConst<Group> T, class Visitor>
void visit(T& x, Visitor&& v) {
  v("kind", x.kind);
  v("rows", x.rows);
  v("columns", x.columns);
}

template <MaybeConst<Quantisation> T, class Visitor>
void visit(T& x, Visitor&& v) {
  v("element", x.element);
  v("group", x.group);
  v("scale", x.scale);
  v("rule", x.rule);
  v("sticky", x.sticky);
  v("headroom", x.headroom);
  v("tensor_scale", x.tensor_scale);
}

template <MaybeConst<OperandPolicy> T, class Visitor>
void visit(T& x, Visitor&& v) {
  v("first", x.first);
  v("second", x.second);
}

template <MaybeConst<SoftmaxPolicy> T, class Visitor>
void visit(T& x, Visitor&& v) {
  v("reference", x.reference);
  v("exp2", x.exp2);
  v("polynomial_degree", x.polynomial_degree);
  v("polynomial_sixteenths", x.polynomial_sixteenths);
  v("sum", x.sum);
}

template <MaybeConst<AccumulationPolicy> T, class Visitor>
void visit(T& x, Visitor&& v) {
  v("model", x.model);
  v("promote_keys", x.promote_keys);
  v("promote_queries", x.promote_queries);
  v("dq_f16", x.dq_f16);
  v("dq_prescale", x.dq_prescale);
}

template <MaybeConst<SafetyPolicy> T, class Visitor>
void visit(T& x, Visitor&& v) {
  v("fold_v_diagonal", x.fold_v_diagonal);
  v("fold_k", x.fold_k);
}

template <MaybeConst<SmoothingPolicy> T, class Visitor>
void visit(T& x, Visitor&& v) {
  v("q", x.q);
  v("k", x.k);
}

template <MaybeConst<TilePolicy> T, class Visitor>
void visit(T& x, Visitor&& v) {
  v("queries", x.queries);
  v("keys", x.keys);
}

/// Members that JSON has only where they differ from the default: they came after recipes had been saved, whose texts and hashes stay.
template <class T>
inline constexpr bool kIsOptional =
    std::same_as<T, TilePolicy> || std::same_as<T, GradientD> || std::same_as<T, decltype(Quantisation::headroom)>;

template <MaybeConst<Recipe> T, class Visitor>
void visit(T& x, Visitor&& v) {
  v("q", x.q);
  v("k", x.k);
  v("v", x.v);
  v("d_out", x.d_out);
  v("p", x.p);
  v("d_s", x.d_s);
  v("one_ds_payload", x.one_ds_payload);
  v("rotate", x.rotate);
  v("trains", x.trains);
  v("gradient_p", x.gradient_p);
  v("gradient_d", x.gradient_d);
  v("d_out_times_v_bf16", x.d_out_times_v_bf16);
  v("softmax", x.softmax);
  v("accumulation", x.accumulation);
  v("safety", x.safety);
  v("smoothing", x.smoothing);
  v("tile", x.tile);
}

}  // namespace flamia::recipe
