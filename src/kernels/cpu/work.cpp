// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/work.hpp"

namespace flamia::cpu {

WorkTable::WorkTable(const schedule::Documents& documents, const BlockSizes& sizes, void* memory)
    : table_(static_cast<std::int64_t*>(memory)), stride_(2 + sizes.count), ranges_(documents.ranges().data()) {
  std::int64_t blocks[BlockSizes::kMost] = {};
  std::int64_t index = 0;
  for (const schedule::DocumentRange& range : documents.ranges()) {
    if (range.length > 0) {
      std::int64_t* out = entry(documents_++);
      out[0] = tiles_;
      out[1] = index;
      for (int i = 0; i < sizes.count; ++i) {
        out[2 + i] = blocks[i];
        blocks[i] += (range.length + sizes.rows[i] - 1) / sizes.rows[i];
      }
      tiles_ += (range.length + kTile - 1) / kTile;
    }
    ++index;
  }
}

Item WorkTable::document(std::int64_t index, int head) const {
  const std::int64_t* found = entry(index);
  const schedule::DocumentRange& range = ranges_[found[1]];
  return {{range.start, range.length, found + 2}, 0, head};
}

Item WorkTable::tile(std::int64_t index, int head) const {
  std::int64_t low = 0, high = documents_;  // the last document whose first tile is not after `index`
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (entry(middle)[0] <= index ? low : high) = middle;
  }
  Item item = document(low, head);
  item.tile = index - entry(low)[0];
  return item;
}

}  // namespace flamia::cpu
