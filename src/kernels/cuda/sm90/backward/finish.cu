// SPDX-License-Identifier: Apache-2.0
// The finish kernel: partial sums of dQ, in fragment order, become rows: rotated back, times the softmax scale and 2^-z. A warp makes 16
// positions of one head at a time, with all its channels in registers, while the copy engine fetches the next.
#include "../../ptx/bulk_copy.cuh"
#include "../../ptx/half.cuh"
#include "../../ptx/matrix.cuh"
#include "../backward_ds16/records.hpp"
#include "../launch_persistent.cuh"
#include "instances.hpp"
#include "numerics/exponent.hpp"
#include "rows_out.cuh"

namespace flamia::sm90::backward {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kGroupsPerTile = kKeyTile / kGroup;
static_assert(kWarps == kGroupsPerTile);

/// A block's place among the (item, head) pairs, heads fastest: its share is a run of them, so that it looks a document up once for many heads.
struct Job {
  std::int64_t item;
  int head;
};

/// 16 positions of a document and one head.
struct Rows {
  std::int64_t slot;   // of the first, counted through all heads
  std::int64_t token;  // of the thread's first; the second is 8 on
  int head;
  int left;         // tokens of the document from the thread's first on
  int exponent[2];  // -z
};

/// A warp's two buffers of partial sums.
template <int kHeadDim, PartialFormat kFormat>
struct alignas(128) Buffers {
  static constexpr int kBytes = kGroup * kHeadDim * (kFormat == PartialFormat::f16 ? 2 : 4);
  std::uint8_t sums[kWarps][2][kBytes];
  std::uint64_t landed[kWarps][2];
};

template <int kHeadDim, PartialFormat kFormat>
struct Finisher {
  using Memory = Buffers<kHeadDim, kFormat>;
  const BackwardParams& params;
  Memory& memory;
  int greatest_unit;
  int warp, lane;
  Document document{};
  int first = 0;  // position of the item's first row

  __device__ __forceinline__ void look_up(std::int64_t at) {
    const WorkItem item = params.items[at];
    document = params.documents[item.document];
    first = item.first;
  }

  /// Begins to fetch the warp's rows of the job into a buffer; none: the document has ended.
  __device__ __forceinline__ bool fetch(Rows& rows, int head, std::uint32_t buffer) const {
    const int position = first + kGroup * warp, row = lane / 4;
    if (position >= document.length) return false;
    rows.slot = head * params.slots + document.slot_start + position;
    rows.token = static_cast<std::int64_t>(document.token_start) + position + row;
    rows.head = head;
    rows.left = document.length - position - row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.exponent[half] = 0;
      if (kFormat == PartialFormat::f16 && rows.left > 8 * half)
        rows.exponent[half] = -clamp(params.dq_exponent[rows.slot + row + 8 * half], -greatest_unit, greatest_unit);
    }
    if (lane == 0) {
      std::uint64_t* const landed = &memory.landed[warp][buffer];
      ptx::barrier_arrive_expect(landed, Memory::kBytes);
      ptx::bulk_copy(memory.sums[warp][buffer],
                     static_cast<const std::uint8_t*>(params.dq_partials) + rows.slot / kGroup * Memory::kBytes, Memory::kBytes,
                     landed);
    }
    return true;
  }

  /// The lane's partial sums as they lie in memory: pairs in FP16 or single FP32 numbers, in the order of accumulators.
  static constexpr int kWords = kFormat == PartialFormat::f16 ? kHeadDim / 4 : kHeadDim / 2;
  __device__ __forceinline__ void load(std::uint32_t (&words)[kWords], std::uint32_t buffer) const {
    constexpr int kBytes = kFormat == PartialFormat::f16 ? 2 : 4, kOfHalf = kScores * kBytes / 4;
    const std::uint32_t from = ptx::shared_address(memory.sums[warp][buffer]);
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const int h = i / kOfHalf, v = i % kOfHalf * (4 / kBytes);
      const float4 four =
          ptx::load_shared_float4(from + h * (Memory::kBytes / (kHeadDim / 64)) + kBytes * partial_offset<kBytes>(lane, 0, v));
      words[i] = __float_as_uint(four.x), words[i + 1] = __float_as_uint(four.y);
      words[i + 2] = __float_as_uint(four.z), words[i + 3] = __float_as_uint(four.w);
    }
  }

  /// The same as numbers, rotated back within 16 channels if Q and K were rotated.
  __device__ __forceinline__ void take(float (&x)[kHeadDim / 2], const std::uint32_t (&words)[kWords], bool rotated) const {
    if constexpr (kFormat == PartialFormat::f16) {
      if (rotated) return turn_sixteens(x, words, lane);
#pragma unroll
      for (int i = 0; i < kWords; ++i) x[2 * i] = ptx::low_f16(words[i]), x[2 * i + 1] = ptx::high_f16(words[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) x[i] = __uint_as_float(words[i]);
      if (rotated) turn_sixteens(x, lane);
    }
  }

  /// The rows' dQ from what take() has left.
  __device__ __forceinline__ void write(float (&x)[kHeadDim / 2], const Rows& rows, GradientFormat format, bool rotated) const {
    constexpr int kGreatest = 100;  // of a factor that is a normal number beside the scales
    float factor[2];
    int rest[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int exponent = clamp(rows.exponent[half], -kGreatest, kGreatest);
      factor[half] = params.softmax_scale * power_of_two(exponent);
      rest[half] = rows.exponent[half] - exponent;
    }
    if (kFormat == PartialFormat::f16 && (rest[0] | rest[1]) != 0) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) x[i] *= power_of_two(clamp(rest[i / 2 % 2], -126, 127));
    }
    const std::int64_t stride = static_cast<std::int64_t>(params.query_heads) * kHeadDim;
    const std::int64_t at = rows.token * stride + static_cast<std::int64_t>(rows.head) * kHeadDim;
    const bool valid[2] = {rows.left > 0, rows.left > 8};
    if (rotated) {
      finish_turn<kHeadDim>(x, factor, lane);
      write_turned_rows<kHeadDim>(params.d_query, format, at, 8 * stride, x, valid, lane);
    } else {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) x[i] *= factor[i / 2 % 2];
      write_rows<kHeadDim>(params.d_query, format, at, 8 * stride, x, valid, lane);
    }
  }
};

template <int kHeadDim, PartialFormat kFormat>
__global__ void __launch_bounds__(kThreads, 2)
    finish_kernel(const __grid_constant__ BackwardParams params, GradientFormat format, bool rotated, int greatest_unit) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  auto& memory = *reinterpret_cast<Buffers<kHeadDim, kFormat>*>(shared_memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (lane < 2) ptx::barrier_init(&memory.landed[warp][lane], 1);
  if (lane < 2) ptx::fence_before_async_use();
  __syncwarp();
  const std::int64_t jobs = static_cast<std::int64_t>(*params.item_count) * params.query_heads;
  std::int64_t job = jobs * blockIdx.x / gridDim.x;
  const std::int64_t end = jobs * (blockIdx.x + 1) / gridDim.x;
  if (job >= end) return;
  Finisher<kHeadDim, kFormat> finisher{params, memory, greatest_unit, warp, lane};
  std::int64_t item = job / params.query_heads;
  int head = static_cast<int>(job - item * params.query_heads);
  finisher.look_up(item);
  Rows next;
  bool any = finisher.fetch(next, head, 0);
  std::uint32_t phases = 0, buffer = 0;  // phases: a bit a buffer
  for (; job < end; ++job) {
    const Rows rows = next;
    const bool now = any;
    const std::uint32_t from = buffer;
    if (job + 1 < end) {
      if (++head == params.query_heads) {
        head = 0;
        finisher.look_up(++item);
      }
      buffer ^= now ? 1 : 0;
      any = finisher.fetch(next, head, buffer);
    }
    if (!now) continue;
    ptx::barrier_wait(&memory.landed[warp][from], phases >> from & 1);
    phases ^= 1u << from;
    std::uint32_t words[Finisher<kHeadDim, kFormat>::kWords];
    finisher.load(words, from);
    __syncwarp();  // the buffer may be filled again
    float x[kHeadDim / 2];
    finisher.take(x, words, rotated);
    finisher.write(x, rows, format, rotated);
  }
}

template <int kHeadDim, PartialFormat kFormat>
cudaError_t enqueue(const BackwardParams& params, const BackwardConfig& config, int greatest_unit, int multiprocessors,
                    cudaStream_t stream) {
  constexpr int kBytes = sizeof(Buffers<kHeadDim, kFormat>), kBlocks = kBytes > 100 * 1024 ? 1 : 2;
  return launch_persistent<finish_kernel<kHeadDim, kFormat>, kBytes>(kBlocks * multiprocessors, kThreads, stream, params,
                                                                     config.gradients, config.rotated, greatest_unit);
}

}  // namespace

cudaError_t launch_finish(const BackwardParams& params, const BackwardConfig& config, int multiprocessors, cudaStream_t stream) {
  const int greatest_unit = config.ds == DsFormat::bf16 ? ds16::kGreatestUnit : 1 << 20;  // the other pass divides its own out
  const auto launch = [&]<int kHeadDim>() {
    const auto enqueued =
        config.partials == PartialFormat::f16 ? enqueue<kHeadDim, PartialFormat::f16> : enqueue<kHeadDim, PartialFormat::f32>;
    return enqueued(params, config, greatest_unit, multiprocessors, stream);
  };
  return config.head_dim == 128 ? launch.template operator()<128>() : launch.template operator()<64>();
}

}  // namespace flamia::sm90::backward
