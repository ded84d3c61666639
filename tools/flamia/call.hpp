// SPDX-License-Identifier: Apache-2.0
// One attention call of the library on host tensors, with the memory that it needs.
#pragma once
#include <cstdint>
#include <vector>

#include "inputs.hpp"
#include "kernels/cpu/probe.hpp"

namespace flamia::cli {

struct CallOptions {
  Mask mask;
  float scale = 0.f;
  Device device = Device::cpu;
  int threads = 0;
  bool deterministic = false;  // GPU: dQ bit-repeatable
  bool backward = false;
  DType out_dtype = DType::f32;  // of O; gradients are F32 and do not depend on it
};

struct CallResult {
  std::vector<std::uint8_t> o;  // [T, H, d] in out_dtype
  std::vector<float> lse;       // [H, T]
  std::vector<float> d_q, d_k, d_v;
  double seconds = 0;  // quantise + forward (+ backward), without planning and allocation
};

/// The problem with the command's mask and scale.
Problem with_options(const Problem& problem, const CallOptions& options);

/// `probe`: also what rounding did to P and dS (CPU).
Status attend(const Inputs& inputs, const Recipe& recipe, const CallOptions& options, CallResult* result,
              cpu::Probe* probe = nullptr);

/// O of an F32 result.
std::vector<float> output_f32(const CallResult& result);

}  // namespace flamia::cli
