// SPDX-License-Identifier: Apache-2.0
// The words for the enumerators of a recipe, once for text, JSON and messages; and the words nearest to a misspelt one.
#pragma once
#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flamia/recipe.hpp"
#include "flamia/status.hpp"

namespace flamia::recipe {

template <class E>
struct Words;  // kAll[i] is the word for the enumerator of value i

template <>
struct Words<Element> {
  static constexpr const char* kAll[] = {"bf16", "e4m3", "e5m2", "e2m1", "int8"};
};
template <>
struct Words<Group::Kind> {
  static constexpr const char* kAll[] = {"none", "constant", "tensor", "head", "blocks"};
};
template <>
struct Words<ScaleType> {
  static constexpr const char* kAll[] = {"none", "ue8m0", "e4m3", "f32"};
};
template <>
struct Words<ScaleRule> {
  static constexpr const char* kAll[] = {"none", "ceil", "floor", "amax", "amax_or_smaller", "two_level"};
};
template <>
struct Words<Exp2> {
  static constexpr const char* kAll[] = {"hardware", "polynomial", "mitchell", "schraudolph", "direct"};
};
template <>
struct Words<RowReferenceRule> {
  static constexpr const char* kAll[] = {"phase32", "tilesum"};
};
template <>
struct Words<SumOf> {
  static constexpr const char* kAll[] = {"codes", "unrounded"};
};
template <>
struct Words<GradientP> {
  static constexpr const char* kAll[] = {"unrounded", "codes"};
};
template <>
struct Words<GradientD> {
  static constexpr const char* kAll[] = {"output", "scores"};
};
template <>
struct Words<PreScale> {
  static constexpr const char* kAll[] = {"causal_row", "sequence"};
};
template <>
struct Words<AccumulatorModel> {
  static constexpr const char* kAll[] = {"native", "hopper13"};
};

template <class E>
bool is_known(E value) {
  return static_cast<std::size_t>(value) < std::size(Words<E>::kAll);
}

/// The number of one that has no word; `violations` refuses it.
template <class E>
std::string word_of(E value) {
  return is_known(value) ? Words<E>::kAll[static_cast<std::size_t>(value)] : std::to_string(static_cast<unsigned>(value));
}

template <class E>
bool read_word(std::string_view text, E* value) {
  const auto& all = Words<E>::kAll;
  const auto* found = std::find(std::begin(all), std::end(all), text);
  if (found == std::end(all)) return false;
  *value = static_cast<E>(found - std::begin(all));
  return true;
}

template <class E>
std::vector<std::string> words_of() {
  return {std::begin(Words<E>::kAll), std::end(Words<E>::kAll)};
}

/// Insertions, deletions, replacements and swaps of neighbours that turn a into b.
std::size_t edit_distance(std::string_view a, std::string_view b);

/// At most three of `words` that `text` may have meant, best first; empty if none is near.
std::vector<std::string> nearest(std::string_view text, std::span<const std::string> words);

/// `"a", "b" or "c"`
std::string quoted_list(std::span<const std::string> words);
/// A sentence a line.
std::string in_lines(std::span<const std::string> sentences);

/// `nearest: "a" or "b"`, or, if nothing is near, `allowed: "a", "b", ...`.
std::string suggestion(std::string_view text, std::span<const std::string> words);

/// As much of a stranger's text as a message repeats.
std::string clipped(std::string_view text);

/// Before a text or JSON of a recipe is read: somewhere to put it, and no more bytes than a recipe can need (its JSON has some 2,000).
Status check_text(std::string_view text, const Recipe* recipe);

}  // namespace flamia::recipe
