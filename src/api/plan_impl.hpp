// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "flamia/attention.hpp"

namespace flamia {

namespace api {
struct Backend;
}

struct Plan::Impl {
  Problem problem;  // scale filled in
  Recipe recipe;
  PlanOptions options;
  const api::Backend* backend = nullptr;
  std::size_t saved_bytes = 0;
  std::size_t workspace_bytes[2] = {0, 0};  // forward, backward
};

}  // namespace flamia
