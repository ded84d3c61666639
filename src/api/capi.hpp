// SPDX-License-Identifier: Apache-2.0
// What the C API's two files share: opaque types, the thread's message, versioned descriptors, texts.
#pragma once
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <string_view>

#include "flamia/attention.hpp"
#include "flamia/flamia.h"

struct flamia_recipe {
  flamia::Recipe recipe;
};
struct flamia_plan {
  flamia::Plan plan;
};

namespace flamia::capi {

/// Keeps the message for the thread and returns the code.
flamia_status report(const Status& status);

inline flamia_status null_argument(const char* name) {
  return report(Status::invalid(std::string(name) + " is null; pass a valid pointer"));
}

/// Runs `call`, which returns a Status; no exception leaves the C API.
template <class Call>
flamia_status guarded(Call&& call) {
  try {
    return report(call());
  } catch (const std::bad_alloc&) {
    return report({StatusCode::out_of_memory, "out of memory"});
  } catch (const std::exception& error) {
    return report({StatusCode::device_error, std::string("unexpected failure: ") + error.what()});
  }
}

/// Copies a caller's descriptor into one of this library's size. `*copy` holds the defaults; `first_size` is the size of the
/// descriptor's first version.
template <class Descriptor>
Status read_descriptor(const char* name, const Descriptor* given, std::size_t first_size, Descriptor* copy) {
  const std::string what(name);
  if (given == nullptr) return Status::invalid(what + " is null; pass a filled descriptor");
  const std::size_t size = given->struct_size;
  if (size < first_size || size > 4096)
    return Status::invalid(what + ".struct_size = " + std::to_string(size) + " but must be sizeof of the descriptor (" +
                           std::to_string(sizeof(Descriptor)) + " here); start from its FLAMIA_..._INIT macro");
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(Descriptor); i < size; ++i)
    if (bytes[i] != 0)
      return Status::unsupported(what + " sets a field at byte " + std::to_string(i) + " that flamia " + version() +
                                 " does not know; use a newer library or leave the field 0");
  std::memcpy(copy, given, size < sizeof(Descriptor) ? size : sizeof(Descriptor));
  copy->struct_size = sizeof(Descriptor);
  return {};
}

Status write_text(std::string_view text, char* buffer, std::size_t capacity, std::size_t* length);

}  // namespace flamia::capi
