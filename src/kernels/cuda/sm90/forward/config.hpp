// SPDX-License-Identifier: Apache-2.0
// Compile-time shape of the forward kernel: tiles, roles, registers, shared memory. Plain data, printable on the host.
#pragma once
#include <cstdint>

#include "../layout.hpp"
#include "forward.hpp"

namespace flamia::sm90::forward {

/// The kernel's dimensions as data, for printing and for the committed table of resources.
struct Dimensions {
  int head_dim, query_tile, key_tile, stages, query_buffers, consumer_warpgroups;
  int threads, consumer_registers, loader_registers;
  int shared_bytes;
};

inline constexpr int kWarpsPerConsumer = 4;

/// How P comes from its logarithm. The lines (inference; docs/numerics.md, section 13) are compiled by the benchmark alone.
enum class Exponential { hardware, mitchell, schraudolph };

template <int kHeadDim_, ScaleGroup kScaleGroup_, RowReference kReference_, bool kRecordCodes_>
struct Config {
  static_assert(kHeadDim_ == 64 || kHeadDim_ == 128);
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr ScaleGroup kScaleGroup = kScaleGroup_;
  static constexpr RowReference kReference = kReference_;
  static constexpr bool kRecordCodes = kRecordCodes_;
  static constexpr Exponential kExponential = Exponential::hardware;

  // Tiles. A consumer warpgroup owns 64 queries; its tile of scores is 64 x 128.
  static constexpr int kConsumers = 3;
  static constexpr int kRowsPerConsumer = 64;
  static constexpr int kQueryTile = kConsumers * kRowsPerConsumer;
  static constexpr int kScoreBytes = kScaleGroup == ScaleGroup::nvfp4 ? 2 : 1;  // of an element of Q and K

  // Shared memory is short: one buffer of queries, whose thirds are refilled each for itself, by a warp of their own.
  static constexpr bool kLarge = kHeadDim * kScoreBytes == 256;
  static constexpr int kStages = kLarge ? 3 : kHeadDim == 128 ? 4 : 5;
  static constexpr int kQueryBuffers = kLarge ? 1 : 2;
  static constexpr int kQueryBarriers = kLarge ? kConsumers : kQueryBuffers;  // what is announced apart
  static constexpr int kWorkSlots = 2;

  // A ticket is taken when the copy warp has this many tiles of the running item left: early enough to hide the way from ticket to
  // document, late enough that blocks do not hoard work near the end.
  static constexpr int kTilesAhead = 2;

  // Roles. The loader warpgroup holds the scheduler warp and the copy warp; two warps leave at once.
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kLoaderRegisters = 32;
  static constexpr int kConsumerRegisters = 160;
  static_assert(128 * (kConsumers * kConsumerRegisters + kLoaderRegisters) <= 65536);

  // Shared memory of one stage. Each group of 16 tokens of V is followed by one core matrix of ones: eight more columns of the PV
  // product, which sum the rounded codes of a row.
  static constexpr int kTokenGroups = kKeyTile / 16;
  static constexpr int kValueGroupBytes = 16 * kHeadDim;
  static constexpr int kOnesBytes = 128;
  static constexpr int kValueGroupStride = kValueGroupBytes + kOnesBytes;
  static constexpr int kKeyBytes = kKeyTile * kHeadDim * kScoreBytes;
  static constexpr int kValueBytes = kTokenGroups * kValueGroupStride;
  static constexpr int kQueryBytes = kQueryTile * kHeadDim * kScoreBytes;
  static constexpr int kRowsOut = kLarge ? 8 : 16;  // of a warp's rows, 64 channels of each, on their way out
  static constexpr int kRowsOutBytes = kRowsOut * 128;

  // Scale exponents a tile carries: one entry per token-block or per token.
  static constexpr int kScaleEntries = kScaleGroup == ScaleGroup::block ? kKeyTile / kBlock : kKeyTile;

  // Lanes of the copy warp that write them, each arriving for itself (block_exponents.cuh).
  static constexpr int kExponentWriters = kScaleGroup == ScaleGroup::block ? kScaleEntries + 1 : 32;

  static constexpr bool kTokenBlocks = kScaleGroup == ScaleGroup::block;

  // Whether P's bias may fold V's exponents, a column of powers of two undoing it in the row sums: where V may have token-blocks.
  static constexpr bool kBiasFolds = kTokenBlocks || kScaleGroup == ScaleGroup::nvfp4;

  // Accumulators of a thread: scores, output.
  static constexpr int kScores = kKeyTile / 2;
  static constexpr int kOutputs = kHeadDim / 2;
};

/// P is carried as 2^kCodeShift * exp2(t - m).
inline constexpr float kCodeShift = 8.0f;

/// How far m lies above the greatest logit where the maximum sets it: the greatest code is 2^8 (phase32) or 2^7 (tilesum, careful rows).
template <RowReference kReference>
inline constexpr float kHeadroom = kReference == RowReference::phase32 ? 0.0f : 1.0f;

}  // namespace flamia::sm90::forward
