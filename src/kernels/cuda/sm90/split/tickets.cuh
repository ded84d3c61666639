// SPDX-License-Identifier: Apache-2.0
// What a block works on next: ticket -> item -> document, three trips to memory. The copying thread begins them some steps before it needs the
// answer, one trip a step, so that each answer is there when the next trip begins.
#pragma once
#include <cstdint>

#include "../backward/work.hpp"

namespace flamia::sm90::split {

using namespace backward;

/// The trips begin this many steps before an item's last copy: a ticket held for long is work that another block could have begun.
inline constexpr int kStepsAhead = 4;

/// A tile of 128 tokens of one document and the head it is worked on for; head < 0: there is no more work.
struct Assignment {
  Document document;
  std::int32_t first;
  std::int32_t head;
};

/// kOneBlock: documents of at most kOneBlockTokens tokens are one assignment after the other, their last tile first.
template <bool kOneBlock = false>
class Tickets {
 public:
  /// `heads` is the number of heads that the kernel enumerates, `heads_per_group` those worked on together.
  __device__ __forceinline__ Tickets(const BackwardParams& params, int heads, int heads_per_group)
      : params_(params),
        items_(static_cast<std::uint32_t>(*params.item_count)),
        heads_(heads),
        heads_per_group_(heads_per_group),
        ticket_(blockIdx.x) {}

  /// One more trip, if any is left.
  __device__ __forceinline__ void fetch() {
    if (progress_ == 0) {
      ticket_ = gridDim.x + static_cast<std::uint32_t>(atomicAdd(params_.counter, 1));
      progress_ = 1;
    } else if (progress_ == 1) {
      if (ticket_ >= items_ * heads_) {
        next_.head = -1;
        progress_ = 3;
        return;
      }
      const Ticket ticket = decode_ticket(ticket_, items_, heads_, heads_per_group_);
      item_ = params_.items[ticket.item];
      next_.head = ticket.head;
      progress_ = 2;
    } else if (progress_ == 2) {
      next_.document = params_.documents[item_.document];
      next_.first = item_.first;
      progress_ = 3;
      if (!kOneBlock || next_.document.length > kOneBlockTokens || next_.document.length <= kKeyTile) return;
      static_assert(kOneBlockTokens == 2 * kKeyTile);
      if (item_.first == 0)
        next_.first = kKeyTile;
      else
        progress_ = 0;  // it comes with the document's first tile
    }
  }

  __device__ __forceinline__ Assignment take() {
    while (progress_ != 3) fetch();
    progress_ = 0;
    const Assignment taken = next_;
    if (kOneBlock && taken.head >= 0 && taken.document.length <= kOneBlockTokens && taken.first > 0) {
      next_.first = 0;
      progress_ = 3;
    }
    return taken;
  }

  /// The last block to run out of tickets leaves the counter as it found it.
  __device__ __forceinline__ void finish() const {
    __threadfence();
    if (atomicAdd(params_.counter + 1, 1) == static_cast<int>(gridDim.x) - 1) {
      params_.counter[0] = 0;
      params_.counter[1] = 0;
    }
  }

 private:
  const BackwardParams& params_;
  std::uint32_t items_, heads_, heads_per_group_;
  std::uint32_t ticket_;  // the first one is the block's own number
  int progress_ = 1;      // 0 nothing, 1 ticket, 2 item, 3 ready
  WorkItem item_{};
  Assignment next_{};
};

/// Position in a ring of `kSlots` buffers and the parity of its current round.
template <int kSlots>
struct Ring {
  std::uint32_t slot = 0, parity = 0;

  __device__ __forceinline__ Ring next() const { return slot + 1 == kSlots ? Ring{0, parity ^ 1} : Ring{slot + 1, parity}; }
};

}  // namespace flamia::sm90::split
