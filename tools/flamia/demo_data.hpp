// SPDX-License-Identifier: Apache-2.0
// The shipped activations: q, k, v and the gradient of the output from an early and a late layer of a trained model (data/README.md).
#pragma once
#include <string>
#include <vector>

#include "inputs.hpp"

namespace flamia::cli {

struct DemoInput {
  std::string name;  // "early", "late"
  std::string path;
  Inputs inputs;
  float scale = 0.f;  // the model's softmax scale, 0 = 1 / sqrt(head dim)
};

/// From `folder`, or if it is empty from ./data or ../share/flamia/data beside the program.
Status load_demo_data(const std::string& folder, std::vector<DemoInput>* inputs);

}  // namespace flamia::cli
