// SPDX-License-Identifier: Apache-2.0
// Prints what the host knows about the compiled kernels, a CSV row each; scripts/registers joins it with what ptxas says. Needs no GPU.
#include <cstdio>

#include "kernels/cuda/sm90/forward/launch.cuh"
#include "kernels/cuda/sm90/forward/storage.hpp"
#include "kernels/cuda/sm90/launch_persistent.cuh"
#include "kernels/cuda/sm90/sage3/storage.hpp"

namespace {

using flamia::sm90::RowReference;
using flamia::sm90::ScaleGroup;

template <int kHeadDim, ScaleGroup kGroup, RowReference kReference>
void forward_row() {
  using Config = flamia::sm90::forward::Config<kHeadDim, kGroup, kReference, false>;
  const flamia::sm90::forward::Dimensions d = flamia::sm90::forward::dimensions<Config>();
  std::printf(
      "\"sm90::forward::forward_kernel<sm90::forward::Config<%d, (sm90::ScaleGroup)%d, (sm90::RowReference)%d, false> >\","
      "forward,%d,%s,%s,%d,%d,%d,%d,%d,%d,%d,%d\n",
      kHeadDim, static_cast<int>(kGroup), static_cast<int>(kReference), kHeadDim,
      kGroup == ScaleGroup::block   ? "block"
      : kGroup == ScaleGroup::token ? "token"
                                    : "nvfp4",
      kReference == RowReference::phase32 ? "phase32" : "tilesum", d.query_tile, d.key_tile, d.stages, d.threads,
      d.consumer_warpgroups, d.consumer_registers, d.loader_registers, d.shared_bytes + flamia::sm90::kSharedAlign);
}

template <int kHeadDim, ScaleGroup kGroup>
void forward_rows() {
  forward_row<kHeadDim, kGroup, RowReference::phase32>();
  forward_row<kHeadDim, kGroup, RowReference::tilesum>();
}

template <int kHeadDim>
void sage3_row() {
  using Config = flamia::sm90::sage3::Config<kHeadDim>;
  std::printf("\"sm90::sage3::sage3_kernel<sm90::sage3::Config<%d> >\",forward,%d,sage3,phase32,%d,%d,%d,%d,%d,%d,%d,%d\n",
              kHeadDim, kHeadDim, flamia::sm90::sage3::kTile, flamia::sm90::sage3::kTile, Config::kStages, Config::kThreads,
              Config::kConsumers, Config::kConsumerRegisters, Config::kLoaderRegisters,
              static_cast<int>(sizeof(flamia::sm90::sage3::Storage<Config>)) + flamia::sm90::kSharedAlign);
}

}  // namespace

int main() {
  std::printf(
      "kernel,pass,head_dim,scales,reference,query_tile,key_tile,stages,threads,consumer_warpgroups,consumer_registers,"
      "other_registers,shared_bytes\n");
  forward_rows<128, ScaleGroup::block>();
  forward_rows<128, ScaleGroup::token>();
  forward_rows<128, ScaleGroup::nvfp4>();
  forward_rows<64, ScaleGroup::block>();
  forward_rows<64, ScaleGroup::token>();
  forward_rows<64, ScaleGroup::nvfp4>();
  sage3_row<128>();
  sage3_row<64>();
}
