// SPDX-License-Identifier: Apache-2.0
// The tiles of all documents, numbered, in memory that the caller gives: 131,072 documents need no allocation.
#pragma once
#include <omp.h>

#include <cstdint>

#include "kernels/cpu/call.hpp"
#include "kernels/cpu/memory.hpp"
#include "schedule/documents.hpp"

namespace flamia::cpu {

class WorkTable {
 public:
  /// int64 entries for that many documents and block sizes.
  static std::int64_t entries(std::int64_t documents, int sizes) { return (documents + 1) * (2 + sizes); }

  /// Fills `memory`. Empty documents have no tiles.
  WorkTable(const schedule::Documents& documents, const BlockSizes& sizes, void* memory);

  std::int64_t tiles() const { return tiles_; }          // of 128 tokens, all documents
  std::int64_t documents() const { return documents_; }  // not empty
  /// Tile `index`, 0 ... tiles() - 1, ascending by document and position.
  Item tile(std::int64_t index, int head) const;
  /// Document `index`, 0 ... documents() - 1.
  Item document(std::int64_t index, int head) const;

 private:
  std::int64_t* entry(std::int64_t document) const { return table_ + document * stride_; }
  std::int64_t* table_;  // per document that is not empty: tiles before it, index among all documents, blocks before it by size
  std::int64_t stride_;
  std::int64_t documents_ = 0, tiles_ = 0;
  const schedule::DocumentRange* ranges_;
};

/// work(item, number of the item, thread) for every tile of every head on `threads` threads. Items are numbered by tile, then head; they
/// are taken up one by one from the end that a causal mask makes long: `descending` for query tiles, ascending for key tiles.
template <class Work>
void for_each_tile(const WorkTable& table, int heads, int threads, bool descending, Work work) {
  const std::int64_t items = table.tiles() * heads;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (std::int64_t i = 0; i < items; ++i) {
    const std::int64_t number = descending ? items - 1 - i : i;
    work(table.tile(number / heads, static_cast<int>(number % heads)), number, omp_get_thread_num());
  }
}

/// The same for every document that is not empty.
template <class Work>
void for_each_document(const WorkTable& table, int heads, int threads, Work work) {
  const std::int64_t items = table.documents() * heads;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (std::int64_t i = 0; i < items; ++i) work(table.document(i / heads, static_cast<int>(i % heads)), omp_get_thread_num());
}

}  // namespace flamia::cpu
