// SPDX-License-Identifier: Apache-2.0
// Runs the built program as a user would and keeps what it says.
#pragma once
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

extern char** environ;  // NOLINT(readability-redundant-declaration): only glibc declares it

namespace flamia::test {

inline std::string contents(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

/// A folder of its own that goes away with the test.
class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "flamia-test.XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  /// Names of all files, hidden ones too, sorted.
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) all.push_back(entry.path().filename().string());
    std::sort(all.begin(), all.end());
    return all;
  }

 private:
  std::filesystem::path path_;
};

struct Outcome {
  int code = -1;  // exit code, or -signal
  std::string out, err;
};

/// The program under test: $FLAMIA_PROGRAM; or the build's; or, where tests were carried elsewhere, the one beside this test.
inline const std::string& program_path() {
  static const std::string path = [] {
    if (const char* const given = std::getenv("FLAMIA_PROGRAM")) return std::string(given);
    std::error_code ignored;
    const std::string beside = (std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path() / "flamia").string();
    return std::filesystem::exists(FLAMIA_PROGRAM, ignored) ? std::string(FLAMIA_PROGRAM) : beside;
  }();
  return path;
}

/// Starts the program; standard output goes to `out`, standard error to `err`.
inline pid_t start(const std::vector<std::string>& arguments, const std::string& out, const std::string& err,
                   const std::string& program = program_path()) {
  std::vector<char*> argv{const_cast<char*>(program.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  posix_spawn_file_actions_addopen(&actions, 2, err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  pid_t child = -1;
  if (::posix_spawn(&child, program.c_str(), &actions, nullptr, argv.data(), environ) != 0) child = -1;
  posix_spawn_file_actions_destroy(&actions);
  return child;
}

inline constexpr int kNotStarted = -1000;

inline int finish(pid_t child) {
  int state = 0;
  if (child < 0 || ::waitpid(child, &state, 0) != child) return kNotStarted;
  return WIFEXITED(state) ? WEXITSTATUS(state) : -WTERMSIG(state);
}

inline Outcome run(const std::vector<std::string>& arguments, const std::string& out_path = "") {
  const Folder folder;
  const std::string out = out_path.empty() ? folder / "out" : out_path;
  Outcome outcome;
  outcome.code = finish(start(arguments, out, folder / "err"));
  if (out_path.empty()) outcome.out = contents(out);
  outcome.err = contents(folder / "err");
  if (outcome.code == kNotStarted)
    outcome.err = "cannot start " + program_path() + "; FLAMIA_PROGRAM names the program, or it lies beside this test\n";
  return outcome;
}

}  // namespace flamia::test
