// SPDX-License-Identifier: Apache-2.0
// A line on standard error that says how far long work has come; silent unless somebody watches.
#pragma once
#include <unistd.h>

#include <cstdio>
#include <string>

namespace flamia::cli {

class Progress {
 public:
  /// `forced`: --progress, also when standard error is no terminal (then one line a step).
  Progress(std::string what, int steps, bool forced)
      : what_(std::move(what)), steps_(steps), terminal_(::isatty(2) == 1), shown_(forced || terminal_) {}
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() {
    if (shown_ && terminal_) std::fprintf(stderr, "\r\033[K");
  }
  void step(const std::string& name) {
    ++done_;
    if (!shown_) return;
    std::fprintf(stderr, terminal_ ? "\r\033[K%s %d/%d: %s" : "%s %d/%d: %s\n", what_.c_str(), done_, steps_, name.c_str());
    std::fflush(stderr);
  }

 private:
  std::string what_;
  int steps_;
  bool terminal_, shown_;
  int done_ = 0;
};

}  // namespace flamia::cli
