// SPDX-License-Identifier: Apache-2.0
// Compile-time shape and shared memory of the backward kernel with dS in BF16.
#pragma once
#include <cstdint>

#include "../backward/fragments.hpp"
#include "../backward/work.hpp"
#include "records.hpp"

namespace flamia::sm90::ds16 {

/// What the kernel makes: every gradient, or dK and dV alone (deterministic mode: query_kernel.cuh makes dQ).
enum class Makes { all, key_gradients };

template <int kHeadDim_, ScaleGroup kScaleGroup_, PartialFormat kPartials_, bool kRecordCodes_, Makes kMakes_ = Makes::all>
struct Config {
  static_assert(kHeadDim_ == 64 || kHeadDim_ == 128);
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr ScaleGroup kScaleGroup = kScaleGroup_;
  static constexpr PartialFormat kPartials = kPartials_;
  static constexpr bool kRecordCodes = kRecordCodes_;
  static constexpr bool kQueryGradients = kMakes_ == Makes::all;
  using Record = RowRecord<kScaleGroup>;
  // Per token P keeps the fold that its codes take, and dP has the unit of the 128-query tile. Codes are recorded without it.
  static constexpr bool kFolded = Record::kPerToken && !kRecordCodes;
  // Steps without masks have a loop of their own, straight code with one jump back. Elsewhere it would spill registers of the sums.
  static constexpr bool kStraightLoop = kQueryGradients && kPartials == PartialFormat::f16 && !kRecordCodes;
  // Per token it is that of the steps whose keys all have the document's common exponent, too: no slope is multiplied in. A third loop would spill.
  static constexpr bool kLevelLoop = kStraightLoop && kScaleGroup == ScaleGroup::token;
  // A step asks for the late operands of the next one while it has time; faster per token only, and not beside scores in FP16.
  static constexpr bool kAsksAhead = kLevelLoop;

  // Roles: two consumer warpgroups own 64 keys each (their dK and dV stay in registers) and half the channels of dQ; three
  // threads of the third move all data.
  static constexpr int kConsumers = 2;
  static constexpr int kKeysPerConsumer = 64;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = 240;
  static constexpr int kProducerRegisters = 24;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * (65536 / kThreads / 8 * 8));
  static constexpr int kConsumerWarps = 4 * kConsumers;

  static constexpr int kHalves = kHeadDim / 64;       // dV is made 64 columns at a time
  static constexpr int kQueryColumns = kHeadDim / 2;  // of dQ, a consumer's
  // Stages of early operands; slots of the exchange. With scores in FP16 shared memory holds two: before dS of a step is stored, both
  // warpgroups must have read that of the step before the last.
  static constexpr int kRing = kHeadDim * kScoreBytes<kScaleGroup> == 256 ? 2 : 3;
  static constexpr int kLateStages = 2;
  // K in BF16 is made of the scores' codes, but for scores in FP16: then of E4M3 codes in memory, and K of the scores is made of NVFP4 codes.
  static constexpr bool kKeysFromMemory = kQueryGradients && kScoreBytes<kScaleGroup> == 2;
  // Values in FP16 have no exponents beside them: rows have one factor, keys none, and the NaN of a flagged key is in its values.
  static constexpr bool kOneFactor = kKeysFromMemory;
  static constexpr int kWorkSlots = 4;  // items under way or fetched
  static constexpr int kSumSlots = 4;   // rows of dQ: one more than the late stages they come with, and a power of two

  static constexpr int kKeyBytes = kKeyTile * kHeadDim;                        // one copy of K or V in E4M3
  static constexpr int kStepBytes = kQueryStep * kHeadDim;                     // of Q or dO'
  static constexpr int kScoreKeyBytes = kKeyBytes * kScoreBytes<kScaleGroup>;  // K and Q of the scores
  static constexpr int kScoreStepBytes = kStepBytes * kScoreBytes<kScaleGroup>;
  static constexpr int kExchangeBytes = kQueryStep * kKeyTile * 2;
};

/// A tile of keys of a document and the query heads that read it; `steps` < 0 ends the kernel.
struct alignas(16) Work {
  std::int32_t slot_start, token_start, length, first_key;
  std::int32_t key_head;
  std::int32_t first_step;                 // of 64 queries
  std::int32_t blocks;                     // steps per query head
  std::int32_t steps;                      // blocks * query heads of the group
  std::int32_t added_first, added_blocks;  // steps of a query head to whose dQ something has been added before this item
};

/// What scores and dP of a step are made of, but for its records.
template <class Config>
struct EarlyStage {
  std::uint8_t query[Config::kScoreStepBytes];
  std::uint8_t gradient[Config::kStepBytes];
};
/// What dK and dV take in.
template <class Config>
struct LateStage {
  std::uint8_t query16[2 * Config::kStepBytes];
  std::uint8_t gradient_transposed[Config::kStepBytes];
};

/// What the producer says about a step: to those who make its scores ...
struct alignas(16) StepInfo {
  std::int32_t query;  // position of the first query
  std::int32_t row;    // its slot, counted through all query heads
  std::int32_t flags;  // StepFlags; kCut where the edge cuts the step's 128-query tile; kEnd: no step, the kernel ends
  std::int32_t rows;   // of the document, from the first query on
};
// Beside the StepFlags: dQ's partial sums of the step have no value yet.
inline constexpr int kNothingAdded = 512;
/// ... and, with what comes from memory, to those who make its gradients.
struct alignas(16) SumInfo {
  float unit[kQueryStep];  // 2^z of the rows; FP16 partial sums only
  float group_words[4];    // the words of the first group's record, of which R counts
  std::int32_t group;      // first group of 16 rows, counted through all query heads; its complement if dQ is stored, not added
  std::int32_t rows;       // of the document, from the step's first on
  std::int32_t masked;     // whether the step's factors for dV are each key's own
};

/// NVFP4 of an item's keys, of which the scores' values are made; nothing where the scores take in what is copied.
template <class Config, bool kThere = Config::kKeysFromMemory>
struct KeyScoreCodes {};
template <class Config>
struct KeyScoreCodes<Config, true> {
  alignas(128) std::uint8_t nvfp4[Config::kKeyBytes / 2];
  alignas(16) std::uint8_t scales[Config::kKeyBytes / 16];
};

template <class Config>
struct Storage {
  alignas(1024) std::uint8_t key16[2 * Config::kKeyBytes];  // K in BF16: key_values.cuh
  alignas(
      1024) std::uint8_t exchange[Config::kRing][Config::kExchangeBytes];  // dS of steps: BF16 [key][query], as an A operand of dQ
  alignas(1024) LateStage<Config> late[Config::kLateStages];
  alignas(128) EarlyStage<Config> early[Config::kRing];
  alignas(128) std::uint8_t key[Config::kScoreKeyBytes];
  alignas(128) std::uint8_t value[Config::kKeyBytes];
  alignas(128) std::uint8_t records[Config::kRing][Config::Record::kStepBytes];
  alignas(128) KeyFactors key_factors[kKeyTile];
  SumInfo sums[Config::kSumSlots];
  StepInfo info[Config::kRing];
  Work work[Config::kWorkSlots];
  alignas(16) std::int32_t
      tile_references[Config::kRing][kKeyTile];       // R from each row of a step's 128-query tile on, where the edge cuts it
  std::int32_t references[128 * Config::kConsumers];  // each consumer thread's R of its two keys (int16 each) in a masked step

  alignas(16) std::int32_t steep[Config::kConsumers][4];  // per token: whether a slope of a consumer warp's keys is not 1

  std::uint64_t item_wanted, item_ready;     // early copies <-> scheduler: the next item's work
  std::uint64_t keys_ready;                  // copy engine and early copies (work) -> consumers: K, V and their factors of an item
  std::uint64_t keys_free;                   // consumers -> early copies
  std::uint64_t early_ready[Config::kRing];  // copy engine and early copies (info) -> consumers, late copies
  std::uint64_t early_free[Config::kRing];   // consumers, late copies (info) -> early copies
  std::uint64_t late_ready[Config::kLateStages];
  std::uint64_t late_free[Config::kLateStages];
  std::uint64_t
      exchange_ready[Config::kRing];  // consumer warps -> both consumers: dS is written, and dS of the step before has been read

  KeyScoreCodes<Config> key_codes;
};

}  // namespace flamia::sm90::ds16
