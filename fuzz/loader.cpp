// SPDX-License-Identifier: Apache-2.0
#include "inputs.hpp"
#include "targets.hpp"

namespace flamia::fuzz {
namespace {

bool names_the_file(const Status& status) { return status.message().find("fuzzed") != std::string::npos; }

/// Everything a reader may rely on once the header was accepted.
void check_layout(const cli::SafetensorsFile& file, std::size_t size) {
  std::uint64_t end = 0;
  for (const cli::TensorInfo& tensor : file.tensors()) {
    FLAMIA_FUZZ_REQUIRE(tensor.begin == end && tensor.end >= tensor.begin && tensor.end <= size);
    std::uint64_t bits = cli::bits_of_dtype(tensor.dtype);
    FLAMIA_FUZZ_REQUIRE(bits > 0);
    for (const std::uint64_t dimension : tensor.shape) bits = dimension == 0 ? 0 : bits * dimension;
    bool empty = false;
    for (const std::uint64_t dimension : tensor.shape) empty = empty || dimension == 0;
    FLAMIA_FUZZ_REQUIRE((empty ? 0 : bits) == 8 * tensor.bytes());
    std::vector<std::uint8_t> read(tensor.bytes());
    FLAMIA_FUZZ_REQUIRE(file.read(tensor, read.data()).ok());
    FLAMIA_FUZZ_REQUIRE(file.find(tensor.name) == &tensor);
    end = tensor.end;
  }
}

void check_inputs(const cli::Inputs& in) {
  const auto elements = [&](const cli::HostTensor& t) { return t.bytes.size() / size_of(t.dtype); };
  const auto expected = [&](int heads) { return static_cast<std::size_t>(in.problem.tokens * heads * in.problem.head_dim); };
  FLAMIA_FUZZ_REQUIRE(elements(in.q) == expected(in.problem.query_heads));
  FLAMIA_FUZZ_REQUIRE(elements(in.k) == expected(in.problem.key_heads) && elements(in.v) == expected(in.problem.key_heads));
  FLAMIA_FUZZ_REQUIRE(!in.d_o || elements(*in.d_o) == expected(in.problem.query_heads));
  FLAMIA_FUZZ_REQUIRE(in.cu_seqlens.size() == static_cast<std::size_t>(in.problem.documents) + 1);
  FLAMIA_FUZZ_REQUIRE(in.documents.covered() <= in.problem.tokens);
}

}  // namespace

Verdict loader(const std::uint8_t* bytes, std::size_t size) {
  cli::SafetensorsFile file;
  const Status opened = cli::SafetensorsFile::from_bytes("fuzzed", {bytes, bytes + size}, &file);
  FLAMIA_FUZZ_REQUIRE(opened.ok() || (opened.code() == StatusCode::invalid_argument && names_the_file(opened)));
  if (!opened.ok()) return Verdict::rejected;
  check_layout(file, size);
  cli::Inputs inputs;
  const Status loaded = cli::load_inputs(file, &inputs);
  FLAMIA_FUZZ_REQUIRE(loaded.ok() || (loaded.code() == StatusCode::invalid_argument && names_the_file(loaded)));
  if (!loaded.ok()) return Verdict::rejected;
  check_inputs(inputs);
  return Verdict::accepted;
}

}  // namespace flamia::fuzz
