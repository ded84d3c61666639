// SPDX-License-Identifier: Apache-2.0
// A file that appears whole or not at all: written under a temporary name in the same folder, flushed to the disk, then renamed. What
// exists and is no regular file (a pipe, a terminal, a device) is written in place. A temporary file is removed on every error and on
// SIGINT, SIGTERM, SIGHUP and SIGQUIT.
#pragma once
#include <cstddef>
#include <string>

#include "flamia/status.hpp"

namespace flamia::cli {

class OutputFile {
 public:
  OutputFile() = default;
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();  // without commit: nothing is left behind

  Status open(const std::string& path);
  Status write(const void* bytes, std::size_t count);
  Status commit();

 private:
  Status fail(const std::string& what, int error);
  void discard();

  std::string path_;       // as the caller gave it, for messages
  std::string target_;     // where symbolic links lead
  std::string temporary_;  // empty when written in place
  int descriptor_ = -1;
};

/// Text in one piece.
Status write_file(const std::string& path, const std::string& text);

/// Before long work: would opening `path` fail already, or replace the input (also through a link)? Creates nothing. `flag` is the
/// argument that gave the path.
Status check_writable(const char* flag, const std::string& path, const std::string& input);

/// The same for a folder that takes several files: makes it where it is missing.
Status make_folder(const std::string& path);

/// Whether `path` is where the program's own text goes, so that only one of the two may be written.
bool is_standard_output(const std::string& path);

}  // namespace flamia::cli
