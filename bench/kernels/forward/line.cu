// SPDX-License-Identifier: Apache-2.0
#include "line.hpp"

#include "../../../src/kernels/cuda/sm90/forward/launch.cuh"

namespace bench {
namespace {

using namespace flamia::sm90;
using namespace flamia::sm90::forward;

template <ScaleGroup kGroup, Exponential kKind>
struct LineConfig : Config<128, kGroup, RowReference::tilesum, false> {
  static constexpr Exponential kExponential = kKind;
};

template <ScaleGroup kGroup>
cudaError_t dispatch(const ForwardParams& params, Exponential kind, cudaStream_t stream) {
  return kind == Exponential::mitchell ? launch<LineConfig<kGroup, Exponential::mitchell>>(params, stream)
                                       : launch<LineConfig<kGroup, Exponential::schraudolph>>(params, stream);
}

}  // namespace

cudaError_t launch_line(const ForwardParams& params, ScaleGroup group, Exponential kind, cudaStream_t stream) {
  return group == ScaleGroup::block ? dispatch<ScaleGroup::block>(params, kind, stream)
                                    : dispatch<ScaleGroup::token>(params, kind, stream);
}

}  // namespace bench
