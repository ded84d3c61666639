// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <string>
#include <utility>

namespace flamia {

enum class StatusCode {
  ok = 0,
  invalid_argument = 1,  // the message names the argument, what it is, what is allowed and what to do
  unsupported = 2,       // valid, but this recipe or architecture does not do it; the message says why and what does
  out_of_memory = 3,
  io_error = 4,
  device_error = 5,  // a CUDA call failed; the message holds its name and reason
};

/// Result of every call that can fail. No exceptions cross the public API.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}
  static Status invalid(std::string message) { return {StatusCode::invalid_argument, std::move(message)}; }
  static Status unsupported(std::string message) { return {StatusCode::unsupported, std::move(message)}; }

  bool ok() const { return code_ == StatusCode::ok; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::ok;
  std::string message_;
};

}  // namespace flamia
