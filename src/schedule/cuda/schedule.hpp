// SPDX-License-Identifier: Apache-2.0
// The schedule of one packed row, made on the GPU from `cu_seqlens` on the GPU: the document table, the blocks that the quantiser
// works on, and the work lists of the forward and backward kernels, dearest item first.
//
// Nothing is copied to the host and nothing waits for it, so the launch can be captured in a CUDA graph and the lengths may change
// between two replays. What the host must know are upper bounds only: tokens of the row and entries of cu_seqlens.
//
// cu_seqlens is not trusted: every entry is clamped to [0, tokens] and then to the greatest entry before it, so documents never
// overlap and never leave the row, whatever the words hold. Totals::violations says whether anything had to be mended.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "flamia/status.hpp"
#include "kernels/cuda/sm90/layout.hpp"
#include "schedule/mask.hpp"

namespace flamia::schedule::gpu {

/// 32 consecutive tokens of a document, the unit of the quantiser. A document's blocks stand in the order of their positions.
/// After all of them follow kTailBlocks blocks of length 0, whose slots hold no token and are filled with code 0; the rest of
/// the table has length -1: nothing to do.
struct alignas(16) TokenBlock {
  std::int32_t token;     // row of q, k, v of the first token
  std::int32_t slot;      // its slot, a multiple of sm90::kSlotAlign
  std::int32_t position;  // its position in the document, a multiple of sm90::kBlock
  std::int32_t length;    // tokens of the whole document; 0 after the last one, -1 at the end of the table
};
inline constexpr int kTailBlocks = sm90::kTailSlots / sm90::kBlock;

enum Violation : std::uint32_t {
  kFirstNotZero = 1,  // cu_seqlens[0] != 0: the tokens before it belong to no document
  kDecreasing = 2,    // an entry is less than the one before it
  kOutOfRow = 4,      // an entry is negative or exceeds `tokens`
};

struct ListTotals {
  std::int32_t items;
  std::int32_t greatest_cost;  // of one item, in tiles visited
  std::int64_t total_cost;
  bool operator==(const ListTotals&) const = default;
};

/// What a kernel may want to know about the row as a whole. On the device.
struct Totals {
  std::int32_t slots;                       // used by documents; kTailSlots zero slots follow
  std::int32_t covered_begin, covered_end;  // tokens that belong to documents
  std::int32_t documents;                   // those that are not empty
  std::int32_t longest;                     // tokens of the longest one
  std::int32_t token_blocks;                // entries of the block table, the tail included
  std::uint32_t violations;
  ListTotals forward, backward;
  bool operator==(const Totals&) const = default;
};

/// Shape of a schedule: all the host knows. Tiles in tokens; a list whose tile is 0 is not built.
struct Shape {
  std::int64_t tokens = 0;     // rows of q
  std::int64_t documents = 0;  // cu_seqlens has documents + 1 entries
  MaskReach reach;
  int forward_tile = 128;  // queries per item of the forward list; it visits key tiles of kTile
  int backward_tile = 0;   // keys per item of the backward list (128); it visits query tiles of backward_visit
  int backward_visit = 64;
  /// Documents of at most so many backward items keep them together in the list, by the cost of their first one: what the items read is then still
  /// in the L2 cache. Longer documents' items go by their own cost, dearest first, so that the last ones to end are small.
  int backward_together = 16;
};

/// Words for kernels that claim items one by one; the launch sets them to zero.
inline constexpr int kCounters = 32;

/// The finished schedule: pointers into the caller's workspace.
struct View {
  const sm90::Document* documents;  // [shape.documents]
  const TokenBlock*
      blocks;  // [block_capacity], by position, then document: neighbours, of different documents, wait less for prefix maxima
  const sm90::WorkItem* forward;  // [Totals::forward.items]
  const sm90::WorkItem* backward;
  const Totals* totals;
  std::int32_t* counters;  // [kCounters]
  std::int64_t block_capacity;
  std::int64_t forward_capacity, backward_capacity;
};

/// Number of tiles that the item visits under the mask: key tiles of `visit` keys for a tile of queries (`keys` false), query
/// tiles for a tile of keys. `first` = position of the tile's first token, inside the document.
FLAMIA_FN constexpr std::int32_t item_cost(MaskReach reach, bool keys, int tile, int visit, std::int64_t first,
                                           std::int64_t length) {
  const std::int64_t last = (first + tile < length ? first + tile : length) - 1;
  const Interval low = keys ? seeing_queries(reach, first, length) : visible_keys(reach, first, length);
  const Interval high = keys ? seeing_queries(reach, last, length) : visible_keys(reach, last, length);
  return static_cast<std::int32_t>((high.end + visit - 1) / visit - low.begin / visit);
}

/// Says what is wrong with a shape: negative sizes, tiles that are no multiple of 16, more slots than 32 bits count.
Status check(const Shape& shape);

/// Bytes of the workspace of a checked shape, aligned to 256.
std::size_t workspace_bytes(const Shape& shape);

/// Where the schedule lies in a workspace.
View view(const Shape& shape, void* workspace);

/// Builds it. cu_seqlens: int32, device, shape.documents + 1 entries. Equal lengths give an equal schedule, bit for bit.
Status launch(const Shape& shape, const std::int32_t* cu_seqlens, void* workspace, cudaStream_t stream);

}  // namespace flamia::schedule::gpu
