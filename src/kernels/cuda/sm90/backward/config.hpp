// SPDX-License-Identifier: Apache-2.0
// Compile-time shape of the backward kernel: tiles, roles, registers, shared memory. Plain data, printable on the host.
#pragma once
#include <cstdint>

#include "../layout.hpp"
#include "backward.hpp"
#include "fragments.hpp"
#include "records.hpp"

namespace flamia::sm90::backward {

/// The kernel's dimensions as data, for printing and for the committed table of resources.
struct Dimensions {
  int head_dim, key_tile, query_step, stages, exchange_slots;
  int threads, consumer_registers, query_registers;
  int shared_bytes;
};

template <int kHeadDim_, ScaleGroup kScaleGroup_, PartialFormat kPartials_, bool kRecordCodes_>
struct Config {
  static_assert(kHeadDim_ == 64 || kHeadDim_ == 128);
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr ScaleGroup kScaleGroup = kScaleGroup_;
  static constexpr PartialFormat kPartials = kPartials_;
  static constexpr bool kRecordCodes = kRecordCodes_;

  // Roles: two consumer warpgroups own 64 keys each (their dK and dV stay in registers), the third makes dQ and moves all data.
  static constexpr int kConsumers = 2;
  static constexpr int kKeysPerConsumer = 64;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = 216;
  static constexpr int kQueryRegisters = 72;
  // A launch gives every thread 168 (65,536 / 384, rounded down to a multiple of 8); setmaxnreg can only hand these round.
  static_assert(kConsumers * kConsumerRegisters + kQueryRegisters <= (kConsumers + 1) * (65536 / kThreads / 8 * 8));
  static constexpr int kConsumerWarps = 4 * kConsumers;

  static constexpr int kHalves = kHeadDim / 64;  // products with d columns are made 64 columns at a time
  static constexpr int kStages = 3;
  static constexpr int kExchangeSlots = 3;  // dS of three steps on the way
  static constexpr int kPlanSlots = 128;    // two batches of 32 ahead of the copies, and what is under way
  static constexpr int kWorkSlots = 16;     // items under way or planned: at most one a stage and a batch, and a few

  static constexpr int kKeyBytes = kKeyTile * kHeadDim;
  static constexpr int kStepBytes = kQueryStep * kHeadDim;  // one copy of Q or dO'
  static constexpr int kExchangeBytes = kQueryStep * kKeyTile * 2;
  static constexpr int kPartialBytes = kPartials == PartialFormat::f16 ? 2 : 4;
  static constexpr int kStagingBytes = kPartials == PartialFormat::f16 ? kGroup * kHeadDim * 2 : 16;  // of a warp's 16 queries
};

}  // namespace flamia::sm90::backward
