// SPDX-License-Identifier: Apache-2.0
// Seeded mutations: the same cases on every machine and run.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace flamia::fuzz {

/// SplitMix64: counter-based, so that case n can be repeated alone.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  std::size_t below(std::size_t n) { return n == 0 ? 0 : static_cast<std::size_t>(next() % n); }

 private:
  std::uint64_t state_;
};

using Bytes = std::vector<std::uint8_t>;

/// One to four of: flip a bit, set a byte, delete or repeat a stretch, cut the end, put in a word that such files hold.
inline void mutate(Bytes* bytes, const std::vector<std::string_view>& words, Random* random) {
  for (std::size_t n = 1 + random->below(4); n > 0; --n) {
    const std::size_t at = random->below(bytes->size() + 1);
    const std::size_t stretch = std::min(1 + random->below(8), bytes->size() - at);
    const auto position = bytes->begin() + static_cast<std::ptrdiff_t>(at);
    const auto end = position + static_cast<std::ptrdiff_t>(stretch);
    switch (random->below(7)) {
      case 0:
        if (stretch > 0) *position ^= static_cast<std::uint8_t>(1u << random->below(8));
        break;
      case 1:
        if (stretch > 0) *position = static_cast<std::uint8_t>(random->next());
        break;
      case 2:
        bytes->erase(position, end);
        break;
      case 3: {
        const Bytes copy(position, end);
        bytes->insert(position, copy.begin(), copy.end());
        break;
      }
      case 4:
        if (random->below(4) == 0) bytes->resize(at);
        break;
      case 5: {
        const std::string_view word = words[random->below(words.size())];
        bytes->insert(position, word.begin(), word.end());
        break;
      }
      default: {
        const std::string_view word = words[random->below(words.size())];
        for (std::size_t i = 0; i < word.size() && at + i < bytes->size(); ++i)
          (*bytes)[at + i] = static_cast<std::uint8_t>(word[i]);
      }
    }
  }
}

}  // namespace flamia::fuzz
