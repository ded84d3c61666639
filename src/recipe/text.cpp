// SPDX-License-Identifier: Apache-2.0
// A recipe as text: a name, then what differs from it. parse() applies the tokens from left to right, and name() finds its tokens by
// doing exactly that, so parse(name()) is the recipe again.
#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "recipe/fields.hpp"
#include "recipe/named.hpp"
#include "recipe/names.hpp"
#include "recipe/text_fields.hpp"

namespace flamia {
namespace {

using recipe::NamedRecipe;
using recipe::TextField;

/// Every member of a recipe as a number, in the order of fields.hpp.
template <class T>
void flatten(const T& x, std::vector<double>* out) {
  if constexpr (std::is_class_v<T>)
    recipe::visit(x, [out](const char*, const auto& member) { flatten(member, out); });
  else
    out->push_back(static_cast<double>(x));
}

int differing_members(const Recipe& a, const Recipe& b) {
  std::vector<double> left, right;
  flatten(a, &left);
  flatten(b, &right);
  return std::inner_product(left.begin(), left.end(), right.begin(), 0, std::plus<>(),
                            [](double x, double y) { return x == y ? 0 : 1; });
}

/// The tokens that turn `from` into `to`.
std::vector<std::string> tokens_between(Recipe from, const Recipe& to) {
  std::vector<std::string> tokens;
  for (const TextField& shorthand : recipe::text_shorthands()) {
    const std::string value = shorthand.print(to);
    Recipe next = from;
    if (value.empty() || value == shorthand.print(from) || !shorthand.read(value, &next)) continue;
    if (differing_members(next, to) >= differing_members(from, to)) continue;
    tokens.push_back(std::string(shorthand.key) + "=" + value);
    from = next;
  }
  for (const TextField& field : recipe::text_fields())
    if (field.print(from) != field.print(to)) tokens.push_back(std::string(field.key) + "=" + field.print(to));
  return tokens;
}

std::vector<std::string> words(std::string_view text) {
  std::vector<std::string> found;
  for (std::size_t begin = 0; (begin = text.find_first_not_of(" \t\n", begin)) != std::string_view::npos;) {
    const std::size_t end = std::min(text.find_first_of(" \t\n", begin), text.size());
    found.emplace_back(text.substr(begin, end - begin));
    begin = end;
  }
  return found;
}

std::vector<std::string> all_keys() {
  std::vector<std::string> keys;
  for (const auto table : {recipe::text_shorthands(), recipe::text_fields()})
    for (const TextField& field : table)
      if (std::find(keys.begin(), keys.end(), field.key) == keys.end()) keys.emplace_back(field.key);
  return keys;
}

/// Applies one "key=value".
Status apply(const std::string& token, Recipe* made) {
  const std::size_t equals = token.find('=');
  if (equals == std::string::npos)
    return Status::invalid("recipe: \"" + recipe::clipped(token) +
                           "\" is no field=value; after the name come fields such as ds=32x32 or dq=f32");
  const std::string key = token.substr(0, equals), value = token.substr(equals + 1);
  const TextField* last = nullptr;
  for (const auto table : {recipe::text_shorthands(), recipe::text_fields()})
    for (const TextField& field : table) {
      if (key != field.key) continue;
      last = &field;
      Recipe next = *made;
      if (field.read(value, &next)) return *made = next, Status{};
    }
  if (!last)
    return Status::invalid("recipe field \"" + recipe::clipped(key) + "\" is unknown; " + recipe::suggestion(key, all_keys()));
  return Status::invalid("recipe field " + key + " is \"" + recipe::clipped(value) + "\" but must be " + last->values);
}

}  // namespace

const NamedRecipe* recipe::nearest_named(const Recipe& recipe, const std::function<bool(const Recipe&)>& fits) {
  const NamedRecipe* best = nullptr;
  int fewest = 0;
  for (const NamedRecipe& named : named_recipes()) {
    // what the scores are made of says more than any other member
    const bool other_scores = named.recipe.q.first.element != recipe.q.first.element;
    const int differ = differing_members(named.recipe, recipe) + (other_scores ? 8 : 0);
    if (!fits(named.recipe) || (best && differ >= fewest)) continue;
    best = &named;
    fewest = differ;
  }
  return best;
}

std::string Recipe::name() const {
  const NamedRecipe* best = nullptr;
  std::vector<std::string> fewest;
  for (const NamedRecipe& named : recipe::named_recipes()) {
    std::vector<std::string> tokens = tokens_between(named.recipe, *this);
    if (best && tokens.size() >= fewest.size()) continue;
    best = &named;
    fewest = std::move(tokens);
  }
  std::string text = best->name;
  for (const std::string& token : fewest) text += " " + token;
  return text;
}

Status Recipe::parse(std::string_view text, Recipe* recipe) {
  if (Status status = recipe::check_text(text, recipe); !status.ok()) return status;
  const std::vector<std::string> tokens = words(text);
  const std::vector<std::string> names = recipe_names();
  if (tokens.empty()) return Status::invalid("recipe is empty; name one of " + recipe::quoted_list(names));
  const NamedRecipe* named = recipe::find_named(tokens[0]);
  if (!named)
    return Status::invalid("recipe \"" + recipe::clipped(tokens[0]) + "\" is unknown; " + recipe::suggestion(tokens[0], names));
  Recipe made = named->recipe;
  for (std::size_t i = 1; i < tokens.size(); ++i) {
    const std::string key = tokens[i].substr(0, tokens[i].find('='));
    for (std::size_t j = 1; j < i; ++j)
      if (tokens[j].substr(0, tokens[j].find('=')) == key) return Status::invalid("recipe field \"" + key + "\" is given twice");
    if (Status status = apply(tokens[i], &made); !status.ok()) return status;
  }
  *recipe = made;
  return {};
}

}  // namespace flamia
