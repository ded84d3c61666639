// SPDX-License-Identifier: Apache-2.0
// The backward kernel's index arithmetic, executed on the host: fragments, layouts, the exchange of dS, masks and work ranges of one step
// with exact small integers, against plain loops. Needs no GPU. Exit status 0: all equal.
//
// The instructions are emulated from their definition (PTX ISA: wgmma fragments and core matrices, stmatrix, ldmatrix); everything else is
// the kernel's own constexpr functions. `--break` corrupts one map at a time and must be noticed every time.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/sm90/backward/gradients.cuh"
#include "kernels/cuda/sm90/backward/masks.cuh"
#include "kernels/cuda/sm90/backward/query_gradient.cuh"
#include "kernels/cuda/sm90/backward/work.hpp"
#include "kernels/cuda/sm90/split/query_tile.cuh"

namespace {

using namespace flamia::sm90;
using namespace flamia::sm90::backward;

int broken = 0;  // which map to corrupt

using Bytes = std::vector<std::int8_t>;
using Fragment = std::vector<int>;  // [128 threads][kScores]

int element(const Bytes& memory, std::int64_t base, flamia::ptx::OperandLayout layout, int row, int k) {
  const std::int64_t at = base + row / 8 * static_cast<std::int64_t>(layout.row_stride) +
                          k / 16 * static_cast<std::int64_t>(layout.k_stride) + row % 8 * 16 + k % 16;
  return memory.at(static_cast<std::size_t>(at));
}

/// D = A B with both operands in memory; k-step s starts `step` bytes after step s - 1.
Fragment multiply_ss(const Bytes& a, std::int64_t a0, flamia::ptx::OperandLayout la, int a_step, const Bytes& b, std::int64_t b0,
                     flamia::ptx::OperandLayout lb, int b_step, int steps) {
  Fragment d(128 * kScores);
  for (int t = 0; t < 128; ++t)
    for (int i = 0; i < kScores; ++i) {
      int sum = 0;
      for (int s = 0; s < steps; ++s)
        for (int k = 0; k < 32; ++k)
          sum += element(a, a0 + s * a_step, la, row_of(t / 32, t % 32, i), k) *
                 element(b, b0 + s * b_step, lb, column_of(t % 32, i), k);
      d[t * kScores + i] = sum;
    }
  return d;
}

/// D = A B with A in registers: words[thread][4 * steps] of four bytes.
Fragment multiply_rs(const std::vector<std::int8_t>& words, int words_per_thread, const Bytes& b, std::int64_t b0,
                     flamia::ptx::OperandLayout lb, int b_step, int steps) {
  std::vector<int> a(64 * 32 * steps);
  for (int t = 0; t < 128; ++t)
    for (int s = 0; s < steps; ++s)
      for (int r = 0; r < 4; ++r)
        for (int byte = 0; byte < 4; ++byte) {
          const int row = 16 * (t / 32) + t % 32 / 4 + 8 * (r & 1), k = 4 * (t % 4) + byte + 16 * (r >> 1);
          a[(row * steps + s) * 32 + k] = words[(t * words_per_thread + 4 * s + r) * 4 + byte];
        }
  Fragment d(128 * kScores);
  for (int t = 0; t < 128; ++t)
    for (int i = 0; i < kScores; ++i) {
      int sum = 0;
      for (int s = 0; s < steps; ++s)
        for (int k = 0; k < 32; ++k)
          sum += a[(row_of(t / 32, t % 32, i) * steps + s) * 32 + k] * element(b, b0 + s * b_step, lb, column_of(t % 32, i), k);
      d[t * kScores + i] = sum;
    }
  return d;
}

struct Matrix {
  int rows, columns;
  std::vector<int> at;
  Matrix(int r, int c) : rows(r), columns(c), at(static_cast<std::size_t>(r * c)) {}
  int& operator()(int r, int c) { return at[static_cast<std::size_t>(r * columns + c)]; }
};

bool equal(const char* what, const Fragment& d, const std::function<int(int, int)>& want) {
  for (int t = 0; t < 128; ++t)
    for (int i = 0; i < kScores; ++i) {
      const int row = row_of(t / 32, t % 32, i), column = column_of(t % 32, i);
      if (d[t * kScores + i] != want(row, column)) {
        std::printf("%s: row %d column %d is %d, should be %d\n", what, row, column, d[t * kScores + i], want(row, column));
        return false;
      }
    }
  return true;
}

template <int kHeadDim>
bool products() {
  using Shape = Config<kHeadDim, ScaleGroup::block, PartialFormat::f16, false>;
  constexpr auto rows = RowsOperand<Shape>::kLayout;
  constexpr auto columns = TransposedOperand<Shape>::kLayout;
  constexpr auto key_columns = TransposedKeyOperand<Shape>::kLayout;
  std::mt19937 random(7);
  const auto fill = [&](Matrix& m) {
    for (int& x : m.at) x = static_cast<int>(random() % 7) - 3;
  };
  Matrix query(64, kHeadDim), gradient(64, kHeadDim), key(128, kHeadDim);
  fill(query), fill(gradient), fill(key);
  Bytes query_rows(64 * kHeadDim), gradient_columns(64 * kHeadDim), key_rows(128 * kHeadDim), key_transposed(128 * kHeadDim);
  for (int c = 0; c < kHeadDim; ++c) {
    for (int i = 0; i < 64; ++i) {
      query_rows[rows_offset(64, kHeadDim, 0, i, c)] = static_cast<std::int8_t>(query(i, c));
      gradient_columns[transposed_offset(64, kHeadDim, 0, i, c, TokenOrder::pi)] = static_cast<std::int8_t>(gradient(i, c));
    }
    for (int j = 0; j < 128; ++j) {
      key_rows[rows_offset(128, kHeadDim, 0, j, c)] = static_cast<std::int8_t>(key(j, c));
      key_transposed[transposed_offset(128, kHeadDim, 0, j, c, broken == 1 ? TokenOrder::rho : TokenOrder::pi)] =
          static_cast<std::int8_t>(key(j, c));
    }
  }

  std::vector<int> exchange(kQueryStep * kKeyTile, 1000);  // 16-bit elements
  Matrix small(128, 64);                                   // stands for P and dS: key, query
  bool good = true;
  for (int group = 0; group < 2; ++group) {
    const Fragment s = multiply_ss(key_rows, group * 64 * kHeadDim, rows, 256, query_rows, 0, rows, 256, kHeadDim / 32);
    good &= equal("scores", s, [&](int j, int i) {
      int sum = 0;
      for (int c = 0; c < kHeadDim; ++c) sum += key(64 * group + j, c) * query(i, c);
      return sum;
    });
    // Codes of three bits made from the scores: A operand of dV.
    const auto small_of = [](int x) { return ((x % 5) + 5) % 5 - 2; };
    std::vector<std::int8_t> words(128 * kCodeWords * 4);
    for (int t = 0; t < 128; ++t)
      for (int u = 0; u < 4; ++u)
        for (int half = 0; half < 2; ++half) {
          const int i = first_of_word(u, broken == 2 ? 1 - half : half);
          const int from[4] = {i, i + 1, i + 4, i + 5};
          for (int byte = 0; byte < 4; ++byte)
            words[(t * kCodeWords + 2 * u + half) * 4 + byte] = static_cast<std::int8_t>(small_of(s[t * kScores + from[byte]]));
        }
    for (int t = 0; t < 128; ++t)
      for (int i = 0; i < kScores; ++i)
        small(64 * group + row_of(t / 32, t % 32, i), column_of(t % 32, i)) = small_of(s[t * kScores + i]);
    for (int h = 0; h < kHeadDim / 64; ++h) {
      const Fragment dv = multiply_rs(words, kCodeWords, gradient_columns, h * 64 * 16, columns, 32 * kHeadDim, 2);
      good &= equal("dV", dv, [&](int j, int c) {
        int sum = 0;
        for (int i = 0; i < 64; ++i) sum += small(64 * group + j, i) * gradient(i, 64 * h + c);
        return sum;
      });
    }
    // stmatrix.x4.trans: element (row r, column q) of matrix m goes to line 8 m + q, place r.
    for (int warp = 0; warp < 4; ++warp)
      for (int u = 0; u < 4; ++u)
        for (int m = 0; m < 4; ++m)
          for (int lane = 0; lane < 32; ++lane)
            for (int e = 0; e < 2; ++e) {
              const int value = small_of(s[(32 * warp + lane) * kScores + 8 * u + 2 * m + e]);
              const int line_lane = 8 * m + 2 * (lane % 4) + e;
              const int line =
                  store_line(group, warp, line_lane, 0) + u * exchange_offset(16, 0) + (broken == 3 && u == 1 ? 16 : 0);
              exchange[line / 2 + lane / 4] = value;
            }
  }

  // ldmatrix.x4 and the payload of dQ, each 16 keys of which take the lines of their first 8.
  Bytes payload(kQueryStep * kKeyTile * 2);
  for (int warp = 0; warp < 4; ++warp)
    for (int t = 0; t < kKeyGroups; ++t)
      for (int lane = 0; lane < 32; ++lane) {
        int pairs[4][2];
        for (int m = 0; m < 4; ++m)
          for (int e = 0; e < 2; ++e) {
            const int line = load_line(warp, 8 * m + lane / 4, 0) + t * exchange_offset(0, 16);
            pairs[m][e] = exchange[line / 2 + 2 * (lane % 4) + e];
          }
        for (int half = 0; half < 2; ++half) {
          const int bytes[4] = {pairs[half][0], pairs[half][1], pairs[half + 2][0], pairs[half + 2][1]};
          for (int byte = 0; byte < 4; ++byte)
            payload[code_place(warp, lane) + t * exchange_offset(0, 16) + half * exchange_offset(8, 0) + byte] =
                static_cast<std::int8_t>(bytes[byte]);
        }
      }
  for (int h = 0; h < kHeadDim / 64; ++h) {
    const Fragment dq = multiply_ss(payload, 0, PayloadOperand::kLayout, exchange_offset(0, 32), key_transposed, h * 64 * 16,
                                    key_columns, 32 * kHeadDim, 4);
    good &= equal("dQ", dq, [&](int i, int c) {
      int sum = 0;
      for (int j = 0; j < 128; ++j) sum += small(j, i) * key(j, 64 * h + c);
      return sum;
    });
  }
  return good;
}

template <int kBytes>
bool partials() {
  std::vector<int> seen(16 * 128);
  for (int lane = 0; lane < 32; ++lane)
    for (int h = 0; h < 2; ++h)
      for (int v = 0; v < kScores; ++v) ++seen.at(partial_offset<kBytes>(lane, h, v));
  for (int count : seen)
    if (count != 1) return std::printf("partial sums: an element is used %d times\n", count), false;
  return true;
}

/// Masks and ranges of random windows and lengths against plain loops.
bool ranges() {
  std::mt19937 random(11);
  const auto pick = [&](int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); };
  for (int round = 0; round < 3000; ++round) {
    const int length = 1 + pick(700);
    const int left = pick(2) ? -1 : pick(300), right = pick(3) == 0 ? -1 : pick(2) ? 0 : pick(200);
    const Window window{left, right};
    const auto visible = [&](int i, int j) {
      return i < length && j < length && (left < 0 || j >= i - left) && (right < 0 || j <= i + right) && i >= 0 && j >= 0;
    };
    for (int k0 = 0; k0 < length; k0 += kKeyTile) {
      const StepRange range = step_range(window, k0, length);
      for (int b = 0; b * kQueryStep < length + 64; ++b) {
        const int q0 = b * kQueryStep;
        bool any = false, all = true, cut = false;
        for (int i = q0; i < q0 + kQueryStep; ++i)
          for (int j = k0; j < k0 + kKeyTile; ++j) {
            any |= visible(i, j), all &= visible(i, j);
            cut |= right >= 0 && j > i + right;
          }
        const bool inside = b >= range.first && b < range.first + range.count;
        if (any && !inside) return std::printf("step range misses step %d of tile %d\n", b, k0), false;
        if (!inside) continue;
        const int flags = step_flags(window, q0, k0, length);
        if (((flags & kMasked) == 0) != all) return std::printf("masked: step %d tile %d\n", b, k0), false;
        if (((flags & kCut) != 0) != cut) return std::printf("cut: step %d tile %d\n", b, k0), false;
        const int lane = pick(32), key = k0 + 16 * pick(8) + lane / 4;
        const QueryRange first = queries_of_key(window, key, length), second = queries_of_key(window, key + 8, length);
        const int origin = q0 + 2 * (lane % 4) + (broken == 4 ? 1 : 0);
        const Visible bits =
            visible_bits(first.first - origin, first.end - origin) | visible_bits(second.first - origin, second.end - origin) << 16;
        for (int i = 0; i < kScores; ++i)
          if (sees(bits, i) != visible(q0 + column_of(lane, i), key + 8 * (i / 2 % 2)))
            return std::printf("visible: query %d key %d\n", q0 + column_of(lane, i), key + 8 * (i / 2 % 2)), false;
        const int row = q0 + 16 * pick(4) + lane / 4;
        const split::VisibleKeys keys = split::visible_keys(window, row, k0 + (broken == 5 ? 1 : 0), length, lane);
        for (int i = 0; i < split::kTileScores; ++i) {
          const int query = row + 8 * (i / 2 % 2), at = k0 + column_of(lane, i);
          if (query < length && split::sees_key(keys, i) != visible(query, at))
            return std::printf("visible keys: query %d key %d\n", query, at), false;
        }
        const int query = q0 + pick(64);
        int last = -1;
        for (int j = k0; j < k0 + kKeyTile && j < length; ++j)
          if (right < 0 || j <= query + right) last = j - k0;
        if (last >= 0 && query < length && last_key_of_tile(window, query, k0, length) != last)
          return std::printf("last key\n"), false;
      }
    }
  }
  return true;
}

bool check() {
  bool good = products<128>();
  good &= products<64>();
  good &= partials<2>();
  good &= partials<4>();
  good &= ranges();
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  const bool good = check();
  std::printf("index maps: %s\n", good ? "equal" : "WRONG");
  if (argc > 1 && std::string(argv[1]) == "--break") {
    for (broken = 1; broken <= 5; ++broken) {
      if (check()) return std::printf("corruption %d was not noticed\n", broken), 1;
    }
    std::printf("all corruptions noticed\n");
  }
  return good ? 0 : 1;
}
