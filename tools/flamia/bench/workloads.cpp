// SPDX-License-Identifier: Apache-2.0
#include "bench/workloads.hpp"

#include <fmt/format.h>

#include <charconv>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "schedule/mask.hpp"

namespace flamia::cli {

constexpr std::int64_t kMostDocuments = 1 << 24;

std::int64_t Workload::tokens() const {
  std::int64_t sum = 0;
  for (const std::int32_t length : lengths) sum += length;
  return sum;
}

std::vector<std::int32_t> Workload::cu_seqlens() const {
  std::vector<std::int32_t> offsets{0};
  for (const std::int32_t length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
}

double Workload::forward_flops(int heads, int head_dim, bool causal, std::int64_t left, std::int64_t right) const {
  double pairs = 0;
  const bool window = left >= 0 || (right >= 0 && !causal);
  const schedule::MaskReach reach = schedule::reach_of(causal, left, right);
  for (const std::int64_t length : lengths) {
    if (window) {
      for (std::int64_t i = 0; i < length; ++i) {
        const schedule::Interval keys = schedule::visible_keys(reach, i, length);
        pairs += keys.empty() ? 0. : static_cast<double>(keys.end - keys.begin);
      }
    } else {
      pairs += static_cast<double>(length) * static_cast<double>(length) / (causal ? 2 : 1);
    }
  }
  return 4 * pairs * heads * head_dim;
}

Status load_workloads(const std::string& path, const std::string& names, std::vector<Workload>* workloads) {
  std::ifstream file(path);
  if (!file || std::filesystem::is_directory(path))  // which opens, and throws when it is read
    return {StatusCode::io_error, path + " cannot be read; --workload-file names the JSON file of workloads"};
  const nlohmann::json json = nlohmann::json::parse(file, nullptr, false);
  if (!json.is_object() || !json.contains("workloads") || !json["workloads"].is_object())
    return Status::invalid(path + " has no object \"workloads\" of name: [lengths]");
  std::vector<std::string> wanted;
  std::stringstream list(names);
  for (std::string name; std::getline(list, name, ',');) wanted.push_back(name);
  if (names.empty())
    for (const auto& item : json["workloads"].items()) wanted.push_back(item.key());
  for (const std::string& name : wanted) {
    if (!json["workloads"].contains(name)) {
      std::string known;
      for (const auto& item : json["workloads"].items()) known += (known.empty() ? "" : ", ") + item.key();
      return Status::invalid("--workloads: no workload \"" + name + "\"; there are " + known);
    }
    Workload workload{name, {}};
    for (const nlohmann::json& length : json["workloads"][name]) {
      if (!length.is_number_integer() || length.get<std::int64_t>() < 0 ||
          length.get<std::int64_t>() > INT32_MAX - workload.tokens())
        return Status::invalid(path + ": workload \"" + name + "\" holds " + length.dump() +
                               "; lengths are whole numbers of at least 0 whose sum stays below 2^31");
      workload.lengths.push_back(length.get<std::int32_t>());
    }
    workloads->push_back(std::move(workload));
  }
  return {};
}

Status parse_lengths(const std::string& text, Workload* workload) {
  Workload made{text, {}};
  std::stringstream list(text);
  for (std::string item; std::getline(list, item, ',');) {
    std::int64_t length = 0, count = 1;
    const char* const end = item.data() + item.size();
    auto [rest, error] = std::from_chars(item.data(), end, length);
    bool good = error == std::errc() && length >= 0 && length <= INT32_MAX;
    if (good && rest != end) {
      good = *rest == 'x';
      const auto [last, count_error] = std::from_chars(rest + 1, end, count);
      good = good && count_error == std::errc() && last == end && count > 0;
    }
    if (!good || count > (INT32_MAX - made.tokens()) / (length > 0 ? length : 1) ||
        count > kMostDocuments - static_cast<std::int64_t>(made.lengths.size()))
      return Status::invalid(
          fmt::format("--lengths: \"{}\" in \"{}\" is no length or LENGTHxCOUNT (lengths of at least 0, sum "
                      "below 2^31, at most 2^24 documents)",
                      item, text));
    made.lengths.insert(made.lengths.end(), static_cast<std::size_t>(count), static_cast<std::int32_t>(length));
  }
  if (made.lengths.empty()) return Status::invalid("--lengths is empty; give document lengths, for example 4096x16 or 100,200,300");
  *workload = std::move(made);
  return {};
}

}  // namespace flamia::cli
