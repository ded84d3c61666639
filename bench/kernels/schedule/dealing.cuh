// SPDX-License-Identifier: Apache-2.0
// The rivals of claiming tickets one by one: every block knows from the start which tickets are its own. All of them begin with the
// block's own number; tickets are dearest first when the list is sorted. Only the scheduler warp differs from the product's kernel.
#pragma once
#include "../../../src/kernels/cuda/sm90/forward/launch.cuh"

namespace bench {

/// b, b + G, b + 2 G, ...: the block that got the dearest item of one round gets it in every round.
struct OneEnd {
  __device__ static std::uint32_t ticket(std::uint32_t round, std::uint32_t) { return blockIdx.x + round * gridDim.x; }
};

/// To and fro: b, 2 G - 1 - b, 2 G + b, ...
struct Snake {
  __device__ static std::uint32_t ticket(std::uint32_t round, std::uint32_t) {
    return round % 2 == 0 ? round * gridDim.x + blockIdx.x : (round + 1) * gridDim.x - 1 - blockIdx.x;
  }
};

/// From both ends of the list in turn: b, T - 1 - b, G + b, T - 1 - G - b, ...
struct BothEnds {
  __device__ static std::uint32_t ticket(std::uint32_t round, std::uint32_t tickets) {
    const std::uint32_t front = round / 2 * gridDim.x + blockIdx.x;
    if (2 * front >= tickets + (round % 2 == 0 ? 1 : 0)) return tickets;  // the middle: nothing is left
    return round % 2 == 0 ? front : tickets - 1 - front;
  }
};

using Claimed = flamia::sm90::forward::Config<128, flamia::sm90::ScaleGroup::token, flamia::sm90::RowReference::phase32, false>;

template <class Dealing>
struct Dealt : Claimed {};

}  // namespace bench

namespace flamia::sm90::forward {

/// schedule() of loader.cuh with another rule for the next ticket.
template <class Dealing>
__device__ __forceinline__ void deal(const ForwardParams& params, Storage<bench::Dealt<Dealing>>& storage) {
  const auto items = static_cast<std::uint32_t>(*params.item_count);
  const std::uint32_t tickets = items * params.query_heads;
  const int group = params.query_heads / params.key_heads;
  Ring<bench::Claimed::kWorkSlots> ring;
  bool more = true;
  for (std::uint32_t round = 0; more; ++round) {
    ptx::barrier_wait_patiently(&storage.work_taken[ring.slot], ring.parity ^ 1, kSchedulerNap);
    const std::uint32_t ticket = Dealing::ticket(round, tickets);
    more = ticket < tickets;
    Work work{};
    work.length = -1;
    if (more) {
      const Ticket decoded = decode_ticket(ticket, items, params.query_heads, params.heads_per_group);
      const WorkItem item = params.items[decoded.item];
      const Document document = params.documents[item.document];
      work = {document.slot_start, document.token_start, document.length, item.first, decoded.head, decoded.head / group, {}};
    }
    storage.work[ring.slot] = work;
    ptx::barrier_arrive(&storage.work_ready[ring.slot]);
    ring.advance();
  }
}

template <>
__device__ __forceinline__ void schedule<bench::Dealt<bench::OneEnd>>(const ForwardParams& params,
                                                                      Storage<bench::Dealt<bench::OneEnd>>& storage) {
  deal<bench::OneEnd>(params, storage);
}
template <>
__device__ __forceinline__ void schedule<bench::Dealt<bench::Snake>>(const ForwardParams& params,
                                                                     Storage<bench::Dealt<bench::Snake>>& storage) {
  deal<bench::Snake>(params, storage);
}
template <>
__device__ __forceinline__ void schedule<bench::Dealt<bench::BothEnds>>(const ForwardParams& params,
                                                                        Storage<bench::Dealt<bench::BothEnds>>& storage) {
  deal<bench::BothEnds>(params, storage);
}

}  // namespace flamia::sm90::forward
