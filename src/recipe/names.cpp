// SPDX-License-Identifier: Apache-2.0
#include "recipe/names.hpp"

#include <numeric>

namespace flamia::recipe {

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before_last(b.size() + 1), last(b.size() + 1), current(b.size() + 1);
  std::iota(last.begin(), last.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    current[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const bool same = a[i - 1] == b[j - 1];
      current[j] = std::min({last[j] + 1, current[j - 1] + 1, last[j - 1] + (same ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) current[j] = std::min(current[j], before_last[j - 2] + 1);
    }
    before_last = last;
    last = current;
  }
  return last[b.size()];
}

namespace {

std::string in_lower_case(std::string_view text) {
  std::string lower(text);
  for (char& c : lower)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return lower;
}

}  // namespace

std::vector<std::string> nearest(std::string_view text, std::span<const std::string> words) {
  std::vector<std::pair<std::size_t, std::string>> ranked;
  if (text.size() > 64) return {};  // no word is near such a text, and the distance costs its length
  const std::string lower = in_lower_case(text);
  const std::size_t allowed = text.size() > 3 ? 2 : 1;  // two of three letters changed are another word
  for (const std::string& word : words) {
    std::size_t distance = edit_distance(lower, word);
    if (!text.empty() && word.starts_with(lower)) distance = std::min<std::size_t>(distance, 1);  // a word cut short
    if (distance <= std::max<std::size_t>(allowed, word.size() / 3)) ranked.emplace_back(distance, word);
  }
  std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::string> best;
  for (const auto& [distance, word] : ranked)
    if (best.size() < 3) best.push_back(word);
  return best;
}

std::string quoted_list(std::span<const std::string> words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (i > 0) text += i + 1 == words.size() ? " or " : ", ";
    text += '"' + words[i] + '"';
  }
  return text;
}

std::string in_lines(std::span<const std::string> sentences) {
  std::string text;
  for (const std::string& sentence : sentences) text += (text.empty() ? "" : "\n") + sentence;
  return text;
}

std::string suggestion(std::string_view text, std::span<const std::string> words) {
  const std::vector<std::string> near = nearest(text, words);
  return near.empty() ? "allowed: " + quoted_list(words) : "nearest: " + quoted_list(near);
}

std::string clipped(std::string_view text) {
  constexpr std::size_t kShown = 64;
  return text.size() > kShown ? std::string(text.substr(0, kShown - 3)) + "..." : std::string(text);
}

Status check_text(std::string_view text, const Recipe* recipe) {
  constexpr std::size_t kMostBytes = std::size_t{1} << 16;
  if (recipe == nullptr) return Status::invalid("recipe is null; pass the address of a Recipe to fill");
  if (text.size() > kMostBytes)
    return Status::invalid("recipe is a text of " + std::to_string(text.size()) + " bytes, but no recipe needs more than " +
                           std::to_string(kMostBytes) + "; pass a name, its fields, or the JSON of one recipe");
  return {};
}

}  // namespace flamia::recipe
