// SPDX-License-Identifier: Apache-2.0
#include "quantize/encode.hpp"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "numerics/hadamard.hpp"
#include "quantize/scale.hpp"

namespace flamia::quantize {
namespace {

constexpr std::int64_t kChunk = 32;  // rows that a thread holds as FP32

/// A block of consecutive tokens of one document.
struct Block {
  std::int64_t index;  // counted over all documents
  std::int64_t first;  // token of the packed row
  std::int64_t rows;
  bool opens_document;
  std::int64_t position;    // of the first token in its document
  std::int64_t aux_before;  // blocks of means or first-level scales in the documents before
};

/// Walks the blocks of all documents in packed order without storing them.
class BlockWalk {
 public:
  BlockWalk(std::span<const schedule::DocumentRange> documents, std::int64_t rows, std::int64_t start, std::int64_t aux_rows)
      : documents_(documents), rows_(rows), aux_rows_(aux_rows) {
    block_.index = start;
    for (; document_ < documents_.size(); leave_document(), start -= count_) {
      count_ = (documents_[document_].length + rows_ - 1) / rows_;
      if (start < count_) break;
    }
    inside_ = start;
    place();
  }
  const Block& block() const { return block_; }
  void next() {
    ++block_.index;
    ++inside_;
    while (document_ < documents_.size() && inside_ >= count_) {
      inside_ = 0;
      leave_document();
      if (document_ < documents_.size()) count_ = (documents_[document_].length + rows_ - 1) / rows_;
    }
    place();
  }

 private:
  void leave_document() { block_.aux_before += (documents_[document_++].length + aux_rows_ - 1) / aux_rows_; }
  void place() {
    if (document_ >= documents_.size()) return;
    const schedule::DocumentRange& range = documents_[document_];
    block_.first = range.start + inside_ * rows_;
    block_.rows = std::min(rows_, range.length - inside_ * rows_);
    block_.opens_document = inside_ == 0;
    block_.position = inside_ * rows_;
  }
  std::span<const schedule::DocumentRange> documents_;
  std::int64_t rows_, aux_rows_;
  std::size_t document_ = 0;
  std::int64_t count_ = 0;   // blocks of the current document
  std::int64_t inside_ = 0;  // block inside it
  Block block_{};
};

/// What one thread works with.
struct Workspace {
  Workspace(int dim, std::int64_t groups)
      : values(static_cast<std::size_t>(kChunk * dim)),
        scratch(static_cast<std::size_t>(dim)),
        magnitudes(static_cast<std::size_t>(dim)),
        group_magnitudes(static_cast<std::size_t>(groups)),
        stored{std::vector<std::uint32_t>(static_cast<std::size_t>(groups)),
               std::vector<std::uint32_t>(static_cast<std::size_t>(groups))},
        errors{std::vector<float>(static_cast<std::size_t>(groups)), std::vector<float>(static_cast<std::size_t>(groups))},
        factor(static_cast<std::size_t>(dim)),
        keep(static_cast<std::size_t>(dim)) {}
  std::vector<float> values;  // [rows of the chunk, dim]
  std::vector<float> scratch;
  std::vector<std::uint32_t> magnitudes;        // of each channel over the block's rows
  std::vector<std::uint32_t> group_magnitudes;  // of each group of channels
  std::vector<std::uint32_t> stored[2];         // scales of the block's groups; [1]: the candidate of amax_or_smaller
  std::vector<float> errors[2];                 // their squared errors in units of the scale
  std::vector<float> factor;                    // of each channel: 2^-e, the divisor or its inverse
  std::vector<std::uint8_t> keep;               // 0 where the scale is zero
};

class Pass {
 public:
  Pass(const QuantiseInput& input, const schedule::Documents& documents, const Quantisation& form, int threads, std::uint8_t* codes,
       std::uint8_t* scales, const RowKernels& kernels)
      : in_(input),
        documents_(documents),
        form_(form),
        threads_(threads),
        codes_(codes),
        scales_(scales),
        kernels_(kernels),
        groups_(column_groups(form.group, input.dim)),
        width_(form.group.kind != Group::Kind::blocks || form.group.columns == 0 ? input.dim : form.group.columns),
        two_level_(form.rule == ScaleRule::two_level),
        aux_rows_(two_level_ ? kFirstLevelRows : input.subtract_rows),
        first_levels_(two_level_ ? scales + group_scale_bytes(form, documents, input.heads, input.dim) : nullptr),
        by_factor_(form.scale == ScaleType::ue8m0),
        by_inverse_(form.rule == ScaleRule::amax_or_smaller),
        row_bytes_(row_bytes(form.element, input.dim)),
        element_bytes_(static_cast<std::int64_t>(flamia::size_of(input.tensor.dtype))) {
    head_stride_ = input.tensor.head_stride ? input.tensor.head_stride : input.dim;
    token_stride_ = input.tensor.token_stride ? input.tensor.token_stride : std::int64_t{input.heads} * input.dim;
  }

  void run() {
    const bool blocks = form_.group.kind == Group::Kind::blocks;
    const std::int64_t rows = blocks ? rows_of(form_.group) : kChunk;
    const auto both = [this](const Block& b, int head, Workspace& w) { measure(b, head, w), encode(b, head, w, b.rows <= kChunk); };
    const auto only_encode = [this](const Block& b, int head, Workspace& w) { encode(b, head, w, false); };
    if (two_level_) for_each(kFirstLevelRows, [this](const Block& b, int head, Workspace& w) { measure_first_level(b, head, w); });
    if (form_.element == Element::bf16) {
      for_each(rows, [this](const Block& b, int head, Workspace& w) { encode_plain(b, head, w); });
    } else if (!blocks) {
      measure_whole();
      for_each(rows, only_encode);
    } else if (form_.sticky && (in_.heads % threads_ == 0 || in_.heads >= 4 * threads_)) {
      encode_sticky_by_heads(rows);
    } else if (form_.sticky) {
      for_each(rows, [this](const Block& b, int head, Workspace& w) { measure(b, head, w); });
      make_sticky(rows);
      for_each(rows, only_encode);
    } else {
      for_each(rows, both);
    }
    clear_tail();
  }

 private:
  /// Calls work(block, head, workspace) for every block and head; consecutive units go to one thread.
  template <class Work>
  void for_each(std::int64_t rows, Work work) {
    const std::int64_t units = documents_.blocks(rows) * in_.heads;
#pragma omp parallel num_threads(threads_)
    {
      const std::int64_t share = omp_get_num_threads(), self = omp_get_thread_num();
      const std::int64_t begin = units * self / share, end = units * (self + 1) / share;
      if (begin < end) {
        Workspace workspace(in_.dim, groups_);
        BlockWalk walk(documents_.ranges(), rows, begin / in_.heads, aux_rows_);
        int head = static_cast<int>(begin % in_.heads);
        for (std::int64_t unit = begin; unit < end; ++unit) {
          work(walk.block(), head, workspace);
          if (++head == in_.heads) head = 0, walk.next();
        }
      }
    }
  }

  /// Rows `begin` ... of the block.
  const float* load(const Block& block, std::int64_t begin, std::int64_t rows, int head, Workspace& w) const {
    const std::int64_t token = block.first + begin;
    const auto* base = static_cast<const char*>(in_.tensor.data);
    for (std::int64_t r = 0; r < rows; ++r) {
      float* out = w.values.data() + r * in_.dim;
      const float divisor = in_.divide_by ? in_.divide_by[head * documents_.tokens() + token + r] : 1.f;
      if (divisor == 0.f || divisor == numerics::infinity())
        std::fill(out, out + in_.dim, 0.f);  // a row that sees no key has no gradient
      else
        kernels_.load(base + ((token + r) * token_stride_ + head * head_stride_) * element_bytes_, in_.tensor.dtype, in_.dim,
                      in_.divide_by != nullptr, divisor, in_.rotate, out);
      if (in_.subtract) subtract_mean(block, begin + r, head, out);
    }
    return w.values.data();
  }

  void subtract_mean(const Block& block, std::int64_t row, int head, float* x) const {
    const std::int64_t mean = block.aux_before + (block.position + row) / in_.subtract_rows;
    const float* values = in_.subtract + (mean * in_.heads + head) * in_.dim;
    for (int c = 0; c < in_.dim; ++c) x[c] = numerics::add(x[c], -values[c]);
  }

  /// Greatest magnitudes of the block's channels and groups of channels; leaves its last chunk in w.values. Returns the greatest of
  /// all.
  std::uint32_t find_magnitudes(const Block& block, int head, Workspace& w) const {
    std::fill(w.magnitudes.begin(), w.magnitudes.end(), 0u);
    for (std::int64_t r = 0; r < block.rows; r += kChunk) {
      const std::int64_t rows = std::min(kChunk, block.rows - r);
      kernels_.magnitudes(load(block, r, rows, head, w), rows, in_.dim, w.magnitudes.data());
    }
    kernels_.group_magnitudes(w.magnitudes.data(), in_.dim, width_, w.group_magnitudes.data());
    return *std::max_element(w.group_magnitudes.begin(), w.group_magnitudes.end());
  }

  /// The first of two levels; the block is a tile.
  void measure_first_level(const Block& block, int head, Workspace& w) {
    std::uint32_t greatest = 0;
    for (std::int64_t r = 0; r < block.rows; ++r) {
      std::fill(w.magnitudes.begin(), w.magnitudes.end(), 0u);
      kernels_.magnitudes(load(block, r, 1, head, w), 1, in_.dim, w.magnitudes.data());
      const std::uint32_t row = *std::max_element(w.magnitudes.begin(), w.magnitudes.end());
      if (row < kNonFinite) greatest = std::max(greatest, row);
    }
    const float first = first_level(numerics::float_of(greatest), largest_of(form_.element));
    write_scale(ScaleType::f32, first_levels_, block.index * in_.heads + head, numerics::bits_of(first));
  }

  /// The form with the tensor scale that holds for the block.
  Quantisation form_of(const Block& block, int head) const {
    Quantisation form = form_;
    if (two_level_) {
      const std::int64_t tile = block.aux_before + block.position / kFirstLevelRows;
      form.tensor_scale = numerics::float_of(read_scale(ScaleType::f32, first_levels_, tile * in_.heads + head));
    }
    return form;
  }

  /// The block's scales, without its predecessors.
  void measure(const Block& block, int head, Workspace& w) {
    const std::int64_t first = slot(block, head);
    if (find_magnitudes(block, head, w) >= kNonFinite) {
      for (std::int64_t g = 0; g < groups_; ++g) write_scale(form_.scale, scales_, first + g, flagged_scale(form_.scale));
      return;
    }
    const std::size_t groups = w.group_magnitudes.size();
    const Quantisation form = form_of(block, head);
    for (std::size_t g = 0; g < groups; ++g) w.stored[0][g] = stored_scale(form, w.group_magnitudes[g]);
    if (form_.rule == ScaleRule::amax_or_smaller) {  // blocks of one row: w.values is that row
      for (std::size_t g = 0; g < groups; ++g)
        w.stored[1][g] = numerics::nvfp4_scale(numerics::float_of(w.group_magnitudes[g]), 4.f, form_.tensor_scale);
      for (int candidate = 0; candidate < 2; ++candidate) {
        spread(form, w.stored[candidate].data(), w);
        kernels_.inverse_errors(w.values.data(), w.factor.data(), in_.dim, width_, w.scratch.data(), w.errors[candidate].data());
      }
      for (std::size_t g = 0; g < groups; ++g) {
        const float six = scale_value(form, w.stored[0][g]), four = scale_value(form, w.stored[1][g]);
        const bool smaller =
            numerics::mul(numerics::mul(four, four), w.errors[1][g]) < numerics::mul(numerics::mul(six, six), w.errors[0][g]);
        if (six == 0.f || smaller) w.stored[0][g] = w.stored[1][g];
      }
    }
    for (std::size_t g = 0; g < groups; ++g)
      write_scale(form_.scale, scales_, first + static_cast<std::int64_t>(g), w.stored[0][g]);
  }

  /// w.factor and w.keep of every channel, from the scales of the groups.
  void spread(const Quantisation& form, const std::uint32_t* stored, Workspace& w) const {
    for (std::int64_t g = 0; g < groups_; ++g) {
      const float value = scale_value(form, stored[g]);
      const float factor = by_factor_     ? numerics::pow2(-numerics::decode_ue8m0(static_cast<std::uint8_t>(stored[g])))
                           : value == 0.f ? 1.f
                           : by_inverse_  ? 1.f / value
                                          : value;
      const std::int64_t begin = g * width_, n = std::min<std::int64_t>(width_, in_.dim - begin);
      std::fill_n(w.factor.begin() + begin, n, factor);
      if (!by_factor_) std::fill_n(w.keep.begin() + begin, n, static_cast<std::uint8_t>(value == 0.f ? 0 : 0xff));
    }
  }

  /// Scales of the groups `tensor` and `head`.
  void measure_whole() {
    const bool per_head = form_.group.kind == Group::Kind::head;
    std::vector<std::uint32_t> greatest(per_head ? static_cast<std::size_t>(in_.heads) : 1, 0u);
    for_each(kChunk, [&](const Block& block, int head, Workspace& w) {
      const std::uint32_t m = find_magnitudes(block, head, w);
      std::atomic_ref<std::uint32_t> shared(greatest[per_head ? static_cast<std::size_t>(head) : 0]);
      for (std::uint32_t seen = shared.load(); seen < m && !shared.compare_exchange_weak(seen, m);) {
      }
    });
    for (std::size_t i = 0; i < greatest.size(); ++i)
      write_scale(form_.scale, scales_, static_cast<std::int64_t>(i), stored_scale(form_, greatest[i]));
  }

  /// What the first group of a document, not flagged, adds to the maximum.
  std::uint32_t first_of_sticky(std::uint32_t own) const {
    return form_.headroom == 0 ? own : numerics::with_headroom(own, form_.headroom);
  }

  /// Sticky scales where there are heads enough for the threads: one pass, every thread walks all documents with some of the heads.
  void encode_sticky_by_heads(std::int64_t rows) {
    const std::uint32_t flag = flagged_scale(form_.scale);
    const std::int64_t blocks = documents_.blocks(rows);
#pragma omp parallel num_threads(threads_)
    {
      const int share = omp_get_num_threads(), self = omp_get_thread_num();
      const int begin = static_cast<int>(std::int64_t{in_.heads} * self / share),
                end = static_cast<int>(std::int64_t{in_.heads} * (self + 1) / share);
      Workspace workspace(in_.dim, groups_);
      std::vector<std::uint32_t> greatest(static_cast<std::size_t>((end - begin) * groups_));
      BlockWalk walk(documents_.ranges(), rows, 0, aux_rows_);
      for (std::int64_t i = 0; i < blocks; ++i, walk.next()) {
        const Block& block = walk.block();
        if (block.opens_document) std::fill(greatest.begin(), greatest.end(), 0u);
        for (int head = begin; head < end; ++head) {
          measure(block, head, workspace);
          for (std::int64_t g = 0; g < groups_; ++g) {
            const std::uint32_t own = read_scale(form_.scale, scales_, slot(block, head) + g);
            std::uint32_t& seen = greatest[static_cast<std::size_t>((head - begin) * groups_ + g)];
            if (own == flag) continue;
            seen = std::max(seen, block.opens_document ? first_of_sticky(own) : own);
            write_scale(form_.scale, scales_, slot(block, head) + g, seen);
          }
          encode(block, head, workspace, block.rows <= kChunk);
        }
      }
    }
  }

  /// Prefix maximum over each document's blocks. Stored scales of one type are ordered as their bits are.
  void make_sticky(std::int64_t rows) {
    const std::int64_t row = in_.heads * groups_;
    const std::uint32_t flag = flagged_scale(form_.scale);
#pragma omp parallel for num_threads(threads_)
    for (std::int64_t column = 0; column < row; ++column) {
      std::int64_t i = column;
      for (const schedule::DocumentRange& range : documents_.ranges()) {
        std::uint32_t greatest = 0;
        for (std::int64_t left = range.length; left > 0; left -= rows, i += row) {
          const std::uint32_t own = read_scale(form_.scale, scales_, i);
          if (own == flag) continue;
          greatest = std::max(greatest, left == range.length ? first_of_sticky(own) : own);
          write_scale(form_.scale, scales_, i, greatest);
        }
      }
    }
  }

  std::int64_t slot(const Block& block, int head) const {
    switch (form_.group.kind) {
      case Group::Kind::head:
        return head;
      case Group::Kind::blocks:
        return (block.index * in_.heads + head) * groups_;
      default:
        return 0;
    }
  }

  std::uint8_t* codes_of(std::int64_t token, int head) const { return codes_ + (token * in_.heads + head) * row_bytes_; }

  /// Encodes the block with the scales stored for it. `loaded`: w.values holds its rows.
  void encode(const Block& block, int head, Workspace& w, bool loaded) {
    const std::int64_t scale = slot(block, head);
    if (read_scale(form_.scale, scales_, scale) == flagged_scale(form_.scale)) {
      for (std::int64_t r = 0; r < block.rows; ++r) std::fill_n(codes_of(block.first + r, head), row_bytes_, std::uint8_t{0});
      return;
    }
    for (std::int64_t g = 0; g < groups_; ++g)
      w.stored[0][static_cast<std::size_t>(g)] = read_scale(form_.scale, scales_, scale + g);
    spread(form_of(block, head), w.stored[0].data(), w);
    for (std::int64_t first = 0; first < block.rows; first += kChunk) {
      const std::int64_t rows = std::min(kChunk, block.rows - first);
      const float* x = loaded ? w.values.data() : load(block, first, rows, head, w);
      for (std::int64_t r = 0; r < rows; ++r, x += in_.dim) {
        std::uint8_t* out = codes_of(block.first + first + r, head);
        if (by_factor_)
          kernels_.encode_by_factor(form_.element, x, w.factor.data(), in_.dim, out);
        else if (by_inverse_)
          kernels_.encode_by_inverse(x, w.factor.data(), w.keep.data(), in_.dim, out);
        else
          kernels_.encode_by_division(form_.element, x, w.factor.data(), w.keep.data(), in_.dim, out);
      }
    }
  }

  void encode_plain(const Block& block, int head, Workspace& w) {
    const float* x = load(block, 0, block.rows, head, w);
    for (std::int64_t r = 0; r < block.rows; ++r) kernels_.encode_bf16(x + r * in_.dim, in_.dim, codes_of(block.first + r, head));
  }

  /// Tokens after the last document.
  void clear_tail() {
    const std::int64_t rest = documents_.tokens() - documents_.covered();
    std::fill_n(codes_of(documents_.covered(), 0), rest * in_.heads * row_bytes_, std::uint8_t{0});
    if (form_.group.kind == Group::Kind::blocks && rows_of(form_.group) == 1)
      std::fill_n(scales_ + documents_.covered() * in_.heads * groups_ * size_of(form_.scale),
                  rest * in_.heads * groups_ * size_of(form_.scale), std::uint8_t{0});
  }

  const QuantiseInput& in_;
  const schedule::Documents& documents_;
  const Quantisation& form_;
  int threads_;
  std::uint8_t* codes_;
  std::uint8_t* scales_;
  const RowKernels& kernels_;
  std::int64_t groups_;  // scales of a block and head
  int width_;            // channels of a scale
  bool two_level_;
  std::int64_t aux_rows_;       // tokens of the blocks that Block::aux_before counts: of means or of first levels
  std::uint8_t* first_levels_;  // or null
  bool by_factor_;              // powers of two multiply (2^-e: normal for e in -127 ... 126), other scales divide
  bool by_inverse_;             // or multiply by the inverse (rule amax_or_smaller)
  std::int64_t row_bytes_;
  std::int64_t element_bytes_;
  std::int64_t head_stride_ = 0;
  std::int64_t token_stride_ = 0;
};

Status check_input(const QuantiseInput& input, const schedule::Documents& documents, const Quantisation& form) {
  if (input.heads <= 0) return Status::invalid("heads = " + std::to_string(input.heads) + " must be positive");
  if (Status status = check_form(form, input.dim); !status.ok()) return status;
  if (input.dim <= 0) return Status::invalid("dim = " + std::to_string(input.dim) + " must be positive");
  if (input.rotate && !numerics::rotation_supported(input.dim))
    return Status::invalid("rotate: dim = " + std::to_string(input.dim) + " but the rotation is defined for 64 and 128 channels");
  if (input.tensor.data == nullptr && documents.tokens() > 0) return Status::invalid("tensor: data is null");
  return {};
}

}  // namespace

Status quantise_into(const QuantiseInput& input, const schedule::Documents& documents, const Quantisation& form, int threads,
                     std::span<std::uint8_t> codes, std::span<std::uint8_t> scales, const RowKernels& kernels) {
  if (Status status = check_input(input, documents, form); !status.ok()) return status;
  if (threads < 0) return Status::invalid("threads = " + std::to_string(threads) + "; use 0 for all cores or a positive number");
  const auto too_small = [](const char* name, std::size_t given, std::int64_t needed) {
    return Status::invalid(std::string(name) + " holds " + std::to_string(given) + " bytes but the form needs " +
                           std::to_string(needed));
  };
  const std::int64_t code_size = codes_bytes(form, documents.tokens(), input.heads, input.dim);
  const std::int64_t scale_size = scale_bytes(form, documents, input.heads, input.dim);
  if (std::cmp_less(codes.size(), code_size)) return too_small("codes", codes.size(), code_size);
  if (std::cmp_less(scales.size(), scale_size)) return too_small("scales", scales.size(), scale_size);
  Pass(input, documents, form, threads ? threads : omp_get_max_threads(), codes.data(), scales.data(), kernels).run();
  return {};
}

Status quantise_into(const QuantiseInput& input, const schedule::Documents& documents, const Quantisation& form, int threads,
                     std::span<std::uint8_t> codes, std::span<std::uint8_t> scales) {
  return quantise_into(input, documents, form, threads, codes, scales, row_kernels());
}

}  // namespace flamia::quantize
