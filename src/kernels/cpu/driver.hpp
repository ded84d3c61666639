// SPDX-License-Identifier: Apache-2.0
// What the forward and the backward driver share.
#pragma once
#include <span>
#include <vector>

#include "kernels/cpu/memory.hpp"
#include "kernels/cpu/with_isa.hpp"
#include "kernels/cpu/work.hpp"
#include "quantize/encode.hpp"

namespace flamia::cpu {

/// Counts per item, so that their sum does not depend on which thread did what.
class ItemCounts {
 public:
  ItemCounts(const Probe* probe, std::int64_t items) : counts_(probe ? static_cast<std::size_t>(items) : 0) {}
  ProbeCounts* at(std::int64_t item) { return counts_.empty() ? nullptr : &counts_[static_cast<std::size_t>(item)]; }
  void add_to(Probe* probe) const {
    for (const ProbeCounts& counts : counts_) probe->counts.add(counts);
  }

 private:
  std::vector<ProbeCounts> counts_;
};

inline Status encode_at(const quantize::QuantiseInput& input, const schedule::Documents& documents, const FormPlace& place,
                        int threads, void* base) {
  auto* bytes = static_cast<std::uint8_t*>(base);
  return quantize::quantise_into(input, documents, place.form, threads, {bytes + place.codes, place.codes_bytes},
                                 {bytes + place.scales, place.scales_bytes});
}

inline Scratch scratch_of(const WorkspaceLayout& layout, void* workspace, int thread) {
  return {reinterpret_cast<float*>(static_cast<char*>(workspace) + layout.scratch +
                                   layout.scratch_bytes * static_cast<std::size_t>(thread))};
}

/// Errors of arguments that only the call shows.
Status check_call(const Problem& problem, const schedule::Documents& documents, Isa isa);

/// Zeroes the rows of tokens that belong to no document.
void clear_tail(const MutableTensorView& tensor, const schedule::Documents& documents, int heads, int dim);

}  // namespace flamia::cpu
