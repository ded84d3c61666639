// SPDX-License-Identifier: Apache-2.0
#include "demo_data.hpp"

#include <charconv>
#include <cmath>
#include <filesystem>

namespace flamia::cli {
namespace {

constexpr const char* kNames[] = {"early", "late"};

std::string file_in(const std::string& folder, const char* name) { return folder + "/gpt-" + name + ".safetensors"; }

/// Beside the program, installed or in its build folder.
std::string shared_folder() {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? "" : (program.parent_path().parent_path() / "share/flamia/data").string();
}

Status find_folder(std::string* folder) {
  if (!folder->empty()) return {};
  const std::string shared = shared_folder();
  for (const std::string& candidate : {std::string("data"), shared})
    if (std::filesystem::exists(file_in(candidate, kNames[0]))) {
      *folder = candidate;
      return {};
    }
  return {StatusCode::io_error, "the shipped activations (gpt-early.safetensors) are neither in ./data nor in " + shared +
                                    "; run flamia in the project's folder or say --data FOLDER"};
}

/// The model's softmax scale from the file's metadata.
float scale_of(const SafetensorsFile& file) {
  const auto found = file.metadata().find("scale");
  float scale = 0.f;
  if (found == file.metadata().end()) return 0.f;
  const char* end = found->second.data() + found->second.size();
  const auto parsed = std::from_chars(found->second.data(), end, scale);
  return parsed.ec == std::errc() && parsed.ptr == end && std::isfinite(scale) && scale > 0.f ? scale : 0.f;
}

}  // namespace

Status load_demo_data(const std::string& asked, std::vector<DemoInput>* inputs) {
  std::string folder = asked;
  if (Status s = find_folder(&folder); !s.ok()) return s;
  for (const char* name : kNames) {
    DemoInput input;
    input.name = name;
    input.path = file_in(folder, name);
    SafetensorsFile file;
    if (Status s = SafetensorsFile::open(input.path, &file); !s.ok()) return s;
    if (Status s = load_inputs(file, &input.inputs); !s.ok()) return s;
    if (!input.inputs.d_o)
      return Status::invalid(input.path +
                             ": has no tensor \"dout\"; the demo runs the backward pass and needs the gradient of the output");
    input.scale = scale_of(file);
    inputs->push_back(std::move(input));
  }
  return {};
}

}  // namespace flamia::cli
