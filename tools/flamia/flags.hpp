// SPDX-License-Identifier: Apache-2.0
// Commands and their flags. CLI11 lies behind this, in flags.cpp alone: its headers would cost every command seconds of compilation.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flamia/status.hpp"

namespace CLI {  // NOLINT(readability-identifier-naming): the library's
class App;
}  // namespace CLI

namespace flamia::cli {

struct Session;

/// A command under construction. `shown` is what help prints in place of the value; a variable keeps its value where the flag is not given.
class Command {
 public:
  Command(CLI::App* app, Session* session) : app_(app), session_(session) {}

  /// A file that has no flag of its own; it must be given.
  void file(const std::string& name, std::string* value, const std::string& help);
  /// May be left out, but not empty.
  void text(const std::string& name, std::string* value, const std::string& shown, const std::string& help);
  void required_text(const std::string& name, std::string* value, const std::string& shown, const std::string& help);
  /// One of these words; `chosen` is called with it.
  void choice(const std::string& name, const std::vector<std::string>& words, const std::string& shown, const std::string& help,
              const std::function<void(const std::string&)>& chosen);
  void choice(const std::string& name, const std::vector<std::string>& words, const std::string& shown, const std::string& help,
              std::string* value);
  void whole(const std::string& name, int* value, int least, int most, const std::string& shown, const std::string& help);
  void whole(const std::string& name, std::int64_t* value, std::int64_t least, std::int64_t most, const std::string& shown,
             const std::string& help);
  void seed(const std::string& name, std::uint32_t* value, const std::string& help);
  void seed(const std::string& name, std::uint64_t* value, const std::string& help);
  void number(const std::string& name, std::optional<double>* value, const std::string& shown, const std::string& help);
  void flag(const std::string& name, bool* value, const std::string& help);
  /// Two flags that contradict each other.
  void exclude(const std::string& name, const std::string& other);

  /// What help says below the flags.
  void footer(const std::string& text);
  /// What the command does.
  void action(std::function<Status()> action);

 private:
  CLI::App* app_;
  Session* session_;
};

/// Filled while the command line is parsed; `action` is that of the chosen command.
struct Session {
  std::function<Status()> action;
  bool json = false;
  bool progress = false;
};

class Program {
 public:
  Program(const std::string& description, const std::string& footer);
  ~Program();

  Command command(const std::string& name, const std::string& help);
  Session* session() { return &session_; }

  /// Nothing if a command was chosen; else the exit code of what has been said: help, the version or an error.
  std::optional<int> parse(int argc, char** argv);

 private:
  std::unique_ptr<CLI::App> app_;
  Session session_;
};

}  // namespace flamia::cli
