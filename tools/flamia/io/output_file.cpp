// SPDX-License-Identifier: Apache-2.0
#include "io/output_file.hpp"

#include <fcntl.h>
#include <signal.h>  // NOLINT(modernize-deprecated-headers): POSIX
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <vector>

namespace flamia::cli {
namespace {

// The one temporary file that exists, for the signal handler (the program writes one file at a time).
char g_temporary[PATH_MAX] = "";
std::atomic<bool> g_temporary_exists{false};

extern "C" void remove_temporary(int signal_number) {
  if (g_temporary_exists.load(std::memory_order_acquire)) ::unlink(g_temporary);
  ::signal(signal_number, SIG_DFL);
  ::raise(signal_number);
}

void remember(const std::string& temporary) {
  if (temporary.size() >= sizeof g_temporary) return;
  std::memcpy(g_temporary, temporary.c_str(), temporary.size() + 1);
  g_temporary_exists.store(true, std::memory_order_release);
  for (int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    struct sigaction current;
    if (::sigaction(number, nullptr, &current) == 0 && current.sa_handler == SIG_DFL) ::signal(number, remove_temporary);
  }
}

void forget() { g_temporary_exists.store(false, std::memory_order_release); }

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

Status io_error(const std::string& path, const std::string& what, int error) {
  return {StatusCode::io_error, path + ": " + what + ": " + std::strerror(error)};
}

/// N where the path names this process's open file N, whatever it leads to; else -1. Such a file is somebody else's: it is written
/// through the descriptor, even when standard output was redirected to a regular file.
int own_descriptor(const std::string& path) {
  if (path == "/dev/stdout") return 1;
  if (path == "/dev/stderr") return 2;
  for (const char* start : {"/dev/fd/", "/proc/self/fd/"}) {
    const std::size_t length = std::strlen(start);
    if (path.compare(0, length, start) != 0 || path.size() == length || path.size() > length + 6) continue;
    if (path.find_first_not_of("0123456789", length) == std::string::npos) return std::atoi(path.c_str() + length);
  }
  return -1;
}

enum class Kind { absent, regular, special };

struct Target {
  Kind kind = Kind::absent;
  std::string path;  // symbolic links followed, also those that lead to nothing yet
  mode_t mode = 0;
};

Status look_at(const std::string& path, Target* target) {
  if (path.empty()) return {StatusCode::io_error, "the output has an empty name; name a file"};
  if (own_descriptor(path) >= 0) {
    target->kind = Kind::special;
    return {};
  }
  struct stat facts;
  if (::stat(path.c_str(), &facts) == 0) {
    target->mode = facts.st_mode;
    if (S_ISDIR(facts.st_mode)) return {StatusCode::io_error, path + ": is a folder; name a file"};
    target->kind = S_ISREG(facts.st_mode) ? Kind::regular : Kind::special;
    // root may write to anything, but a file that nobody may write to was protected on purpose
    if (target->kind == Kind::regular && ((facts.st_mode & 0222) == 0 || ::access(path.c_str(), W_OK) != 0))
      return {StatusCode::io_error, path + ": is read-only; make it writable or choose another name"};
  } else if (errno != ENOENT) {
    return io_error(path, "cannot be examined", errno);
  }
  target->path = path;
  if (target->kind == Kind::special) return {};
  std::error_code error;
  for (int links = 0; links < 40 && std::filesystem::is_symlink(target->path, error); ++links) {
    const std::filesystem::path next = std::filesystem::read_symlink(target->path, error);
    if (error) return io_error(path, "is a link that cannot be followed", error.value());
    target->path = next.is_absolute() ? next.string() : (std::filesystem::path(folder_of(target->path)) / next).string();
  }
  return {};
}

}  // namespace

OutputFile::~OutputFile() { discard(); }

void OutputFile::discard() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
  if (!temporary_.empty()) ::unlink(temporary_.c_str()), forget();
  temporary_.clear();
}

Status OutputFile::fail(const std::string& what, int error) {
  discard();
  return io_error(path_, what, error);
}

Status OutputFile::open(const std::string& path) {
  path_ = path;
  Target target;
  if (Status s = look_at(path, &target); !s.ok()) return s;
  if (target.kind == Kind::special) {
    const int own = own_descriptor(path);
    descriptor_ = own >= 0 ? ::fcntl(own, F_DUPFD_CLOEXEC, 3) : ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
    return descriptor_ < 0 ? io_error(path, "cannot be opened for writing", errno) : Status();
  }
  target_ = target.path;
  const std::string name = std::filesystem::path(target_).filename().string();
  const std::string pattern = folder_of(target_) + "/." + name.substr(0, 200) + ".XXXXXX";
  std::vector<char> made(pattern.begin(), pattern.end());
  made.push_back(0);
  descriptor_ = ::mkostemp(made.data(), O_CLOEXEC);
  if (descriptor_ < 0) return io_error(path, "cannot create a file in " + folder_of(target_), errno);
  temporary_ = made.data();
  remember(temporary_);
  const mode_t mask = ::umask(0);
  ::umask(mask);
  const mode_t mode = target.kind == Kind::regular ? target.mode & 07777 : 0666 & ~mask;
  if (::fchmod(descriptor_, mode) != 0) return fail("cannot set its access rights", errno);
  return {};
}

Status OutputFile::write(const void* bytes, std::size_t count) {
  const auto* from = static_cast<const char*>(bytes);
  while (count > 0) {
    const ssize_t put = ::write(descriptor_, from, std::min<std::size_t>(count, std::size_t{1} << 30));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return fail("cannot be written", errno);
    from += put, count -= static_cast<std::size_t>(put);
  }
  return {};
}

Status OutputFile::commit() {
  if (!temporary_.empty() && ::fsync(descriptor_) != 0) return fail("cannot be flushed to the disk", errno);
  const int closed = ::close(descriptor_);
  descriptor_ = -1;
  if (closed != 0 && errno != EINTR) return fail("cannot be closed", errno);
  if (temporary_.empty()) return {};
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) return fail("cannot be put in place", errno);
  forget();
  temporary_.clear();
  // the new name itself; a file system that cannot do it has no way to promise more
  if (const int folder = ::open(folder_of(target_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); folder >= 0) {
    ::fsync(folder);
    ::close(folder);
  }
  return {};
}

Status write_file(const std::string& path, const std::string& text) {
  OutputFile out;
  if (Status s = out.open(path); !s.ok()) return s;
  if (Status s = out.write(text.data(), text.size()); !s.ok()) return s;
  return out.commit();
}

/// Whether both names lead to one regular file, links included.
static bool same_file(const std::string& a, const std::string& b) {
  struct stat first, second;
  return ::stat(a.c_str(), &first) == 0 && ::stat(b.c_str(), &second) == 0 && S_ISREG(first.st_mode) &&
         first.st_dev == second.st_dev && first.st_ino == second.st_ino;
}

Status check_writable(const char* flag, const std::string& path, const std::string& input) {
  if (same_file(input, path))
    return Status::invalid(std::string(flag) + " " + path + " is the input " + input +
                           " itself, which would be lost; choose another name");
  Target target;
  if (Status s = look_at(path, &target); !s.ok()) return s;
  if (target.kind == Kind::special) return {};
  if (::access(folder_of(target.path).c_str(), W_OK) != 0)
    return io_error(path, "cannot create a file in " + folder_of(target.path), errno);
  return {};
}

Status make_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) return io_error(path, "cannot be created", error.value());
  if (::access(path.c_str(), W_OK) != 0) return io_error(path, "cannot create a file in it", errno);
  return {};
}

bool is_standard_output(const std::string& path) {
  if (own_descriptor(path) == 1) return true;
  struct stat named, standard;
  return ::stat(path.c_str(), &named) == 0 && !S_ISREG(named.st_mode) && ::fstat(1, &standard) == 0 &&
         named.st_dev == standard.st_dev && named.st_ino == standard.st_ino && !S_ISCHR(named.st_mode);
}

}  // namespace flamia::cli
