// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/driver.hpp"

#include <string>

#include "kernels/cpu/dense.hpp"

namespace flamia::cpu {

Status check_call(const Problem& problem, const schedule::Documents& documents, Isa isa) {
  if (documents.tokens() != problem.tokens)
    return Status::invalid("documents were made for " + std::to_string(documents.tokens()) + " tokens, the problem has " +
                           std::to_string(problem.tokens));
  if (static_cast<std::int64_t>(documents.ranges().size()) > problem.documents)
    return Status::invalid("cu_seqlens has " + std::to_string(documents.ranges().size()) +
                           " documents, the problem was planned for at most " + std::to_string(problem.documents));
  if (!tile_code(isa)) return Status::unsupported("this machine lacks the instruction set that was asked for");
  return {};
}

void clear_tail(const MutableTensorView& tensor, const schedule::Documents& documents, int heads, int dim) {
  float zeros[256] = {};
  for (std::int64_t token = documents.covered(); token < documents.tokens(); ++token)
    for (int head = 0; head < heads; ++head) write_row(tensor, token, head, heads, dim, zeros);
}

}  // namespace flamia::cpu
