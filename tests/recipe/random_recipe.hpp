// SPDX-License-Identifier: Apache-2.0
// Random recipes, sensible or not: any value of any member.
#pragma once
#include <array>
#include <random>

#include "recipe/fields.hpp"
#include "recipe/named.hpp"
#include "recipe/names.hpp"

namespace flamia::testing_support {

/// Sets one member (an enumerator, a number, a flag) to another value.
template <class T>
void change(T& x, std::mt19937& bits) {
  if constexpr (std::is_same_v<T, bool>) {
    x = !x;
  } else if constexpr (std::is_enum_v<T>) {
    const auto count = static_cast<unsigned>(std::size(recipe::Words<T>::kAll));
    x = static_cast<T>((static_cast<unsigned>(x) + 1 + bits() % (count - 1)) % count);
  } else if constexpr (std::is_same_v<T, int>) {
    const int values[] = {0, 1, 2, 3, 4, 16, 32, 64, 128, -1, static_cast<int>(bits())};
    const int before = x;
    while (x == before) x = values[bits() % std::size(values)];
  } else if constexpr (std::is_same_v<T, std::int8_t>) {
    x = static_cast<T>(x + 1 + static_cast<int>(bits() % 255));
  } else {
    const float before = x;
    while (x == before) x = std::uniform_real_distribution<float>(-3.f, 3.f)(bits);
  }
}

/// Calls visit(member) for every member that is no struct.
template <class T, class Visit>
void leaves(T& x, Visit&& visit) {
  if constexpr (std::is_class_v<T>)
    recipe::visit(x, [&](const char*, auto& member) { leaves(member, visit); });
  else
    visit(x);
}

/// A named recipe with about `changes` members changed.
inline Recipe random_recipe(std::mt19937& bits, int changes) {
  const auto named = recipe::named_recipes();
  Recipe made = named[bits() % named.size()].recipe;
  int count = 0;
  leaves(made, [&](auto&) { ++count; });
  leaves(made, [&](auto& member) {
    if (static_cast<int>(bits() % static_cast<unsigned>(count)) < changes) change(member, bits);
  });
  return made;
}

/// Calls check(recipe) once for every member, with only that member changed.
template <class Check>
void for_each_member(const Recipe& base, Check check) {
  int count = 0;
  Recipe copy = base;
  leaves(copy, [&](auto&) { ++count; });
  std::mt19937 bits(5);
  for (int i = 0; i < count; ++i) {
    Recipe changed = base;
    int at = 0;
    leaves(changed, [&](auto& member) {
      if (at++ == i) change(member, bits);
    });
    check(changed);
  }
}

}  // namespace flamia::testing_support
